"""Prompts, and helpers to examine the responses of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_api.protocol.messages import Partial
from rollout_worker.engine.response import GenerationResult
from tests.support.reference_model import EOS

PROMPT = [5, 1, 9, 2]
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=8)] for seed in range(40)]
SAMPLES = 4000
"""Number of responses in a test of the output distribution."""
MIN_P_VALUE = 1e-4
"""P-values of true hypotheses are uniform, so that a run of all tests fails by chance about once in 1000 times."""
MAX_LOGPROB_ERROR = 1e-3
"""Largest error of a log-probability in float32."""
WITHOUT_EOS = list(range(12))
"""Allowed tokens with which no response ends before ``max_tokens``."""


def tokens_of(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def accepted_share(results: Sequence[GenerationResult]) -> float:
    """Return the share of accepted draft tokens in all tokens."""
    return sum(response.num_accepted_tokens for response in results) / sum(
        len(response.token_ids) for response in results
    )


def prefix_of(result: GenerationResult, length: int) -> Partial:
    """Return the first tokens of a response, as a checkpoint contains them."""
    logprobs = None if result.logprobs is None else result.logprobs[:length]
    return Partial(token_ids=result.token_ids[:length], logprobs=logprobs, weight_spans=result.weight_spans)
