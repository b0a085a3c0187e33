"""Running rollouts over time: of a step with and without drafts, and of the whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from rollout_api.protocol.timeline import Measurement
from rollout_worker.report.analysis.running import RunningCount, intervals_of, running_counts, tail_start, thinned
from rollout_worker.report.analysis.steps import Comparison, Step, mode_name
from rollout_worker.report.analysis.without_drafts import Slowdown, intervals_without_drafts
from rollout_worker.report.plots.style import BLUE, GRAY, MODE_COLORS, ORANGE, RED, figure, time_unit


def running_in_step(comparison: Comparison, by_engine: Mapping[str, Slowdown]) -> go.Figure:
    """Lines of the running rollouts since the start of a step."""
    step = comparison.step
    lines: list[tuple[str, list[RunningCount], dict[str, Any]]] = [
        ("with drafts", _since_start(step), {"color": BLUE, "width": 2.5})
    ]
    for mode, baseline in comparison.baselines.items():
        color = MODE_COLORS.get(mode, ORANGE)
        lines.append((f"{mode_name(mode)}, measured", _since_start(baseline), {"color": color, "width": 1.5}))
    if by_engine:
        estimated = running_counts(intervals_without_drafts(step, dict(by_engine)))
        lines.append(("no drafts, estimated", estimated, {"color": GRAY, "width": 2, "dash": "dot"}))
    scale, unit = time_unit(max((counts[-1].time for _, counts, _ in lines if counts), default=0.0))
    traces = [
        go.Scatter(
            name=name,
            x=[one.time / scale for one in thinned(counts)],
            y=[one.count for one in thinned(counts)],
            mode="lines",
            line={**line, "shape": "hv"},
            hovertemplate=f"%{{y}} running after %{{x:.1f}} {unit}<extra>{name}</extra>",
        )
        for name, counts, line in lines
    ]
    tail = {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": (tail_start(step) - step.start) / scale,
        "x1": step.makespan / scale,
        "y0": 0,
        "y1": 1,
        "fillcolor": RED,
        "opacity": 0.12,
        "line": {"width": 0},
        "label": {"text": "tail", "textposition": "top left", "font": {"color": RED}},
    }
    return figure(traces, x=f"{unit} since the first request", y="running rollouts", shapes=[tail])


def running_in_job(steps: Sequence[Step], measurements: Sequence[Measurement]) -> go.Figure:
    """Lines of the running and the waiting rollouts of the whole job."""
    start = min(step.start for step in steps)
    end = max(step.end for step in steps)
    scale, unit = time_unit(end - start)
    traces = []
    for mode in sorted({step.draft_mode for step in steps}):
        intervals = [one for step in steps if step.draft_mode == mode for one in intervals_of(step)]
        counts = thinned(running_counts(intervals))
        traces.append(
            go.Scatter(
                name=f"running, {mode_name(mode)}",
                x=[(one.time - start) / scale for one in counts],
                y=[one.count for one in counts],
                mode="lines",
                line={"shape": "hv", "color": MODE_COLORS.get(mode, ORANGE), "width": 1.5},
                fill="tozeroy",
                hovertemplate="%{y} running<extra></extra>",
            )
        )
    traces.append(
        go.Scatter(
            name="waiting",
            x=[(one.time - start) / scale for one in measurements],
            y=[one.waiting for one in measurements],
            mode="lines",
            line={"shape": "hv", "color": RED, "width": 1, "dash": "dot"},
            hovertemplate="%{y} waiting<extra></extra>",
        )
    )
    return figure(traces, x=f"{unit} since the first request", y="rollouts")


def _since_start(step: Step) -> list[RunningCount]:
    return [replace(one, time=one.time - step.start) for one in running_counts(intervals_of(step))]
