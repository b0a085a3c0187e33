"""Numbers and plots of how each engine spent its time, and of its governor's decisions over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_tools.report.steps import running_counts, timed_steps
from rollout_tools.report.style import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    bars,
    escaped,
    figure,
    line,
    second_axis,
    shade,
    time_unit,
)

_INTERRUPTION_S = 60.0
"""Shortest interruption, in seconds."""
_INTERRUPTION_FACTOR = 5.0
"""Minimum length of an interruption, relative to the distance of the measurements before it."""


@dataclass
class EngineTime:
    """Seconds of one engine, from its first measurement to its last one."""

    busy: float = 0.0
    """It had rollouts to decode."""
    drafting: float = 0.0
    """The drafter worked; a part of the busy time."""
    weights: float = 0.0
    """Decoding paused for a weight update."""
    idle_with_waiting: float = 0.0
    """It had no rollout, although some waited that it could have sampled."""
    idle_in_tail: float = 0.0
    """It had no rollout and none waited for it, but other engines had some that it could have sampled."""
    idle: float = 0.0
    """There were no rollouts that it could have sampled."""
    disabled: float = 0.0
    """Drafting was disabled while it had rollouts; a part of the busy time."""

    @property
    def decoding(self) -> float:
        """It had rollouts, and the drafter did not work."""
        return max(0.0, self.busy - self.drafting)

    @property
    def total(self) -> float:
        """All seconds."""
        return self.busy + self.weights + self.idle_with_waiting + self.idle_in_tail + self.idle


def engine_times(measurements: Sequence[Measurement], ended: Sequence[EndedRollout]) -> dict[str, EngineTime]:
    """Divide the time of each engine, by its name, between each two measurements.

    An engine without speculation serves only some draft modes while there are others. A rollout counts as one that an
    engine could have sampled if the engine has sampled another one in the same draft mode.
    """
    modes: defaultdict[str, set[str]] = defaultdict(set)
    for rollout in ended:
        modes[rollout.engine_name].add(rollout.draft_mode)
    waiting, running = _Activity(ended, _waiting_time), _Activity(ended, _running_time)
    times: defaultdict[str, EngineTime] = defaultdict(EngineTime)
    for before, after in pairwise(measurements):
        earlier = {engine.name: engine for engine in before.engines}
        for engine in after.engines:
            if engine.name not in earlier:
                continue
            time = times[engine.name]
            seconds = _add_measured(time, earlier[engine.name], engine, max(0.0, after.time - before.time))
            if earlier[engine.name].assigned or earlier[engine.name].running:
                time.busy += seconds
                time.disabled += seconds * (earlier[engine.name].drafting_disabled > 0)
            elif waiting.at(before.time, modes[engine.name]):
                time.idle_with_waiting += seconds
            elif running.at(before.time, modes[engine.name]):
                time.idle_in_tail += seconds
            else:
                time.idle += seconds
    return dict(sorted(times.items()))


def interruptions(measurements: Sequence[Measurement]) -> list[tuple[float, float]]:
    """Return the times without measurements, when nothing coordinated the job.

    The distance of measurements grows slowly with the age of a job, so a much larger distance is an interruption.
    """
    found = []
    for first, before, after in zip(measurements, measurements[1:], measurements[2:], strict=False):
        gap = after.time - before.time
        if gap > max(_INTERRUPTION_S, _INTERRUPTION_FACTOR * (before.time - first.time)):
            found.append((before.time, after.time))
    return found


def _add_measured(time: EngineTime, before: EngineMeasurement, after: EngineMeasurement, seconds: float) -> float:
    """Add what the engine has measured itself, and return the seconds that are left."""
    # An engine measures its counters less often than the job, so the increase may belong to an earlier time.
    time.drafting += max(0.0, after.drafting_seconds - before.drafting_seconds)
    pause = min(seconds, after.weights_gap_seconds) if after.version != before.version else 0.0
    time.weights += pause
    return seconds - pause


class _Activity:
    """Whether there were rollouts in some state at a moment, by their draft mode."""

    def __init__(
        self, ended: Iterable[EndedRollout], time_of: Callable[[EndedRollout], tuple[float, float] | None]
    ) -> None:
        intervals: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for rollout in ended:
            interval = time_of(rollout)
            if interval is not None and interval[0] < interval[1]:
                intervals[rollout.draft_mode].append(interval)
        self._counts = {mode: running_counts(of_mode) for mode, of_mode in intervals.items()}

    def at(self, time: float, modes: Iterable[str]) -> bool:
        """Return whether there was a rollout in one of *modes*."""
        return any(self._count(time, mode) > 0 for mode in modes)

    def _count(self, time: float, mode: str) -> int:
        counts = self._counts.get(mode, [])
        index = bisect_right(counts, time, key=lambda one: one.time)
        return counts[index - 1].count if index else 0


def _waiting_time(rollout: EndedRollout) -> tuple[float, float] | None:
    return (rollout.arrived_at, rollout.started_at) if rollout.started_at else None


def _running_time(rollout: EndedRollout) -> tuple[float, float] | None:
    return (rollout.started_at, rollout.finished_at) if rollout.started_at else None


class EngineHistory(NamedTuple):
    """One engine over time; all lists but the last two have an entry for each measurement of the engine."""

    times: list[float]
    """Unix times."""
    disabled: list[bool]
    """Whether drafting was disabled."""
    stops: list[float]
    """How often drafting has been disabled so far."""
    trial_tokens: list[float]
    """Tokens of trials so far."""
    base_ms: list[float]
    """Constant part of a verification step, by the cost model, in milliseconds."""
    token_ms: list[float]
    """Time per verified token, by the cost model, in milliseconds."""
    saved_times: list[float]
    saved: list[float]
    """Share of the decoding time that drafting has saved up to each of these times since the one before."""


_MAX_POINTS = 600
"""Number of measurements whose decisions are returned, so that plots of many engines stay small."""


def engine_histories(measurements: Sequence[Measurement]) -> dict[str, EngineHistory]:
    """Return the decisions on each engine, by its name, at a limited number of times."""
    histories: dict[str, EngineHistory] = {}
    measurements = measurements[:: -(-len(measurements) // _MAX_POINTS) or 1]
    for measurement in measurements:
        for engine in measurement.engines:
            history = histories.setdefault(engine.name, EngineHistory([], [], [], [], [], [], [], []))
            history.times.append(measurement.time)
            history.disabled.append(engine.drafting_disabled > 0)
            history.stops.append(engine.drafting_stops)
            history.trial_tokens.append(engine.trial_tokens)
            history.base_ms.append(engine.cost_base_seconds * 1e3)
            history.token_ms.append(engine.cost_token_seconds * 1e3)
    for name, parts in timed_steps(measurements).items():
        for steps in parts:
            histories[name].saved_times.append(steps.end)
            without = steps.without_drafts
            histories[name].saved.append(1 - steps.seconds / without if without > 0 else 0.0)
    return dict(sorted(histories.items()))


def disabled_spans(history: EngineHistory) -> list[tuple[float, float]]:
    """Return the times while drafting was disabled, each up to the first measurement with drafting."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for time, disabled in zip(history.times, history.disabled, strict=True):
        if disabled and begin is None:
            begin = time
        elif not disabled and begin is not None:
            spans.append((begin, time))
            begin = None
    if begin is not None:
        spans.append((begin, history.times[-1]))
    return spans


