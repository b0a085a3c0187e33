"""An estimate of how long a step would have taken without drafts, by the engines' cost models."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rollout_api.protocol.timeline import EngineMeasurement, Measurement
from rollout_worker.report.analysis.steps import Step


class Slowdown:
    """How many times as long the decoding steps of an engine would have taken without drafts, over time.

    An engine counts the duration of its steps, and what its cost model predicts for the same tokens without drafts.
    Between two measurements in which these counters differ, the slowdown is the ratio of their increases. Before the
    first and after the last one it is that of the nearest.
    """

    def __init__(self, times: Sequence[float], ratios: Sequence[float]) -> None:
        self._times, self._ratios = list(times), list(ratios)
        """Time at which each ratio ends to apply; the last one applies forever."""

    def stretched(self, start: float, end: float) -> float:
        """Return the seconds that what took from *start* to *end* would have taken without drafts."""
        if not self._ratios:
            return end - start
        first, last = bisect_right(self._times[:-1], start), bisect_right(self._times[:-1], end)
        bounds = [start, *self._times[first:last], end]
        return sum(
            (stop - begin) * ratio
            for (begin, stop), ratio in zip(pairwise(bounds), self._ratios[first : last + 1], strict=True)
        )

    def series(self) -> list[tuple[float, float]]:
        """Return (end of the time, ratio)."""
        return list(zip(self._times, self._ratios, strict=True))


def slowdowns(measurements: Iterable[Measurement]) -> dict[str, Slowdown]:
    """Return the slowdown of each engine, by its name."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    known: dict[str, EngineMeasurement] = {}
    for measurement in measurements:
        for engine in measurement.engines:
            timed, predicted = increase(known.get(engine.name), engine)
            if timed > 0:
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
