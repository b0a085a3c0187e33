"""A Gantt chart of the rollouts of a step over the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from rollout_worker.report.analysis.lanes import Bar, arrange
from rollout_worker.report.analysis.running import tail_start
from rollout_worker.report.analysis.steps import Step
from rollout_worker.report.plots.style import BLUE, GRAY, ORANGE, RED, escaped, figure, time_unit

MAX_BARS = 2000
"""Number of rollouts that are drawn of one step, so that the page stays fast."""


def gantt(step: Step) -> go.Figure:
    """A bar for each rollout, in rows per engine."""
    bars, engines = arrange(step, MAX_BARS)
    tail = tail_start(step)
    scale, unit = time_unit(step.makespan)
    kinds = {
        "ended before the tail": ([bar for bar in bars if _kind(bar, tail) == "ended before the tail"], BLUE),
        "ran in the tail": ([bar for bar in bars if _kind(bar, tail) == "ran in the tail"], RED),
        "cut off at max_tokens": ([bar for bar in bars if _kind(bar, tail) == "cut off at max_tokens"], ORANGE),
        "interrupted": ([bar for bar in bars if _kind(bar, tail) == "interrupted"], GRAY),
    }
    traces = [
        go.Bar(
            name=name,
            orientation="h",
            y=[bar.row for bar in kind],
            base=[(bar.scored.started - step.start) / scale for bar in kind],
            x=[(bar.scored.rollout.finished_at - bar.scored.started) / scale for bar in kind],
            width=0.8,
            marker={"color": color, "line": {"width": 0}},
            customdata=[_details(bar) for bar in kind],
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name, (kind, color) in kinds.items()
        if kind
    ]
    rows = sum(engine.count for engine in engines)
    lines = [_line(engine.first - 0.5) for engine in engines[1:]]
    shade = {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": (tail - step.start) / scale,
        "x1": step.makespan / scale,
        "y0": 0,
        "y1": 1,
        "fillcolor": RED,
        "opacity": 0.1,
        "line": {"width": 0},
        "layer": "below",
    }
    return figure(
        traces,
        x=f"{unit} since the first request",
        y="",
        height=min(900, max(280, 110 + 11 * rows)),
        barmode="overlay",
        hovermode="closest",
        shapes=[shade, *lines],
        yaxis={
            "tickmode": "array",
            "tickvals": [engine.first + (engine.count - 1) / 2 for engine in engines],
            "ticktext": [escaped(engine.engine) for engine in engines],
            "range": [rows - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )


def drawn_note(steps: Sequence[Step]) -> str:
    """Return a sentence on rollouts that are not drawn; empty if all are."""
    if all(len(step.sampled) <= MAX_BARS for step in steps):
        return ""
    return f" Of a step with more than {MAX_BARS:,} rollouts, those that ran the longest are drawn."


def _kind(bar: Bar, tail: float) -> str:
    if bar.scored.cut_off:
        return "cut off at max_tokens"
    if bar.scored.rollout.finish_reason != "stop":
        return "interrupted"
    return "ran in the tail" if bar.scored.rollout.finished_at > tail else "ended before the tail"


def _details(bar: Bar) -> str:
    rollout = bar.scored.rollout
    steps = max(1, rollout.decoding_steps)
    lines = [
        f"problem {rollout.problem_id[:40]}, sample {rollout.sample}",
        f"{rollout.tokens:,} tokens in {rollout.finished_at - bar.scored.started:.2f} s, {rollout.finish_reason}",
        f"{rollout.accepted_tokens / steps:.2f} accepted per step",
    ]
    if bar.scored.reward is not None:
        lines.append(f"reward {bar.scored.reward:.3g}")
    return "<br>".join(escaped(line) for line in lines)


def _line(y: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"color": GRAY, "width": 1, "dash": "dot"},
    }
