"""Predicted lengths of running rollouts, for draft policies that depend on them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_store.arrays import Floats, Integers, with_row
from rollout_store.history.remaining_length import remaining_quantiles
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy

LENGTH_QUANTILES = 8
"""Number of quantiles that describe the remaining length of a rollout."""
_REPREDICT_FACTOR = 1.1
"""Growth factor of a rollout after which its length is predicted again."""
_REPREDICT_TOKENS = 32
"""Number of tokens, in addition to that factor, after which the length is predicted again."""
REPLAN_INTERVAL_STEPS = 16
"""Number of steps after which plans that depend on predicted lengths are computed again."""
_MIN_REPLAN_INTERVAL_STEPS = 4
"""Steps after which budgets are computed anew if rollouts have started or ended since."""


class LengthSource(Protocol):
    """The lengths of earlier rollouts. No method waits for anything."""

    def of_problem(self, problem: str) -> LengthStats:
        """Return the length statistics of a problem, by problem id."""
        ...

    def overall(self) -> LengthStats:
        """Return those of all problems."""
        ...


class ReplanSchedule:
    """Decides when to plan again: periodically, and earlier when rollouts have started or ended."""

    def __init__(self) -> None:
        self._steps = REPLAN_INTERVAL_STEPS
        self._changed = False

    def mark_changed(self) -> None:
        """Note that a rollout has started or ended."""
        self._changed = True

    def is_due(self) -> bool:
        """Return whether to plan again in this step. Call it once per step."""
        self._steps += 1
        if self._steps < (_MIN_REPLAN_INTERVAL_STEPS if self._changed else REPLAN_INTERVAL_STEPS):
            return False
        self._steps, self._changed = 0, False
        return True


class LengthPredictingPolicy(DraftPolicy):
    """Base class of policies that predict the lengths of the running rollouts."""

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits)
        self._lengths = lengths
        self._problems: dict[int, str] = {}
        """By row."""
        self._predicted_ends = np.zeros((0, LENGTH_QUANTILES))
        """Quantiles of the total number of response tokens."""
        self._predicted_at = np.zeros(0, np.int64)
        """Number of response tokens at the last prediction; -1 before the first one."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._predicted_ends = with_row(self._predicted_ends, row)
        self._predicted_at = with_row(self._predicted_at, row)
        self._problems[row], self._predicted_at[row] = problem, -1
        return row

    def _remaining_quantiles(self, rows: Integers) -> Floats:
        """Return quantiles of the tokens that rollouts still generate, at least 1; shape (rows, LENGTH_QUANTILES)."""
        generated = self._rollouts.generated[rows]
        due = (
            (self._predicted_at[rows] < 0)
            | (generated >= self._predicted_ends[rows, 0])
            | (generated > self._predicted_at[rows] * _REPREDICT_FACTOR + _REPREDICT_TOKENS)
        )
        for row in rows[due].tolist():
            so_far, max_tokens = int(self._rollouts.generated[row]), int(self._rollouts.max_tokens[row])
            self._predicted_ends[row] = so_far + remaining_quantiles(
                self._lengths.of_problem(self._problems[row]),
                generated=so_far,
                max_tokens=max(max_tokens, so_far + 1),
                count=LENGTH_QUANTILES,
            )
            self._predicted_at[row] = so_far
        return np.maximum(self._predicted_ends[rows] - generated[:, None], 1.0)
