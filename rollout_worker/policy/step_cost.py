"""What a verification step costs."""

from __future__ import annotations

from typing import NamedTuple


class StepCost(NamedTuple):
    """Seconds of one step: ``base + per_token · tokens + per_context · context``, and ``drafting`` if it has drafts.

    DAS (arXiv 2511.13841) has the first two terms; keys and values that attention reads are the third, which exceeds
    the first where many rollouts are long.
    """

    base: float
    """c_base: whatever the batch."""
    per_token: float
    """c_tok: for each token that is verified, the one that a rollout gets without any draft included."""
    per_context: float = 0.0
    """c_kv: for each token of context that attention reads: a rollout's prompt and what it said, once a step."""
    drafting: float = 0.0
    """c_draft: what it costs to verify any drafts at all, however few: rejection, and graphs that are not captured."""

    def time(self, tokens: int, context: int, *, drafts: bool = False) -> float:
        """Of a step that verifies so many *tokens* of rollouts with so much *context* together, in seconds."""
        return self.base + self.per_token * tokens + self.per_context * context + self.drafting * drafts

    @property
    def base_tokens(self) -> float:
        """``c_base / c_tok``: how many tokens cost as much as a step without any; infinite if tokens cost nothing."""
        return self.base / self.per_token if self.per_token > 0 else float("inf")


H100_7B = StepCost(base=8e-3, per_token=26e-6, per_context=17e-9)
"""A 7B model on an H100-class GPU: c_base and c_tok as in DAS, arXiv 2511.13841; c_kv by the bytes of its cache."""
CPU = StepCost(base=2.4e-3, per_token=0.1e-3, per_context=0.1e-6)
"""A model of 3M parameters on two CPU cores: 2.5 ms a step at batch 1 and 5.6 ms at 32, vLLM 0.32."""
