"""How many rollouts of a training step ran at which time: the step's makespan and its tail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from typing_extensions import Self


@dataclass(frozen=True)
class Timeline:
    """Durations of a training step, in seconds."""

    makespan: float
    """Time from the first start of a rollout until the last end."""
    tail: float
    """Time at the end of the makespan during which fewer than half as many rollouts ran as at the step's peak.

    The peak counts instead of the number of the step's rollouts, because engines that run fewer rollouts at once than
    the step has are nevertheless busy.
    """
    longest: float
    """Time that the rollout with the longest duration ran."""

    @classmethod
    def from_intervals(cls, intervals: Iterable[tuple[float, float]]) -> Self | None:
        """Compute the durations in O(n log n).

        Args:
            intervals: Unix time of the start and of the end of each rollout. An end before its start, as clocks of
                different machines may report, counts as an end at the start.

        Returns:
            The durations; None without rollouts.
        """
        runs = [(start, max(start, end)) for start, end in intervals]
        if not runs:
            return None
        # Of equal times, ends come first: a rollout that takes the place of another one does not run beside it.
        events = sorted(
            (time, change) for start, end in runs if end > start for time, change in ((start, 1), (end, -1))
        )
        running = list(accumulate((change for _, change in events), initial=0))
        peak = max(running)
        last_end = max(end for _, end in runs)
        # The tail begins at the last event until which at least half of the peak ran.
        tail_start = max(
            (time for (time, _), before in zip(events, running[:-1], strict=True) if 2 * before >= peak),
            default=last_end,
        )
        return cls(
            makespan=last_end - min(start for start, _ in runs),
            tail=last_end - tail_start,
            longest=max(end - start for start, end in runs),
        )
