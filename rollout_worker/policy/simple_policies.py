"""The policies ``fixed`` and ``unlimited``, which depend neither on cost nor on predicted lengths."""

from __future__ import annotations

from rollout_worker.arrays import Integers
from rollout_worker.policy.draft_policy import EMPTY_QUEUE, BoundedPolicy, DraftBudgets, QueueState
from rollout_worker.policy.step_cost import StepCost


class Fixed(BoundedPolicy):
    """``fixed`` and ``unlimited``: drafts equally many tokens for every rollout, regardless of cost and survival."""

    def compute_budgets(self, rows: Integers, cost: StepCost, queue: QueueState = EMPTY_QUEUE) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        return self._without_thresholds(rows, cost, self._limit_step(self._max_useful(rows)))
