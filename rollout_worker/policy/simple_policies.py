"""The policies ``fixed`` and ``unlimited``, which do not depend on cost."""

from __future__ import annotations

from rollout_worker.arrays import Integers
from rollout_worker.policy.draft_policy import BoundedPolicy, DraftBudgets
from rollout_worker.policy.step_cost import StepCost


class Fixed(BoundedPolicy):
    """``fixed`` and ``unlimited``: drafts equally many tokens for every rollout, regardless of cost and survival."""

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        return self._without_thresholds(rows, cost, self._limit_step(self._max_useful(rows)))
