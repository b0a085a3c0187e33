"""The cost model: how long a verification step takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats, Integers


class CudaGraphs:
    """The CUDA graphs of an engine. A step is padded to the size of the smallest graph that holds it.

    The cost of draft tokens is therefore a staircase: they are free up to the size of the graph that the step uses
    anyway, and the next one costs as much as all tokens of the larger graph that are padding then.
    """

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        """Remember the *sizes* in tokens; without any, steps are not padded."""
        ordered = np.array(sorted({0, *sizes}), np.int64)
        self.max_tokens = int(ordered[-1])
        """Number of tokens of the largest graph; 0 if there are none. Larger steps run without a graph."""
        self._padded = ordered[np.searchsorted(ordered, np.arange(self.max_tokens + 1))]
        """Size of the graph for each number of tokens."""

    def pad(self, tokens: int) -> int:
        """Return the number of tokens of a step including the padding."""
        return int(self._padded[tokens]) if tokens <= self.max_tokens else tokens

    def pad_each(self, tokens: Integers) -> Integers:
        """Return :meth:`pad` of each number of tokens."""
        if not self.max_tokens:
            return tokens
        return np.where(tokens <= self.max_tokens, self._padded[np.minimum(tokens, self.max_tokens)], tokens)


NO_GRAPHS = CudaGraphs()


class StepCost(NamedTuple):
    """Coefficients of the duration of one verification step.

    ``t = c_base + c_tok · tokens + c_kv · context (+ c_draft if there are drafts) + c_experts · used + c_prompt ·
    prompt``. The first two terms are those of DAS (arXiv 2511.13841); the tokens include those that pad the step to the
    size of a CUDA graph. The third is the time for reading keys and values in attention; with many long rollouts it
    exceeds the first. The fifth is that of a mixture of experts, whose weights are read only if a token uses them. If
    each token uses the share e of the experts, independently of the others, then *tokens* tokens use the share ``used =
    1 - (1 - e) ** tokens`` together. The last one is that of the prompts that the step reads besides.
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
    per_prompt_token_s: float = 0.0
    """c_prompt: seconds for each token of a prompt that the step reads."""

    def with_experts(self, share: float) -> StepCost:
        """Return the cost model of a mixture of experts that has most of its weights in experts.

        One token uses this *share* of the experts; 0 means a dense model.
        """
        return self._replace(experts_s=4 * self.base_s, expert_share=share) if share else self

    def step_time(
        self,
        tokens: int,
        context_tokens: int,
        *,
        has_drafts: bool = False,
        prompt_tokens: int = 0,
        graphs: CudaGraphs = NO_GRAPHS,
    ) -> float:
        """Predict the duration of a step in seconds."""
        return (
            self.base_s
            + self.per_token_s * (graphs.pad(tokens + prompt_tokens) - prompt_tokens)
            + self.per_context_token_s * context_tokens
            + self.drafting_s * has_drafts
            + self.experts_s * used_experts(tokens + prompt_tokens, self.expert_share)
            + self.per_prompt_token_s * prompt_tokens
        )

    def linear_between(self, rollouts: int, draft_tokens: float) -> StepCost:
        """Return a model without experts that agrees with this one for steps with and without drafts.

        Its c_tok is the mean cost of a draft token. The first tokens cost more, because with them a step uses more
        experts. At least one draft token is assumed.
        """
        if not self.expert_share:
            return self
        draft_tokens = max(draft_tokens, 1.0)
        used = used_experts(rollouts, self.expert_share)
        more_used = used_experts(rollouts + draft_tokens, self.expert_share) - used
        per_token_s = self.experts_s * more_used / draft_tokens
        return self._replace(
            base_s=self.base_s + self.experts_s * used - per_token_s * rollouts,
            per_token_s=self.per_token_s + per_token_s,
            experts_s=0.0,
            expert_share=0.0,
        )

    def draft_costs(self, rollouts: int, max_draft_tokens: int, graphs: CudaGraphs = NO_GRAPHS) -> Floats:
        """Return how much longer a step is with 0, 1, 2, … draft tokens, in seconds, shape (max_draft_tokens + 1,)."""
        tokens = np.arange(max_draft_tokens + 1)
        padded = graphs.pad_each(rollouts + tokens)
        costs = self.per_token_s * (padded - padded[0]) + self.drafting_s * (tokens > 0)
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
