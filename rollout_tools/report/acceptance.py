"""How many draft tokens were accepted, by step, source, position and age: numbers and plots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rollout_tools.report.recording import DraftCounts
from rollout_tools.report.steps import Comparison, Step, mode_name
from rollout_tools.report.style import (
    BLUE,
    GRAY,
    GREEN,
    MODE_COLORS,
    ORANGE,
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


def by_age(counts: Mapping[int, Sequence[float]]) -> dict[int, Acceptance]:
    """Return the draft tokens from the history by the age of the rollouts behind them."""
    return {age: Acceptance(*of_age) for age, of_age in sorted(counts.items())}


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


def acceptance_by_age(counts: Mapping[int, Acceptance]) -> go.Figure:
    """The acceptance rate of draft tokens from the history by the age of the rollouts behind them."""
    return _rate_figure(_rates(counts, BLUE), numbers_axis("age in generations", list(counts)))


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
