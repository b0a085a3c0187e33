"""What is known of the lengths of a group of siblings."""

from __future__ import annotations

from collections import deque

from rollout_api.length_stats import LengthStats
from rollout_store.history.store import NO_LENGTH_STATS

_HISTORY_WEIGHT = 2
"""Weight of the history's mean length in a prediction, in rollouts of the group itself."""
_MAX_LENGTHS = 128
"""Number of siblings, those that have ended last, whose lengths a prediction uses."""


class SiblingLengths:
    """The lengths of a problem's earlier rollouts, and of the siblings that have ended.

    Args:
        history: statistics of the earlier rollouts.
    """

    def __init__(self, history: LengthStats = NO_LENGTH_STATS) -> None:
        self.history = history
        self._ended: deque[int] = deque(maxlen=_MAX_LENGTHS)
        self._stats: LengthStats | None = None
        """Statistics of the siblings that have ended; None if they have not been computed since the last end."""

    def append(self, length: int) -> None:
        """Record the length of a sibling that has ended, in tokens."""
        self._ended.append(length)
        self._stats = None

    @property
    def expected(self) -> float:
        """Expected length of a sibling in tokens: the history's mean, corrected by the siblings that have ended."""
        prior = _HISTORY_WEIGHT if self.history.count else 0
        count = prior + len(self._ended)
        return (prior * self.history.mean + sum(self._ended)) / count if count else 0.0

    @property
    def stats(self) -> LengthStats:
        """Statistics by which remaining lengths are predicted. They are the same object until something changes."""
        if len(self._ended) <= (1 if self.history.count else 0):
            return self.history if self.history.count else NO_LENGTH_STATS
        if self._stats is None:
            self._stats = LengthStats.from_lengths((0, length, False) for length in self._ended)
        return self._stats
