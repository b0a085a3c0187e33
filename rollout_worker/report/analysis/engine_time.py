"""Where the time of each engine went."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_worker.report.analysis.running import running_counts

_INTERRUPTION_S = 60.0
"""Shortest interruption, in seconds."""
_INTERRUPTION_FACTOR = 5.0
"""How many times as long as the distance of the measurements before an interruption is at least."""


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
    """Return the times without measurements, in which nothing coordinated the job.

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
