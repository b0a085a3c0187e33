"""The length classes of the running rollouts, and what was drafted in each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rollout_api.length_stats import LengthClass
from rollout_store.arrays import Floats, Integers, with_row

if TYPE_CHECKING:
    from rollout_worker.policy.predicted_lengths import LengthSource

CLASSES = tuple(LengthClass)
_NUMBERS = {one: number for number, one in enumerate(CLASSES)}
_RECLASSIFY_TOKENS = 64
"""Number of generated tokens after which a rollout is classified again."""
_RUNNING = "class_rollouts"
_COUNTED = ("class_steps", "class_budget_tokens", "class_draft_tokens", "class_accepted_tokens")
NO_COUNTERS: Mapping[str, Mapping[str, int]] = {name: {} for name in (_RUNNING, *_COUNTED)}
"""The counters of a policy that does not determine classes."""


class LengthClasses:
    """Classifies running rollouts by the lengths of their problems' earlier rollouts, and again as they grow.

    A rollout is identified by its row.
    """

    def __init__(self, lengths: LengthSource) -> None:
        self._lengths = lengths
        self._problems: dict[int, str] = {}
        """By row, of running rollouts."""
        self._numbers = np.zeros(0, np.int64)
        """Index of a rollout's class in CLASSES, by row."""
        self._reclassify_at = np.zeros(0, np.int64)
        """Number of response tokens, by row."""
        self._running = dict.fromkeys(CLASSES, 0)
        self._counts = np.zeros((len(_COUNTED), len(CLASSES)))

    def open(self, row: int, problem: str, generated: int) -> None:
        """Classify a rollout that begins with *generated* response tokens."""
        self._numbers, self._reclassify_at = with_row(self._numbers, row), with_row(self._reclassify_at, row)
        self._problems[row] = problem
        self._running[self._classify(row, generated)] += 1
        self._reclassify_at[row] = generated  # Its first step may begin when more lengths are known.

    def close(self, row: int) -> None:
        """Forget a rollout that has ended."""
        del self._problems[row]
        self._running[self.of(row)] -= 1

    def of(self, row: int) -> LengthClass:
        """Return the class of a running rollout."""
        return CLASSES[int(self._numbers[row])]

    def update(self, rows: Integers, generated: Integers) -> Integers:
        """Classify rollouts with so many response tokens again if they have grown enough.

        Returns:
            The index of each one's class in CLASSES, shape (rollouts,).
        """
        for index in np.flatnonzero(generated >= self._reclassify_at[rows]):
            row = int(rows[index])
            self._running[self.of(row)] -= 1
            self._running[self._classify(row, int(generated[index]))] += 1
        return self._numbers[rows]

    def _classify(self, row: int, generated: int) -> LengthClass:
        stats = self._lengths.of_problem(self._problems[row])
        length_class = stats.length_class(self._lengths.overall(), so_far=generated)
        self._numbers[row] = _NUMBERS[length_class]
        self._reclassify_at[row] = generated + _RECLASSIFY_TOKENS
        return length_class

    def count_step(self, rows: Integers, budgets: Floats, drafted: Integers, accepted: Integers) -> None:
        """Count a verification step: the draft tokens that were permitted, verified and accepted, shape (rollouts,)."""
        numbers = self._numbers[rows]
        for counts, values in zip(self._counts, (None, budgets, drafted, accepted), strict=True):
            counts += np.bincount(numbers, values, len(CLASSES))

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of running rollouts, and what was counted so far, by name and then by class."""
        counted = {
            name: {one.value: int(count) for one, count in zip(CLASSES, counts, strict=True)}
            for name, counts in zip(_COUNTED, self._counts, strict=True)
        }
        return {_RUNNING: {one.value: count for one, count in self._running.items()}, **counted}
