"""The cost model: how long a verification step takes."""

from __future__ import annotations

from typing import NamedTuple


class StepCost(NamedTuple):
    """Coefficients of the duration of one verification step.

    ``t = c_base + c_tok · tokens + c_kv · context (+ c_draft if there are drafts)``. The first two terms are those of
    DAS (arXiv 2511.13841). The third is the time in which attention reads keys and values; with many long rollouts it
    exceeds the first.
    """

    base_s: float
    """c_base: seconds of a step regardless of its batch."""
    per_token_s: float
    """c_tok: seconds for each verified token. Every rollout has one such token without any draft."""
    per_context_token_s: float = 0.0
    """c_kv: seconds for each token of context that attention reads: each rollout's prompt and response so far."""
    drafting_s: float = 0.0
    """c_draft: seconds by which a step with any drafts is longer, for rejection sampling and uncaptured CUDA graphs."""

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
        )


H100_7B = StepCost(base_s=8e-3, per_token_s=26e-6, per_context_token_s=17e-9)
"""A 7B model on an H100-class GPU: c_base and c_tok as in DAS (arXiv 2511.13841), c_kv from the size of its cache."""
CPU = StepCost(base_s=2.4e-3, per_token_s=0.1e-3, per_context_token_s=0.1e-6)
"""A model of 3M parameters on two CPU cores: 2.5 ms per step at batch 1 and 5.6 ms at 32, with vLLM 0.32."""
