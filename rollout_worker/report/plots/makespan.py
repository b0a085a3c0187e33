"""Makespans of the training steps, measured and estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from rollout_worker.report.analysis.running import tail_fraction
from rollout_worker.report.analysis.steps import Comparison, mode_name
from rollout_worker.report.analysis.without_drafts import Slowdown, makespan_without_drafts
from rollout_worker.report.plots.style import BLUE, GRAY, MODE_COLORS, ORANGE, RED, figure, steps_axis


def makespans(comparisons: Sequence[Comparison], by_engine: Mapping[str, Slowdown], unit: str) -> go.Figure:
    """Bars of the makespan of each step, with its tail, its measured baselines, and the estimate without drafts."""
    numbers = [one.step.number for one in comparisons]
    tails = [tail_fraction(one.step) * one.step.makespan for one in comparisons]
    bodies = [one.step.makespan - tail for one, tail in zip(comparisons, tails, strict=True)]
    traces = [
        go.Bar(
            name="with drafts",
            x=numbers,
            y=bodies,
            marker={"color": BLUE},
            offsetgroup="measured",
            customdata=[one.step.makespan for one in comparisons],
            hovertemplate="with drafts: %{customdata:.1f} s<extra></extra>",
        ),
        go.Bar(
            name="of which tail",
            x=numbers,
            y=tails,
            base=bodies,
            marker={"color": RED},
            offsetgroup="measured",
            hovertemplate="tail: %{y:.1f} s<extra></extra>",
        ),
    ]
    for mode in sorted({mode for one in comparisons for mode in one.baselines}, reverse=True):
        measured = [(one.step.number, one.baselines[mode].makespan) for one in comparisons if mode in one.baselines]
        traces.append(
            go.Bar(
                name=f"{mode_name(mode)}, measured",
                x=[number for number, _ in measured],
                y=[seconds for _, seconds in measured],
                marker={"color": MODE_COLORS.get(mode, ORANGE)},
                offsetgroup=mode,
                hovertemplate=f"{mode_name(mode)}: %{{y:.1f}} s, measured<extra></extra>",
            )
        )
    estimates = [(one.step.number, makespan_without_drafts(one.step, dict(by_engine))) for one in comparisons]
    known = [(number, seconds) for number, seconds in estimates if seconds is not None]
    if known:
        traces.append(
            go.Bar(
                name="no drafts, estimated",
                x=[number for number, _ in known],
                y=[seconds for _, seconds in known],
                marker={"color": GRAY, "opacity": 0.6, "pattern": {"shape": "/"}},
                offsetgroup="estimated",
                hovertemplate="without drafts: about %{y:.1f} s, by the cost model<extra></extra>",
            )
        )
    return figure(
        traces,
        x=unit,
        y="makespan (seconds)",
        barmode="group",
        xaxis={"title": {"text": unit}, **steps_axis(numbers)},
    )
