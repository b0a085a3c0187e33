"""The tokens from which a token was sampled, found among the most likely ones that vLLM returns.

vLLM sets the logits of all tokens that ``top_k``, ``top_p`` or another setting removes to minus infinity, and returns
log-probabilities of the resulting distribution. Its own option for this, ``return_sampling_mask``, needs the V2 model
runner, and a ``top_k`` and a temperature in every request of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout_api.manifest.spec import MAX_KEPT_TOP_K, Sampling

_MIN_TIED = 16


def _with_ties(top_k: int) -> int:
    """Return how many tokens to ask for: vLLM keeps all tokens whose logit equals the smallest one of *top_k*."""
    return 2 * top_k + _MIN_TIED


MAX_WIDTH = _with_ties(MAX_KEPT_TOP_K)
"""Largest number of most likely tokens that an engine asks vLLM for."""


def width(sampling: Sampling, vocabulary: int) -> int:
    """Return how many most likely tokens vLLM must return at each position; 0 if no kept tokens were requested.

    Args:
        sampling: the request's settings.
        vocabulary: number of tokens of the model.
    """
    return min(_with_ties(sampling.top_k), vocabulary) if sampling.kept_tokens else 0


def kept_tokens(logprobs: Mapping[int, Any], width: int, vocabulary: int) -> list[int]:
    """Return the kept tokens at one position, in ascending order; empty if they may be more than vLLM has returned.

    Args:
        logprobs: vLLM's ``Logprob`` of the sampled token and of the *width* most likely ones.
        width: number of most likely tokens that vLLM was asked for.
        vocabulary: number of tokens of the model.
    """
    kept = sorted(token for token, one in logprobs.items() if one.logprob > -math.inf)
    return kept if len(kept) < width or width == vocabulary else []
