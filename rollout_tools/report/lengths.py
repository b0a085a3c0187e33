"""Lengths of rollouts, and how well those of earlier generations predict them: numbers and plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

import plotly.graph_objects as go

from rollout_api.length_stats import LengthStats
from rollout_tools.report.recording import PastLength
from rollout_tools.report.steps import Step
from rollout_tools.report.style import BLUE, GRAY, GREEN, ORANGE, RED, figure, line, numbers_axis

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities for which the calibration is examined."""


class PredictedLengths(NamedTuple):
    """What the earlier generations of a problem predict about a generation; None is beyond all observed lengths."""

    generation: int
    low: float | None
    """Quantile of 10 %."""
    median: float | None
    high: float | None
    """Quantile of 90 %."""


@dataclass(frozen=True)
class CalibrationPoint:
    """How often lengths were at most a predicted quantile."""

    predicted: float
    """Probability of the quantile."""
    observed: float
    """Share of the rollouts that were at most as long."""
    count: int
    """Number of rollouts."""


def by_generation(entries: Sequence[PastLength]) -> dict[int, list[PastLength]]:
    """Return the rollouts of each generation, oldest first."""
    grouped: defaultdict[int, list[PastLength]] = defaultdict(list)
    for entry in entries:
        grouped[entry.generation].append(entry)
    return dict(sorted(grouped.items()))


def stats_before(entries: Sequence[PastLength]) -> dict[int, LengthStats]:
    """Return, for each generation but the first, the length statistics of the earlier ones."""
    earlier: list[PastLength] = []
    statistics: dict[int, LengthStats] = {}
    for generation, of_generation in by_generation(entries).items():
        if earlier:
            statistics[generation] = LengthStats.from_lengths(
                (entry.generation, entry.length, entry.cut_off) for entry in earlier
            )
        earlier += of_generation
    return statistics


def predictions(entries: Sequence[PastLength]) -> list[PredictedLengths]:
    """Return what was predicted for each generation but the first."""
    return [
        PredictedLengths(generation, stats.quantile(0.1), stats.quantile(0.5), stats.quantile(0.9))
        for generation, stats in stats_before(entries).items()
    ]


def calibration(lengths: Mapping[str, Sequence[PastLength]]) -> list[CalibrationPoint]:
    """Compare the quantiles that earlier generations predict with the lengths of all problems' rollouts.

    A rollout that was cut off below a quantile does not count there, because its full length is unknown.
    """
    below: defaultdict[float, int] = defaultdict(int)
    count: defaultdict[float, int] = defaultdict(int)
    for entries in lengths.values():
        of_generation = by_generation(entries)
        for generation, stats in stats_before(entries).items():
            for probability in QUANTILES:
                limit = stats.quantile(probability)
                if limit is None:
                    continue
                for entry in of_generation[generation]:
                    if entry.length > limit or not entry.cut_off:
                        count[probability] += 1
                        below[probability] += entry.length <= limit
    return [CalibrationPoint(one, below[one] / count[one], count[one]) for one in QUANTILES if count[one]]


def lengths_by_step(steps: Sequence[Step], unit: str) -> go.Figure:
    """Lines of the quantiles of the lengths of each step's rollouts."""
    numbers = [step.number for step in steps]
    lengths = [sorted(one.rollout.tokens for one in step.sampled) or [0] for step in steps]
    deciles = [quantiles(one, n=10, method="inclusive") if len(one) > 1 else one * 9 for one in lengths]
    lines: list[tuple[str, Sequence[float], str, str]] = [
        ("longest", [one[-1] for one in lengths], RED, "dot"),
        ("90 %", [one[8] for one in deciles], ORANGE, "solid"),
        ("median", [one[4] for one in deciles], BLUE, "solid"),
        ("10 %", [one[0] for one in deciles], GREEN, "solid"),
    ]
    traces = [
        line(name, numbers, values, f"{name}: %{{y:,.0f}} tokens<extra></extra>", color=color, dash=dash)
        for name, values, color, dash in lines
    ]
    return figure(traces, x=unit, y="tokens", xaxis=numbers_axis(unit, numbers))


def lengths_of_problem(entries: Sequence[PastLength]) -> go.Figure:
    """The lengths of a problem's rollouts in each generation, and the quantiles that earlier ones had predicted."""
    groups = [
        ("ended by itself", [entry for entry in entries if not entry.cut_off], "circle", BLUE),
        ("cut off", [entry for entry in entries if entry.cut_off], "triangle-up", RED),
    ]
    traces = [
        go.Scatter(
            name=name,
            x=[entry.generation + _offset(index, len(group)) for index, entry in enumerate(group)],
            y=[entry.length for entry in group],
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 7, "opacity": 0.85},
            customdata=["no reward" if entry.reward is None else f"reward {entry.reward:.3g}" for entry in group],
            hovertemplate="%{y:,} tokens, %{customdata}<extra></extra>",
        )
        for name, group, symbol, color in groups
        if group
    ]
    predicted = predictions(entries)
    for name, values, dash in (
        ("predicted 90 %", [one.high for one in predicted], "dash"),
        ("predicted median", [one.median for one in predicted], "solid"),
        ("predicted 10 %", [one.low for one in predicted], "dash"),
    ):
        traces.append(
            line(
                name,
                [one.generation for one in predicted],
                values,
                f"{name}: %{{y:,.0f}} tokens<extra></extra>",
                color=ORANGE,
                dash=dash,
                width=1.5,
                marker={"symbol": "line-ew-open", "size": 14},
            )
        )
    generations = list(by_generation(entries))
    return figure(
        traces,
        x="generation",
        y="tokens",
        xaxis={**numbers_axis("generation", generations), "range": [generations[0] - 0.5, generations[-1] + 0.5]},
        showlegend=True,
    )


def calibration_plot(lengths: Mapping[str, Sequence[PastLength]]) -> go.Figure:
    """How often lengths were at most each predicted quantile; on the diagonal, predictions are right."""
    points = calibration(lengths)
    traces = [
        go.Scatter(
            name="ideal",
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            line={"color": GRAY, "dash": "dot", "width": 1.5},
            hoverinfo="skip",
        ),
        line(
            "all problems",
            [one.predicted for one in points],
            [one.observed for one in points],
            "%{y:.0%} of %{customdata:,} rollouts were at most as long as the predicted quantile of "
            "%{x:.0%}<extra></extra>",
            color=BLUE,
            customdata=[one.count for one in points],
        ),
    ]
    share = {"tickformat": ".0%", "range": [0, 1.02], "automargin": True}
    return figure(
        traces,
        x="predicted probability",
        y="observed share",
        xaxis={"title": {"text": "predicted probability"}, **share},
        yaxis={"title": {"text": "observed share"}, **share},
    )


def _offset(index: int, count: int) -> float:
    """Return by how much a point is moved sideways, so that rollouts of equal length are visible."""
    return 0.0 if count < 2 else ((index * 7) % 15 - 7) / 60
