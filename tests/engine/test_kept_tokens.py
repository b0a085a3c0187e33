"""The tokens that top_k, top_p and other settings keep, compared with those of the model's exact logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.manifest.spec import MAX_KEPT_TOP_K, Sampling
from rollout_api.protocol.messages import Partial
from rollout_store.job.admission_rules import check_admission
from rollout_store.job.engine_errors import AdmissionError
from rollout_worker.engine.sampling_params import MAX_KEPT_WIDTH, kept_tokens, kept_width
from tests.support.engines import EngineHarness
from tests.support.reference_model import VOCABULARY, ReferenceDistribution
from tests.support.responses import PROMPT, PROMPTS, WITHOUT_EOS, accepted_share, check_likely_tokens, tokens_of

pytestmark = pytest.mark.v2

_BOUNDARY = 1e-4
"""Tokens whose cumulated probability is as close as this to top_p may be kept or not, because of rounding."""


@pytest.fixture(params=["plain_engine", "drafting_engine"])
def engine(request: pytest.FixtureRequest) -> EngineHarness:
    harness: EngineHarness = request.getfixturevalue(request.param)
    return harness


def check_kept(reference: ReferenceDistribution, prompt: list[int], tokens: Partial, sampling: Sampling) -> int:
    """Compare the kept tokens of a response with the exact ones; return the number of positions that decide.

    A position does not, if rounding could change its kept tokens.
    """
    assert tokens.kept_token_ids is not None
    assert len(tokens.token_ids) == len(tokens.kept_token_ids)
    for token, kept in zip(tokens.token_ids, tokens.kept_token_ids, strict=True):
        assert token in kept
    exact = reference.logprobs(prompt, tokens.token_ids, sampling)
    # Without top_p, no sum of probabilities is compared with a limit.
    limits = [sampling.top_p - _BOUNDARY, min(1.0, sampling.top_p + _BOUNDARY)] if sampling.top_p < 1 else []
    nearby = [
        reference.logprobs(prompt, tokens.token_ids, sampling.model_copy(update={"top_p": limit})) for limit in limits
    ]
    checked = 0
    for position, kept in enumerate(tokens.kept_token_ids):
        expected, *others = (
            [int(token) for token in np.flatnonzero(row[position] > -np.inf)] for row in (exact, *nearby)
        )
        if all(other == expected for other in others):
            checked += 1
            assert expected == kept
    return checked


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_k": VOCABULARY, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.9, "temperature": 0.7},
        {"top_k": 4, "allowed_token_ids": WITHOUT_EOS, "repetition_penalty": 1.3},
        {"top_k": 100},
    ],
)
def test_kept_tokens_are_those_of_the_exact_logits(
    engine: EngineHarness, reference: ReferenceDistribution, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "max_tokens": 40, "kept_tokens": True, **settings})
    problem = f"kept-{settings}"
    results = engine.sample(PROMPTS, sampling, problem)
    if engine.history is not None:
        engine.add_history(problem, tokens_of(results))
        results = engine.sample(PROMPTS, sampling, problem)
        assert accepted_share(results) > 0.05
    checked = sum(
        check_kept(reference, prompt, result.tokens, sampling) for prompt, result in zip(PROMPTS, results, strict=True)
    )
    assert checked > 0.95 * sum(len(result.token_ids) for result in results)
    assert all(result.logprobs is None for result in results)


def test_kept_tokens_do_not_change_the_most_likely_tokens(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """vLLM is asked for more tokens than the request."""
    sampling = Sampling(n=1, max_tokens=20, top_k=6, top_logprobs=2, kept_tokens=True)
    for prompt, result in zip(PROMPTS, engine.sample(PROMPTS, sampling), strict=True):
        check_likely_tokens(reference, prompt, result.tokens, sampling)
        check_kept(reference, prompt, result.tokens, sampling)


def test_a_continued_response_has_the_kept_tokens_of_its_prefix(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    sampling = Sampling(n=1, max_tokens=100, top_k=6, top_p=0.9, allowed_token_ids=WITHOUT_EOS, kept_tokens=True)
    partials: list[Partial] = []
    request = engine.request(PROMPT, sampling)
    whole = engine.loop.run(engine.engine.generate(request, 0, on_partial=partials.append, partial_interval=40))
    check_kept(reference, PROMPT, whole.tokens, sampling)
    assert partials
    [continued] = engine.continue_from(PROMPT, sampling, [partials[0]])
    assert whole.tokens.kept_token_ids is not None
    assert continued.tokens.kept_token_ids is not None
    count = partials[0].num_tokens
    assert whole.tokens.kept_token_ids[:count] == continued.tokens.kept_token_ids[:count]
    assert check_kept(reference, PROMPT, continued.tokens, sampling) > 90


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, f"sampling.keptTokens: it needs a top-k from 1 to {MAX_KEPT_TOP_K}"),
        ({"top_k": MAX_KEPT_TOP_K + 1}, "sampling.keptTokens: it needs a top-k"),
        ({"top_k": 5, "temperature": 0}, "sampling.keptTokens: it needs a temperature above 0"),
    ],
)
def test_settings_without_a_bound_of_the_kept_tokens_are_rejected(settings: dict[str, object], message: str) -> None:
    sampling = Sampling.model_validate({"kept_tokens": True, **settings})
    with pytest.raises(AdmissionError, match=message):
        check_admission(sampling, 10, max_model_len=2048, speculative=True)
    check_admission(
        Sampling.model_validate({"kept_tokens": False, **settings}), 10, max_model_len=2048, speculative=True
    )


@given(
    st.lists(st.sampled_from([-3.0, -1.0, -0.5, -np.inf]), min_size=1, max_size=60),
    st.integers(1, MAX_KEPT_TOP_K),
    st.data(),
)
def test_kept_tokens_are_complete_or_unknown(logprobs: list[float], top_k: int, data: st.DataObject) -> None:
    """The most likely tokens of a distribution are what vLLM returns, and any one of those that can be sampled."""
    logprobs[data.draw(st.integers(0, len(logprobs) - 1))] = -0.25
    vocabulary = len(logprobs)
    asked = kept_width(Sampling(kept_tokens=True, top_k=top_k), vocabulary)
    assert asked <= min(MAX_KEPT_WIDTH, vocabulary)
    possible = [token for token, logprob in enumerate(logprobs) if logprob > -np.inf]
    likely = sorted(range(vocabulary), key=lambda token: -logprobs[token])[:asked]
    sampled = data.draw(st.sampled_from(possible))
    returned = {token: SimpleNamespace(logprob=logprobs[token]) for token in {sampled, *likely}}
    found = kept_tokens(returned, asked, vocabulary)
    assert found in (possible, [])
    if len(possible) <= 2 * top_k:
        assert possible == found
