"""The ``marginal`` policy: drafts each token as long as its expected benefit exceeds its cost."""

from __future__ import annotations

import numpy as np

from rollout_worker.arrays import Integers
from rollout_worker.policy.draft_policy import BoundedPolicy, DraftBudgets
from rollout_worker.policy.step_cost import StepCost


class Marginal(BoundedPolicy):
    """Ends each draft where the expected benefit of its next token no longer exceeds the token's cost.

    A rollout that generates r tokens per step needs 1/r fewer steps for each accepted token. A step of one of n
    rollouts costs c_base/n, reading its context, and verifying its tokens: one, and d of its draft. A draft token with
    survival s therefore pays if ``s · (c_base/n + c_kv · context + c_tok · (1 + d)) / r > c_tok``. Survival decreases
    along a draft, so the draft ends at the first token that does not pay. r and d are averages over the rollout's
    recent steps.

    In a mixture of experts, draft tokens cost more the fewer of them there are. Drafts end at the first token that does
    not even pay c_tok. When those of all rollouts are known, they are shortened to what pays together.
    """

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        values = self._token_values(rows, cost)
        tokens = self._limit_step(self._max_useful(rows), values)
        min_survivals = np.minimum(cost.per_token_s / np.maximum(values, 1e-12), 1.0)
        return DraftBudgets(tokens, min_survivals, values, shortens=True)
