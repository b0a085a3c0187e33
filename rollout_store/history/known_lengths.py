"""The lengths of the rollouts that an engine has read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import TypeAlias

from rollout_api.length_stats import MIN_ROLLOUTS_OF_ALL, LengthStats
from rollout_store.history.store import NO_LENGTH_STATS

Length: TypeAlias = tuple[int, int, bool]
"""Generation and number of response tokens of a rollout, and whether it was cut off."""

MAX_LENGTHS_OF_ALL = 4096
"""Number of lengths from which the statistics of all problems are computed."""
_MAX_UNCOUNTED_SHARE = 1 / 32
"""Share of these lengths that may have changed since the statistics were computed, because that takes milliseconds."""


class KnownLengths:
    """The statistics of the lengths of an engine's rollouts, by problem and of all problems.

    One thread writes, and others read. The thread that writes computes the statistics and replaces them as a whole, so
    that a reader neither waits nor computes anything.
    """

    def __init__(self) -> None:
        self._stats: dict[str, LengthStats] = {}
        self._overall = NO_LENGTH_STATS
        # State of the thread that writes.
        self._lengths: dict[str, list[Length]] = {}
        self._newest: list[tuple[int, int, str, Length]] = []
        """A heap with the newest lengths of all problems: generation, number in the order of additions, and problem."""
        self._numbers = count()
        self._num_changes = 0
        """Number of changes of the newest lengths since the overall statistics were computed."""

    # For any thread

    def of_problem(self, problem: str) -> LengthStats:
        """Return the statistics of a problem, by problem id; those of no rollouts if it is unknown."""
        return self._stats.get(problem, NO_LENGTH_STATS)

    def overall(self) -> LengthStats:
        """Return the statistics of the newest lengths of all problems."""
        return self._overall

    # For the thread that writes

    def add(self, problem: str, lengths: Iterable[Length]) -> None:
        """Add the lengths of rollouts that are not known yet."""
        added = list(lengths)
        if not added:
            return
        of_problem = self._lengths.setdefault(problem, [])
        of_problem += added
        self._stats[problem] = LengthStats.from_lengths(of_problem)
        for length in added:
            entry = (length[0], next(self._numbers), problem, length)
            if len(self._newest) < MAX_LENGTHS_OF_ALL:
                heapq.heappush(self._newest, entry)
            elif heapq.heappushpop(self._newest, entry) is entry:
                continue  # It is older than all others.
            self._num_changes += 1
        self._update_overall()

    def drop_before(self, problem: str, generation: int) -> None:
        """Forget a problem's rollouts of generations older than *generation*.

        In the statistics of all problems, they count until there are enough newer ones.
        """
        lengths = self._lengths.get(problem, [])
        kept = [length for length in lengths if length[0] >= generation]
        if len(kept) < len(lengths):
            self._lengths[problem] = kept
            self._stats[problem] = LengthStats.from_lengths(kept)

    def drop_problem(self, problem: str) -> None:
        """Forget all rollouts of a problem, which may be added again."""
        if self._lengths.pop(problem, None) is None:
            return
        del self._stats[problem]
        kept = [entry for entry in self._newest if entry[2] != problem]
        self._num_changes += len(self._newest) - len(kept)
        heapq.heapify(kept)
        self._newest = kept
        self._update_overall()

    def _update_overall(self) -> None:
        if self._num_changes < _MAX_UNCOUNTED_SHARE * len(self._newest):
            return
        self._overall = LengthStats.from_lengths(
            (length for _, _, _, length in self._newest), min_rollouts=MIN_ROLLOUTS_OF_ALL
        )
        self._num_changes = 0
