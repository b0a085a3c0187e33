"""An estimate of how long a step would have taken without drafts, by the engines' cost models."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rollout_api.protocol.timeline import EngineMeasurement, Measurement
from rollout_worker.report.analysis.steps import Step

_MIN_TIMED_S = 1.0
"""Seconds of decoding steps of which a slowdown is computed, because single steps differ much from the cost model."""


class TimedSteps(NamedTuple):
    """The decoding steps of an engine in some time."""

    start: float | None
    """Unix time; None if it is unknown."""
    end: float
    seconds: float
    """Duration of the steps."""
    without_drafts: float
    """Seconds that the same tokens would have taken without drafts, by the engine's cost model."""


class Slowdown:
    """How many times as long everything on an engine would have taken without drafts, over time.

    Only decoding steps take longer without drafts; whatever else happens takes as long as it did. Before the first and
    after the last of the times with timed steps, the slowdown is that of the nearest.
    """

    def __init__(self, times: Sequence[float], ratios: Sequence[float]) -> None:
        """Prepare the sums of the stretched times.

        Args:
            times: time at which each ratio ends to apply; the last one applies forever.
            ratios: the slowdown until each of these times.
        """
        self._times, self._ratios = list(times), list(ratios)
        parts = [
            (end - begin) * ratio for (begin, end), ratio in zip(pairwise(self._times), self._ratios[1:], strict=True)
        ]
        self._sums = list(accumulate(parts, initial=0.0))

    def stretched(self, start: float, end: float) -> float:
        """Return the seconds that what took from *start* to *end* would have taken without drafts."""
        return self._since_first(end) - self._since_first(start) if self._ratios else end - start

    def _since_first(self, time: float) -> float:
        """Return the stretched time since the end of the first ratio; negative before it."""
        index = min(bisect_right(self._times, time), len(self._times) - 1)
        if index == 0:
            return (time - self._times[0]) * self._ratios[0]
        return self._sums[index - 1] + (time - self._times[index - 1]) * self._ratios[index]


def timed_steps(measurements: Iterable[Measurement]) -> dict[str, list[TimedSteps]]:
    """Return the decoding steps of each engine, by its name, in times with at least a second of them."""
    found: defaultdict[str, list[TimedSteps]] = defaultdict(list)
    known: dict[str, tuple[float, EngineMeasurement]] = {}
    for measurement in measurements:
        for engine in measurement.engines:
            since, before = known.get(engine.name, (None, None))
            timed, predicted = increase(before, engine)
            if timed >= _MIN_TIMED_S:
                found[engine.name].append(TimedSteps(since, measurement.time, timed, predicted))
            if timed >= _MIN_TIMED_S or not timed:
                known[engine.name] = measurement.time, engine
    return dict(found)


def slowdowns(measurements: Iterable[Measurement]) -> dict[str, Slowdown]:
    """Return the slowdown of each engine, by its name. An engine with less than a second of steps has none."""
    return {name: _slowdown(parts) for name, parts in timed_steps(measurements).items()}


def _slowdown(parts: Iterable[TimedSteps]) -> Slowdown:
    times: list[float] = []
    ratios: list[float] = []
    for steps in parts:
        seconds = steps.seconds
        if steps.start is not None:
            if not times or steps.start > times[-1]:  # the engine was idle
                times.append(steps.start)
                ratios.append(1.0)
            # An engine measures its counters a little earlier than the job.
            seconds = max(seconds, steps.end - steps.start)
        times.append(steps.end)
        ratios.append(1 + (steps.without_drafts - steps.seconds) / seconds)
    return Slowdown(times, ratios)


def increase(before: EngineMeasurement | None, after: EngineMeasurement) -> tuple[float, float]:
    """Return the increases of the measured and of the predicted seconds; an engine that has restarted counts anew."""
    if before is None or after.timed_seconds < before.timed_seconds:
        return after.timed_seconds, after.timed_seconds_without_drafts
    return (
        after.timed_seconds - before.timed_seconds,
        after.timed_seconds_without_drafts - before.timed_seconds_without_drafts,
    )


def intervals_without_drafts(step: Step, by_engine: dict[str, Slowdown]) -> list[tuple[float, float]]:
    """Estimate when each rollout of a step would have started and ended without drafts.

    The time of each engine is stretched by its slowdown from the start of the step on, so that a rollout that waits for
    the end of others starts later, too.

    Returns:
        Start and end of each sampled rollout, in seconds since the start of the step.
    """
    unknown = Slowdown((), ())

    def stretched(engine: str, time: float) -> float:
        return by_engine.get(engine, unknown).stretched(step.start, max(step.start, time))

    return [
        (stretched(one.rollout.engine_name, one.started), stretched(one.rollout.engine_name, one.rollout.finished_at))
        for one in step.sampled
    ]


def makespan_without_drafts(step: Step, by_engine: dict[str, Slowdown]) -> float | None:
    """Estimate the makespan of a step without drafts; None if no engine has measured its steps."""
    if not by_engine:
        return None
    return max((end for _, end in intervals_without_drafts(step, by_engine)), default=None)
