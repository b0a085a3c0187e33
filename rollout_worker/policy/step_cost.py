"""The cost model: how long a verification step takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats


class StepCost(NamedTuple):
    """Coefficients of the duration of one verification step.

    ``t = c_base + c_tok · tokens + c_kv · context (+ c_draft if there are drafts) + c_experts · used``. The first two
    terms are those of DAS (arXiv 2511.13841). The third is the time for reading keys and values in attention; with many
    long rollouts it exceeds the first. The last one is that of a mixture of experts, whose weights are read only if a
    token uses them. If each token uses the share e of the experts, independently of the others, then *tokens* tokens
    use the share ``used = 1 - (1 - e) ** tokens`` together.
    """

    base_s: float
    """c_base: seconds of a step regardless of its batch."""
    per_token_s: float
    """c_tok: seconds for each verified token. Every rollout has one such token without any draft."""
    per_context_token_s: float = 0.0
    """c_kv: seconds for each token of context that attention reads: each rollout's prompt and response so far."""
    drafting_s: float = 0.0
    """c_draft: additional seconds of a step with any drafts, for rejection sampling and uncaptured CUDA graphs."""
    experts_s: float = 0.0
    """c_experts: seconds to read the weights of all experts."""
    expert_share: float = 0.0
    """Share of the experts that one token uses; 0 in a dense model. Known from the model, and not fitted."""

    def with_experts(self, share: float) -> StepCost:
        """Return the cost model of a mixture of experts that has most of its weights in experts.

        Args:
            share: share of the experts that one token uses; 0: the model is dense.
        """
        return self._replace(experts_s=4 * self.base_s, expert_share=share) if share else self

    def step_time(self, tokens: int, context_tokens: int, *, has_drafts: bool = False) -> float:
        """Predict the duration of a step in seconds.

        Args:
            tokens: number of verified tokens.
            context_tokens: number of context tokens of all rollouts together.
            has_drafts: whether any draft is verified.
        """
        return (
            self.base_s
            + self.per_token_s * tokens
            + self.per_context_token_s * context_tokens
            + self.drafting_s * has_drafts
            + self.experts_s * used_experts(tokens, self.expert_share)
        )

    def linear_between(self, rollouts: int, draft_tokens: float) -> StepCost:
        """Return a model without experts that agrees with this one for steps with and without drafts.

        Its c_tok is the mean cost of a draft token. The first tokens cost more, because with them a step uses more
        experts.

        Args:
            rollouts: number of rollouts.
            draft_tokens: number of draft tokens of all of them; at least 1 is assumed.
        """
        if not self.expert_share:
            return self
        draft_tokens = max(draft_tokens, 1.0)
        used = used_experts(rollouts, self.expert_share)
        more_used = used_experts(rollouts + draft_tokens, self.expert_share) - used
        per_token_s = self.experts_s * more_used / draft_tokens
        return StepCost(
            self.base_s + self.experts_s * used - per_token_s * rollouts,
            self.per_token_s + per_token_s,
            self.per_context_token_s,
            self.drafting_s,
        )

    def draft_costs(self, rollouts: int, max_draft_tokens: int) -> Floats:
        """Return how much longer a step is with 0, 1, 2, … draft tokens, in seconds, shape (max_draft_tokens + 1,)."""
        tokens = np.arange(max_draft_tokens + 1)
        costs = self.per_token_s * tokens + self.drafting_s * (tokens > 0)
        if self.expert_share:
            unused = (1.0 - self.expert_share) ** (rollouts + tokens)
            costs += self.experts_s * (unused[0] - unused)
        return np.asarray(costs)


def used_experts(tokens: float, expert_share: float) -> float:
    """Return the share of the experts that several tokens use together."""
    return float(1.0 - (1.0 - expert_share) ** tokens)


H100_7B = StepCost(base_s=8e-3, per_token_s=26e-6, per_context_token_s=17e-9)
"""A 7B model on an H100-class GPU: c_base and c_tok as in DAS (arXiv 2511.13841), c_kv from the size of its cache."""
CPU = StepCost(base_s=2.4e-3, per_token_s=0.1e-3, per_context_token_s=0.1e-6)
"""A model of 3M parameters on two CPU cores: 2.5 ms per step at batch 1 and 5.6 ms at 32, with vLLM 0.32."""
