"""How many rollouts ran at each moment, and the tail of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout_worker.report.analysis.steps import Step

TAIL_SHARE = 0.25
"""The tail of a step begins when at most this share of its largest number of running rollouts runs, for good."""


@dataclass(frozen=True)
class RunningCount:
    """The number of running rollouts from one moment to the next."""

    time: float
    count: int


def running_counts(intervals: Iterable[tuple[float, float]]) -> list[RunningCount]:
    """Return how many of the intervals (start, end) contain each moment, as a step function that ends with 0."""
    changes: dict[float, int] = {}
    for start, end in intervals:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    counts: list[RunningCount] = []
    running = 0
    for time, change in sorted(changes.items()):
        if change:
            running += change
            counts.append(RunningCount(time, running))
    return counts


def thinned(counts: Sequence[RunningCount], most: int = 1500) -> list[RunningCount]:
    """Return at most about *most* of the counts, with the largest and the last one of each part."""
    if len(counts) <= most:
        return list(counts)
    size = -(-2 * len(counts) // most)
    kept: list[RunningCount] = []
    for start in range(0, len(counts), size):
        part = counts[start : start + size]
        largest = max(part, key=lambda one: one.count)
        kept += [largest] if largest is part[-1] else [largest, part[-1]]
    return kept


def intervals_of(step: Step) -> list[tuple[float, float]]:
    """Return the start and the end of each sampled rollout."""
    return [(one.started, one.rollout.finished_at) for one in step.sampled]


def tail_start(step: Step) -> float:
    """Return the Unix time at which the tail of a step begins; its end if no rollout was sampled."""
    counts = running_counts(intervals_of(step))
    if not counts:
        return step.end
    limit = TAIL_SHARE * max(one.count for one in counts)
    begin = counts[-1].time
    for one in reversed(counts):
        if one.count > limit:
            break
        begin = one.time
    return begin


def tail_fraction(step: Step) -> float:
    """Return the share of the makespan that belongs to the tail."""
    return (step.end - tail_start(step)) / step.makespan if step.makespan > 0 else 0.0
