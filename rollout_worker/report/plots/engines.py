"""Where the time of the engines went, and what their governors decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from rollout_worker.report.analysis.engine_time import EngineTime
from rollout_worker.report.analysis.governor import EngineHistory, disabled_spans
from rollout_worker.report.plots.style import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    escaped,
    figure,
    time_unit,
)


def time_by_engine(times: Mapping[str, EngineTime]) -> go.Figure:
    """Stacked bars of the time of each engine."""
    scale, unit = time_unit(max(time.total for time in times.values()))
    parts = [
        ("decoding", [time.decoding for time in times.values()], BLUE),
        ("drafting", [min(time.drafting, time.busy) for time in times.values()], GREEN),
        ("paused for weights", [time.weights for time in times.values()], PURPLE),
        ("idle, rollouts waiting", [time.idle_with_waiting for time in times.values()], RED),
        ("idle while others finish", [time.idle_in_tail for time in times.values()], ORANGE),
        ("idle, nothing to sample", [time.idle for time in times.values()], GRAY),
    ]
    totals = [max(time.total, 1e-9) for time in times.values()]
    traces = [
        go.Bar(
            name=name,
            orientation="h",
            y=[escaped(engine) for engine in times],
            x=[seconds / scale for seconds in values],
            marker={"color": color},
            customdata=[seconds / total for seconds, total in zip(values, totals, strict=True)],
            hovertemplate=f"{name}: %{{x:.1f}} {unit} (%{{customdata:.0%}})<extra></extra>",
        )
        for name, values, color in parts
        if any(values)
    ]
    return figure(
        traces,
        x=unit,
        y="",
        barmode="stack",
        height=max(240, 130 + 34 * len(times)),
        yaxis={"type": "category", "automargin": True, "autorange": "reversed"},
    )


def saved_over_time(histories: Mapping[str, EngineHistory], start: float) -> go.Figure:
    """The share of the decoding time that drafting saved; times in which it was disabled are shaded."""
    scale, unit = time_unit(_duration(histories, start))
    traces = [
        go.Scatter(
            name=escaped(engine),
            x=[(time - start) / scale for time in history.saved_times],
            y=history.saved,
            mode="lines",
            line={"color": _color(index), "width": 1.5, "shape": "vh"},
            hovertemplate="%{y:.0%} saved<extra></extra>",
        )
        for index, (engine, history) in enumerate(histories.items())
        if history.saved
    ]
    shapes = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": (begin - start) / scale,
            "x1": (end - start) / scale,
            "y0": index / len(histories),
            "y1": (index + 1) / len(histories),
            "fillcolor": _color(index),
            "opacity": 0.15,
            "line": {"width": 0},
        }
        for index, history in enumerate(histories.values())
        for begin, end in disabled_spans(history)
    ]
    return figure(
        traces,
        x=f"{unit} since the first request",
        y="saved, by the cost model",
        shapes=shapes,
        showlegend=True,
        yaxis={"title": {"text": "saved, by the cost model"}, "tickformat": ".0%", "automargin": True},
    )


def trials_over_time(histories: Mapping[str, EngineHistory], start: float) -> go.Figure:
    """How often drafting was disabled so far, and how many tokens were drafted in trials."""
    scale, unit = time_unit(_duration(histories, start))
    traces = []
    for index, (engine, history) in enumerate(histories.items()):
        times = [(time - start) / scale for time in history.times]
        for name, values, axis, dash in (
            (f"{escaped(engine)}: stops", history.stops, "y", "solid"),
            (f"{escaped(engine)}: trial tokens", history.trial_tokens, "y2", "dot"),
        ):
            traces.append(
                go.Scatter(
                    name=name,
                    x=times,
                    y=values,
                    yaxis=axis,
                    mode="lines",
                    line={"color": _color(index), "width": 1.5, "dash": dash, "shape": "hv"},
                    hovertemplate=f"{name} %{{y:,}}<extra></extra>",
                )
            )
    return figure(
        traces,
        x=f"{unit} since the first request",
        y="stops so far",
        yaxis2={
            "title": {"text": "trial tokens so far"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "automargin": True,
        },
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )


def cost_over_time(histories: Mapping[str, EngineHistory], start: float) -> go.Figure:
    """The cost model of each engine: the constant part of a step, and the time per verified token."""
    scale, unit = time_unit(_duration(histories, start))
    traces = []
    for index, (engine, history) in enumerate(histories.items()):
        known = [position for position, base in enumerate(history.base_ms) if base > 0]
        times = [(history.times[position] - start) / scale for position in known]
        for name, values, axis, dash in (
            (f"{escaped(engine)}: step", history.base_ms, "y", "solid"),
            (f"{escaped(engine)}: token", history.token_ms, "y2", "dot"),
        ):
            if known:
                traces.append(
                    go.Scatter(
                        name=name,
                        x=times,
                        y=[values[position] for position in known],
                        yaxis=axis,
                        mode="lines",
                        line={"color": _color(index), "width": 1.5, "dash": dash},
                        hovertemplate=f"{name} %{{y:.3f}} ms<extra></extra>",
                    )
                )
    return figure(
        traces,
        x=f"{unit} since the first request",
        y="ms per step",
        yaxis2={
            "title": {"text": "ms per token"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "automargin": True,
        },
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )


def _duration(histories: Mapping[str, EngineHistory], start: float) -> float:
    return max((history.times[-1] - start for history in histories.values()), default=0.0)


def _color(index: int) -> str:
    colors: Sequence[str] = SERIES[:-1]
    return colors[index % len(colors)]
