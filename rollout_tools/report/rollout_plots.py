"""Accepted draft tokens, lengths of rollouts, and how well earlier lengths predict them: numbers and plots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rollout_api.length_stats import LengthClass, LengthStats
from rollout_tools.report.recording import ClassCounts, DraftCounts, PastLength
from rollout_tools.report.steps import Comparison, Step, mode_name
from rollout_tools.report.style import (
    BLUE,
    GRAY,
    GREEN,
    MODE_COLORS,
    ORANGE,
    RED,
    SOURCE_COLORS,
    SOURCE_NAMES,
    bars,
    figure,
    line,
    numbers_axis,
    second_axis,
)


class Acceptance(NamedTuple):
    """Verified draft tokens, and those of them that were accepted."""

    drafted: float
    accepted: float

    @property
    def rate(self) -> float:
        """The acceptance rate; 0 without draft tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0


def by_source(step: Step) -> dict[str, Acceptance]:
    """Return the draft tokens of a step by their source."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in step.scored:
        drafted.update(one.rollout.draft_tokens_by_source)
        accepted.update(one.rollout.accepted_tokens_by_source)
    return {source: Acceptance(count, accepted[source]) for source, count in drafted.items()}


def by_position(counts: Iterable[DraftCounts]) -> dict[str, Acceptance]:
    """Return the draft tokens of all engines by their position in the draft, in order."""
    sums: defaultdict[str, Acceptance] = defaultdict(lambda: Acceptance(0, 0))
    for one in sorted(counts, key=lambda one: one.number):
        known = sums[one.position]
        sums[one.position] = Acceptance(known.drafted + one.drafted, known.accepted + one.accepted)
    return dict(sums)


def accepted_by_step(comparisons: Sequence[Comparison], unit: str) -> go.Figure:
    """Lines of accepted draft tokens per decoding step, in each draft mode."""
    numbers = [one.step.number for one in comparisons]
    series: dict[str, list[tuple[int, Step]]] = {}
    for one in comparisons:
        series.setdefault(one.step.draft_mode, []).append((one.step.number, one.step))
        for mode, baseline in one.baselines.items():
            if baseline.accepted_per_step:
                series.setdefault(mode, []).append((one.step.number, baseline))
    traces = [
        line(
            mode_name(mode),
            [number for number, _ in points],
            [step.accepted_per_step for _, step in points],
            "%{y:.2f} accepted per step<extra></extra>",
            color=MODE_COLORS.get(mode, ORANGE),
        )
        for mode, points in series.items()
    ]
    return figure(traces, x=unit, y="accepted per decoding step", xaxis=numbers_axis(unit, numbers))


def accepted_by_source(steps: Sequence[Step], unit: str) -> go.Figure:
    """Stacked bars of accepted draft tokens per decoding step, by source."""
    numbers = [step.number for step in steps]
    counts = [by_source(step) for step in steps]
    traces = [
        bars(
            SOURCE_NAMES[source],
            numbers,
            [
                count.get(source, Acceptance(0, 0)).accepted / max(1, step.decoding_steps)
                for step, count in zip(steps, counts, strict=True)
            ],
            f"{SOURCE_NAMES[source]}: %{{y:.2f}} accepted per step, %{{customdata[0]:.0%}} of "
            "%{customdata[2]:,} draft tokens<extra></extra>",
            SOURCE_COLORS[source],
            customdata=[
                [acceptance.rate, acceptance.accepted, acceptance.drafted]
                for acceptance in (count.get(source, Acceptance(0, 0)) for count in counts)
            ],
        )
        for source in SOURCE_NAMES
        if any(source in count for count in counts)
    ]
    return figure(
        traces,
        x=unit,
        y="accepted per decoding step",
        barmode="stack",
        xaxis=numbers_axis(unit, numbers),
    )


def acceptance_by_position(counts: Mapping[str, Acceptance]) -> go.Figure:
    """The acceptance rate of draft tokens at each position, and how many were verified there."""
    axis = {"title": {"text": "position in the draft"}, "type": "category", "automargin": True}
    return _rate_figure(_rates(counts, GREEN), axis)


def drafts_by_class(counts: Sequence[ClassCounts]) -> go.Figure:
    """Bars of the draft tokens per step of a rollout in each length class: permitted, verified and accepted."""
    names = [length_class.value for length_class in LengthClass]
    in_class = [[one for one in counts if one.length_class == name] for name in names]
    steps = [max(1, sum(one.steps for one in of_class)) for of_class in in_class]
    parts = (
        ("permitted", [sum(one.budget for one in of_class) for of_class in in_class], GRAY),
        ("verified", [sum(one.drafted for one in of_class) for of_class in in_class], BLUE),
        ("accepted", [sum(one.accepted for one in of_class) for of_class in in_class], GREEN),
    )
    traces = [
        bars(
            name,
            names,
            [count / divisor for count, divisor in zip(tokens, steps, strict=True)],
            f"%{{y:.2f}} {name} per step, in %{{customdata:.0%}} of the steps of rollouts<extra></extra>",
            color,
            customdata=[divisor / sum(steps) for divisor in steps],
        )
        for name, tokens, color in parts
    ]
    axis = {"title": {"text": "length class"}, "type": "category", "automargin": True}
    return figure(traces, x="", y="draft tokens per step of a rollout", barmode="group", xaxis=axis)


def _rates(counts: Mapping[str, Acceptance] | Mapping[int, Acceptance], color: str) -> list[go.Bar | go.Scatter]:
    """Return bars of the numbers of verified draft tokens, and a line of the acceptance rates."""
    return [
        bars(
            "verified",
            list(counts),
            [one.drafted for one in counts.values()],
            "%{y:,.0f} verified<extra></extra>",
            GRAY,
            yaxis="y2",
            marker={"color": GRAY, "opacity": 0.35},
        ),
        line(
            "acceptance rate",
            list(counts),
            [one.rate for one in counts.values()],
            "%{y:.0%} accepted<extra></extra>",
            color=color,
        ),
    ]


def _rate_figure(traces: Sequence[go.Bar | go.Scatter], axis: Mapping[str, Any]) -> go.Figure:
    return figure(
        traces,
        x="",
        y="acceptance rate",
        xaxis=axis,
        yaxis={
            "title": {"text": "acceptance rate"},
            "tickformat": ".0%",
            "rangemode": "tozero",
            "tickmode": "auto",
            "overlaying": "y2",
            "automargin": True,
        },
        yaxis2=second_axis("draft tokens"),
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities whose calibration is examined."""


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
