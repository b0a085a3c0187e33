"""Prompts, and helpers to examine the responses of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial
from rollout_worker.engine.response import GenerationResult
from tests.support.reference_model import EOS, ReferenceDistribution, chi_square

PROMPT = [5, 1, 9, 2]
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=8)] for seed in range(40)]
SAMPLES = 4000
"""Number of responses in a test of the output distribution."""
MIN_P_VALUE = 1e-4
"""A wrong distribution must have a smaller p-value than this."""
SUSPICIOUS_P_VALUE = 1e-3
"""Responses with a smaller p-value are sampled again."""
IMPOSSIBLE_P_VALUE = 1e-8
"""A smaller p-value is not a coincidence."""
REPETITIONS = 3
"""Factor on the number of responses that are sampled again."""
MAX_LOGPROB_ERROR = 1e-3
"""Largest error of a log-probability in float32."""
WITHOUT_EOS = list(range(12))
"""Allowed tokens that end no response before ``max_tokens``."""


class Response(Protocol):
    """A response of any engine."""

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""

    @property
    def num_accepted_tokens(self) -> int:
        """Number of tokens that are accepted draft tokens."""


_Response = TypeVar("_Response", bound=Response)


def tokens_of(results: Sequence[Response]) -> list[list[int]]:
    return [result.token_ids for result in results]


def accepted_share(results: Sequence[Response]) -> float:
    """Return the share of accepted draft tokens in all tokens."""
    return sum(response.num_accepted_tokens for response in results) / sum(
        len(response.token_ids) for response in results
    )


def sample_exactly(
    reference: ReferenceDistribution,
    sampling: Sampling,
    sample: Callable[[Sampling], list[_Response]],
    *,
    min_accepted_share: float = 0.05,
) -> list[_Response]:
    """Sample responses to PROMPT with drafts, and require that their tokens have the exact distribution.

    P-values of true hypotheses are uniform, so that one of the many tests has a small one by chance now and then. More
    responses, sampled independently, decide then: a real difference is clearer in them, and a coincidence does not
    happen twice. A run of all tests, which calls this about 40 times, fails by chance about once in 25,000 runs.

    Args:
        reference: distribution of the model.
        sampling: settings of the responses.
        sample: samples responses to PROMPT with these settings; only the seed changes.
        min_accepted_share: required share of accepted draft tokens in all tokens.

    Returns:
        The responses of the first call of *sample*.

    Raises:
        AssertionError: if the distribution differs, or too few tokens were tested or drafted.
    """
    results = sample(sampling)
    p, tested = chi_square(reference, PROMPT, tokens_of(results), sampling)
    assert p > IMPOSSIBLE_P_VALUE, f"p-value {p}"
    if p < SUSPICIOUS_P_VALUE:
        more = list[_Response]()
        for number in range(1, 1 + REPETITIONS):
            seed = None if sampling.seed is None else sampling.seed + number
            more += sample(sampling.model_copy(update={"seed": seed}))
        repeated_p, _ = chi_square(reference, PROMPT, tokens_of(more), sampling)
        assert repeated_p > SUSPICIOUS_P_VALUE, f"p-value {p}, with more responses {repeated_p}"
    assert tested > len(results)
    assert accepted_share(results) > min_accepted_share
    return results


def check_likely_tokens(
    reference: ReferenceDistribution, prompt: Sequence[int], tokens: Partial, sampling: Sampling
) -> None:
    """Compare log-probabilities, ranks and most likely tokens of a response with the exact ones."""
    assert tokens.logprobs is not None
    assert tokens.ranks is not None
    assert tokens.top_logprobs is not None
    exact = reference.logprobs(prompt, tokens.token_ids, sampling)
    sampled = exact[range(len(exact)), tokens.token_ids]
    assert np.allclose(sampled, tokens.logprobs, atol=MAX_LOGPROB_ERROR)
    assert list(1 + (exact > sampled[:, None]).sum(axis=1)) == tokens.ranks
    for row, likely in zip(exact, tokens.top_logprobs, strict=True):
        expected = [int(token) for token in np.argsort(-row)[: sampling.top_logprobs] if row[token] > -np.inf]
        assert expected == list(likely)
        assert np.allclose(row[expected], list(likely.values()), atol=MAX_LOGPROB_ERROR)


def prefix_of(result: GenerationResult, length: int) -> Partial:
    """Return the first tokens of a response, as a checkpoint contains them."""
    for_each_token = ("token_ids", "logprobs", "ranks", "top_logprobs", "kept_token_ids")
    fields = {name: values[:length] for name in for_each_token if (values := getattr(result, name)) is not None}
    return Partial(weight_spans=result.weight_spans, **fields)
