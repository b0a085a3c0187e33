"""Where the time of each engine went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout_api.protocol.timeline import EngineMeasurement, Measurement


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
    """It had no rollout, although some waited."""
    idle_in_tail: float = 0.0
    """It had no rollout and none waited, but other engines had some."""
    idle: float = 0.0
    """The job had no rollouts to sample."""
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


def engine_times(measurements: Sequence[Measurement]) -> dict[str, EngineTime]:
    """Divide the time of each engine, by its name, between each two measurements."""
    times: defaultdict[str, EngineTime] = defaultdict(EngineTime)
    for before, after in pairwise(measurements):
        earlier = {engine.name: engine for engine in before.engines}
        for engine in after.engines:
            if engine.name in earlier:
                _add(times[engine.name], earlier[engine.name], engine, before, after)
    return dict(sorted(times.items()))


def interruptions(measurements: Iterable[Measurement], seconds: float) -> list[tuple[float, float]]:
    """Return the times of more than *seconds* without measurements, in which nothing coordinated the job."""
    return [(before.time, after.time) for before, after in pairwise(measurements) if after.time - before.time > seconds]


def _add(
    time: EngineTime,
    engine_before: EngineMeasurement,
    engine: EngineMeasurement,
    before: Measurement,
    after: Measurement,
) -> None:
    left = max(0.0, after.time - before.time)
    if engine.version != engine_before.version:
        pause = min(left, engine.weights_gap_seconds)
        time.weights += pause
        left -= pause
    # An engine measures its counters less often than the job, so the increase may belong to an earlier time.
    time.drafting += max(0.0, engine.drafting_seconds - engine_before.drafting_seconds)
    if engine_before.assigned or engine_before.running:
        time.busy += left
        time.disabled += left * (engine_before.drafting_disabled > 0)
    elif before.waiting:
        time.idle_with_waiting += left
    elif before.assigned:
        time.idle_in_tail += left
    else:
        time.idle += left