_MAX_LEGEND = 4
"""Maximum number of engines in the legend of plots of two lines per engine; of more, hovering shows the names."""


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
        bars(
            name,
            [seconds / scale for seconds in values],
            [escaped(engine) for engine in times],
            f"{name}: %{{x:.1f}} {unit} (%{{customdata:.0%}})<extra></extra>",
            color,
            orientation="h",
            customdata=[seconds / total for seconds, total in zip(values, totals, strict=True)],
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
    """The share of the decoding time that drafting saved; times without drafting are shaded."""
    scale, unit = time_unit(_duration(histories, start))
    traces = [
        line(
            escaped(engine),
            [(time - start) / scale for time in (history.times[0], *history.saved_times)],
            [history.saved[0], *history.saved],
            "%{y:.0%} saved on %{fullData.name}<extra></extra>",
            color=_color(index),
            width=1.5,
            shape="vh",
            mode="lines",
        )
        for index, (engine, history) in enumerate(histories.items())
        if history.saved
    ]
    shapes = [
        shade(
            (begin - start) / scale,
            (end - start) / scale,
            _color(index),
            y0=index / len(histories),
            y1=(index + 1) / len(histories),
            opacity=0.15,
        )
        for index, history in enumerate(histories.values())
        for begin, end in disabled_spans(history)
    ]
    return figure(
        traces,
        x=f"{unit} since the first request",
        y="saved, by the cost model",
        shapes=shapes,
        showlegend=True,
        yaxis={
            "title": {"text": "saved, by the cost model"},
            "tickformat": ".0%",
            "rangemode": "tozero",
            "zeroline": True,
            "automargin": True,
        },
    )


def trials_over_time(histories: Mapping[str, EngineHistory], start: float) -> go.Figure:
    """How often drafting was disabled so far, and how many tokens were drafted in trials."""
    series = {
        engine: (history.times, ("stops", history.stops, ",", ""), ("trial tokens", history.trial_tokens, ",", ""))
        for engine, history in histories.items()
    }
    titles = ("stops so far", "trial tokens so far")
    return _two_lines_each(series, start, _duration(histories, start), titles, shape="hv")


def cost_over_time(histories: Mapping[str, EngineHistory], start: float) -> go.Figure:
    """The cost model of each engine: the constant part of a step, and the time per verified token."""
    series = {}
    for engine, history in histories.items():
        known = [index for index, base in enumerate(history.base_ms) if base > 0]
        times, bases, tokens = (
            [values[index] for index in known] for values in (history.times, history.base_ms, history.token_ms)
        )
        if known:
            series[engine] = (times, ("step", bases, ".3f", " ms"), ("token", tokens, ".3f", " ms"))
    return _two_lines_each(series, start, _duration(histories, start), ("ms per step", "ms per token"))


_Values = tuple[str, Sequence[float], str, str]
"""Name, values, their format and their unit."""


def _two_lines_each(
    series: Mapping[str, tuple[Sequence[float], _Values, _Values]],
    start: float,
    seconds: float,
    titles: tuple[str, str],
    **settings: Any,
) -> go.Figure:
    """Return a solid line at the left axis and a dotted one at the right axis for each engine.

    Args:
        series: engine → Unix times, and the values of both lines.
        start: Unix time from which the time axis counts.
        seconds: its length.
        titles: titles of the left and the right axis.
        settings: those of the lines.
    """
    scale, unit = time_unit(seconds)
    traces = []
    for index, (engine, (times, left, right)) in enumerate(series.items()):
        for (label, values, form, of), axis, dash in ((left, "y", "solid"), (right, "y2", "dot")):
            name = f"{escaped(engine)}: {label}"
            traces.append(
                line(
                    name,
                    [(time - start) / scale for time in times],
                    values,
                    f"{name} %{{y:{form}}}{of}<extra></extra>",
                    color=_color(index),
                    width=1.5,
                    dash=dash,
                    mode="lines",
                    yaxis=axis,
                    **settings,
                )
            )
    return figure(
        traces,
        x=f"{unit} since the first request",
        y=titles[0],
        showlegend=len(series) <= _MAX_LEGEND,
        yaxis2=second_axis(titles[1], overlaying="y"),
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )


def _duration(histories: Mapping[str, EngineHistory], start: float) -> float:
    return max((history.times[-1] - start for history in histories.values()), default=0.0)


def _color(index: int) -> str:
    colors: Sequence[str] = SERIES[:-1]
    return colors[index % len(colors)]
