"""An estimate of how long a step would have taken without drafts, by the engines' cost models."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from rollout_api.protocol.timeline import EngineMeasurement, Measurement
from rollout_worker.report.analysis.steps import Step

_MIN_TIMED_S = 1.0
"""Seconds of decoding steps of which a slowdown is computed, because single steps differ much from the cost model."""


class Slowdown:
    """How many times as long the decoding steps of an engine would have taken without drafts, over time.

    An engine counts the duration of its steps, and what its cost model predicts for the same tokens without drafts.
    The slowdown is the ratio of the increases of these counters in times of at least a second of decoding steps. Before
    the first and after the last of these times it is that of the nearest.
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

    def series(self) -> list[tuple[float, float]]:
        """Return (end of the time, ratio)."""
        return list(zip(self._times, self._ratios, strict=True))


def slowdowns(measurements: Iterable[Measurement]) -> dict[str, Slowdown]:
    """Return the slowdown of each engine, by its name. An engine that has measured less than a moment has none."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    known: dict[str, EngineMeasurement] = {}
    for measurement in measurements:
        for engine in measurement.engines:
            timed, predicted = increase(known.get(engine.name), engine)
            if timed >= _MIN_TIMED_S:
                times[engine.name].append(measurement.time)
                ratios[engine.name].append(predicted / timed)
                known[engine.name] = engine
    return {name: Slowdown(times[name], ratios[name]) for name in times}


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
