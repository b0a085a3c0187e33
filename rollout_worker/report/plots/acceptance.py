"""Acceptance of draft tokens by step, source, position and age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    steps_axis,
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
    return figure(
        traces, x=unit, y="accepted per decoding step", xaxis={"title": {"text": unit}, **steps_axis(numbers)}
    )


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
        xaxis={"title": {"text": unit}, **steps_axis(numbers)},
    )


def acceptance_by_position(counts: Mapping[int, Acceptance]) -> go.Figure:
    """The acceptance rate of draft tokens at each position, and how many were verified there."""
    traces = [
        go.Bar(
            name="verified",
            x=list(counts),
            y=[one.drafted for one in counts.values()],
            yaxis="y2",
            marker={"color": GRAY, "opacity": 0.35},
            hovertemplate="%{y:,} verified<extra></extra>",
        ),
        go.Scatter(
            name="acceptance rate",
            x=list(counts),
            y=[one.rate for one in counts.values()],
            mode="lines+markers",
            line={"color": GREEN, "width": 2},
            hovertemplate="%{y:.0%} accepted<extra></extra>",
        ),
    ]
    return _rate_figure(traces, "position in the draft", "draft tokens")


def acceptance_by_age(counts: Mapping[int, Acceptance]) -> go.Figure:
    """The acceptance rate of draft tokens from the history by the age of the rollouts behind them."""
    traces = [
        go.Bar(
            name="drafted",
            x=list(counts),
            y=[one.drafted for one in counts.values()],
            yaxis="y2",
            marker={"color": GRAY, "opacity": 0.35},
            hovertemplate="%{y:,.0f} drafted<extra></extra>",
        ),
        go.Scatter(
            name="acceptance rate",
            x=list(counts),
            y=[one.rate for one in counts.values()],
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
            hovertemplate="%{y:.0%} accepted<extra></extra>",
        ),
    ]
    return _rate_figure(traces, "age in generations", "draft tokens")


def _rate_figure(traces: Sequence[go.Bar | go.Scatter], x: str, counts: str) -> go.Figure:
    return figure(
        traces,
        x=x,
        y="acceptance rate",
        yaxis={
            "title": {"text": "acceptance rate"},
            "tickformat": ".0%",
            "rangemode": "tozero",
            "overlaying": "y2",
            "automargin": True,
        },
        yaxis2={
            "title": {"text": counts},
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "automargin": True,
        },
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )
