"""Acceptance of draft tokens by step, source, position and age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from rollout_worker.report.analysis.acceptance import Acceptance, by_source
from rollout_worker.report.analysis.steps import Comparison, Step, mode_name
from rollout_worker.report.plots.style import (
    BLUE,
    GRAY,
    GREEN,
    MODE_COLORS,
    ORANGE,
    SOURCE_COLORS,
    SOURCE_NAMES,
    figure,
    numbers_axis,
    second_axis,
)


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
        go.Scatter(
            name=mode_name(mode),
            x=[number for number, _ in points],
            y=[step.accepted_per_step for _, step in points],
            mode="lines+markers",
            line={"color": MODE_COLORS.get(mode, ORANGE), "width": 2},
            hovertemplate="%{y:.2f} accepted per step<extra></extra>",
        )
        for mode, points in series.items()
    ]
    return figure(traces, x=unit, y="accepted per decoding step", xaxis=numbers_axis(unit, numbers))


def accepted_by_source(steps: Sequence[Step], unit: str) -> go.Figure:
    """Stacked bars of accepted draft tokens per decoding step, by source."""
    numbers = [step.number for step in steps]
    counts = [by_source(step) for step in steps]
    traces = [
        go.Bar(
            name=SOURCE_NAMES[source],
            x=numbers,
            y=[
                count.get(source, Acceptance(0, 0)).accepted / max(1, step.decoding_steps)
                for step, count in zip(steps, counts, strict=True)
            ],
            marker={"color": SOURCE_COLORS[source]},
            customdata=[
                [acceptance.rate, acceptance.accepted, acceptance.drafted]
                for acceptance in (count.get(source, Acceptance(0, 0)) for count in counts)
            ],
            hovertemplate=f"{SOURCE_NAMES[source]}: %{{y:.2f}} accepted per step, %{{customdata[0]:.0%}} of "
            "%{customdata[2]:,} draft tokens<extra></extra>",
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
        go.Bar(
            name="verified",
            x=list(counts),
            y=[one.drafted for one in counts.values()],
            yaxis="y2",
            marker={"color": GRAY, "opacity": 0.35},
            hovertemplate="%{y:,.0f} verified<extra></extra>",
        ),
        go.Scatter(
            name="acceptance rate",
            x=list(counts),
            y=[one.rate for one in counts.values()],
            mode="lines+markers",
            line={"color": color, "width": 2},
            hovertemplate="%{y:.0%} accepted<extra></extra>",
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
