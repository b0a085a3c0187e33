"""What engines report of tokens beside their ids: log-probabilities, of prompts, too, and what filters keep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.manifest.spec import MAX_KEPT_TOP_K, Sampling
from rollout_api.protocol.messages import Partial, RolloutRequest, UpdateMode
from rollout_store.history.store import HistoryStore
from rollout_store.job.admission_rules import AdmissionError, check_admission
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult
from rollout_worker.engine.sampling_params import MAX_KEPT_WIDTH, kept_tokens, kept_width
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import EOS, VOCABULARY, LoopThread, ReferenceDistribution, make_model
from tests.support.responses import (
    MAX_LOGPROB_ERROR,
    PROMPT,
    PROMPTS,
    WITHOUT_EOS,
    accepted_share,
    check_likely_tokens,
    tokens_of,
)

pytestmark = pytest.mark.v2

_BOUNDARY = 1e-4
"""Tokens may be kept or not, because of rounding, if their cumulated probability is as close as this to top_p, or if
the log-probabilities on both sides of top_k are as close to each other.
"""


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
    everything = sampling.model_copy(update={"top_k": 0, "top_p": 1.0})
    ordered = -np.sort(-reference.logprobs(prompt, tokens.token_ids, everything), axis=-1)
    checked = 0
    for position, kept in enumerate(tokens.kept_token_ids):
        expected, *others = (
            [int(token) for token in np.flatnonzero(row[position] > -np.inf)] for row in (exact, *nearby)
        )
        cut = min(sampling.top_k, ordered.shape[-1] - 1)
        is_tie = len(expected) == cut and ordered[position, cut - 1] - ordered[position, cut] < _BOUNDARY
        if not is_tie and all(other == expected for other in others):
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
    whole, partials = engine.generate_partially(engine.request(PROMPT, sampling), 40)
    check_kept(reference, PROMPT, whole.tokens, sampling)
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
        check_admission(sampling, 10, max_model_len=2048)
    check_admission(Sampling.model_validate({"kept_tokens": False, **settings}), 10, max_model_len=2048)


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


TOP = 3
"""Number of most likely tokens that some tests ask for."""
FILTERED = Sampling(n=1, max_tokens=20, temperature=0.5, top_p=0.6, prompt_logprobs=True)
"""Settings that must not affect the log-probabilities of the prompt."""


def random_prompts(count: int, length: int) -> list[list[int]]:
    return [
        [int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=length)] for seed in range(count)
    ]


def check_prompt(reference: ReferenceDistribution, prompt: Sequence[int], tokens: Partial, *, top: int = 0) -> None:
    """Compare the log-probabilities, ranks and most likely tokens of a prompt with the exact ones."""
    assert tokens.prompt_logprobs is not None
    assert len(prompt) - 1 == len(tokens.prompt_logprobs)
    exact = reference.prompt_logprobs(prompt)
    chosen = exact[range(len(exact)), list(prompt[1:])]
    assert np.allclose(chosen, tokens.prompt_logprobs, atol=MAX_LOGPROB_ERROR)
    if not top:
        assert tokens.prompt_ranks is tokens.top_prompt_logprobs is None
        return
    assert tokens.prompt_ranks is not None
    assert tokens.top_prompt_logprobs is not None
    assert list(1 + (exact > chosen[:, None]).sum(axis=1)) == tokens.prompt_ranks
    for row, likely in zip(exact, tokens.top_prompt_logprobs, strict=True):
        expected = [int(token) for token in np.argsort(-row)[:top]]
        assert expected == list(likely)
        assert np.allclose(row[expected], list(likely.values()), atol=MAX_LOGPROB_ERROR)


@pytest.mark.parametrize("top", [0, TOP])
def test_log_probabilities_of_prompts_are_the_models_own(
    engine: EngineHarness, reference: ReferenceDistribution, top: int
) -> None:
    """Neither temperature and filters nor cached keys and values change them."""
    prompts = [[7], [7, 3], *PROMPTS[:8], *random_prompts(4, 300)]
    sampling = FILTERED.model_copy(update={"top_prompt_logprobs": top})
    problem = f"prompts-{top}"
    for repetition in range(2):
        results = engine.sample(prompts, sampling, problem)
        for prompt, result in zip(prompts, results, strict=True):
            check_prompt(reference, prompt, result.tokens, top=top)
        if engine.history is not None and not repetition:
            engine.add_history(problem, tokens_of(results))
    if engine.history is not None:
        assert accepted_share(results) > 0.05


def test_log_probabilities_of_prompts_that_are_prefilled_in_chunks(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """Together, the prompts exceed the number of tokens of a step several times."""
    prompts = random_prompts(40, 400)
    assert sum(map(len, prompts)) > 2 * engine.engine.config.spec.max_num_seqs * 64
    for prompt, result in zip(prompts, engine.sample(prompts, FILTERED), strict=True):
        check_prompt(reference, prompt, result.tokens)


def test_log_probabilities_of_prompts_are_not_returned_unless_requested(engine: EngineHarness) -> None:
    [result] = engine.sample([PROMPT], FILTERED.model_copy(update={"prompt_logprobs": False}))
    assert {} == result.tokens.prompt_logprob_fields()


def test_a_continued_response_keeps_the_log_probabilities_of_its_prompt(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """They are not computed again: the tokens of the prefix are not part of the prompt, and may be cached."""
    sampling = Sampling(
        n=1, max_tokens=120, allowed_token_ids=WITHOUT_EOS, prompt_logprobs=True, top_prompt_logprobs=TOP
    )
    whole, partials = engine.generate_partially(engine.request(PROMPT, sampling), 40)
    check_prompt(reference, PROMPT, whole.tokens, top=TOP)
    for partial in partials:
        assert whole.tokens.prompt_logprob_fields() == partial.prompt_logprob_fields()
    # Values that no model has computed, so that it is seen where they come from.
    known = partials[0].model_copy(update={"prompt_logprobs": [-1.5] * (len(PROMPT) - 1)})
    [continued] = engine.continue_from(PROMPT, sampling, [known])
    assert 120 == len(continued.token_ids)
    assert known.prompt_logprob_fields() == continued.tokens.prompt_logprob_fields()


def test_a_prefix_without_log_probabilities_of_the_prompt_is_rejected(engine: EngineHarness) -> None:
    [result] = engine.sample([PROMPT], Sampling(n=1, max_tokens=10, allowed_token_ids=WITHOUT_EOS))
    prefix = result.tokens.since(0).model_copy(update={"token_ids": result.token_ids[:5]})
    sampling = Sampling(n=1, max_tokens=20, prompt_logprobs=True)
    with pytest.raises(AdmissionError, match=r"sampling.promptLogprobs requires .* prompt_logprobs or omit the prefix"):
        engine.continue_from(PROMPT, sampling, [prefix])
    prefix = prefix.model_copy(update={"prompt_logprobs": [-1.0] * (len(PROMPT) - 1)})
    with pytest.raises(AdmissionError, match=r"sampling.topPromptLogprobs requires prompt_ranks"):
        engine.continue_from(PROMPT, sampling.model_copy(update={"top_prompt_logprobs": 1}), [prefix])


def test_log_probabilities_of_a_prompt_belong_to_the_version_of_the_first_token(
    engine: EngineHarness, reference: ReferenceDistribution, model: Path, tmp_path: Path
) -> None:
    """Weights are loaded while prompts wait, are prefilled, and have been prefilled."""
    other = ReferenceDistribution(make_model(tmp_path, seed=9))
    prompts = random_prompts(48, 400)
    sampling = Sampling(n=1, max_tokens=40, allowed_token_ids=WITHOUT_EOS, prompt_logprobs=True)

    async def run(requests: Sequence[RolloutRequest]) -> list[GenerationResult]:
        started = asyncio.Event()
        calls = [
            asyncio.ensure_future(engine.engine.generate(request, 0, on_tokens=lambda _: started.set()))
            for request in requests
        ]
        await started.wait()
        await engine.engine.load_weights(tmp_path, 1, UpdateMode.RECOMPUTE)
        return list(await asyncio.gather(*calls))

    try:
        results = engine.loop.run(run([engine.request(prompt, sampling) for prompt in prompts]))
        firsts = [result.weight_spans[0].weight_version for result in results]
        assert {0, 1} == set(firsts)
        for prompt, result, version in zip(prompts, results, firsts, strict=True):
            check_prompt((reference, other)[version], prompt, result.tokens)
    finally:
        engine.loop.run(engine.engine.load_weights(model, 0))


# Engines whose log-probabilities are those of the model before temperature, filters and penalties

SETTINGS = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 9,
    "repetition_penalty": 1.2,
    "min_tokens": 5,
    "allowed_token_ids": [1, 3, 5, 7, 9, 11, 13, EOS],
}
"""Settings that raw log-probabilities do not reflect."""

MIN_DIFFERENCE = 0.05
"""In each response, a raw and a processed log-probability differ by more than this."""


@pytest.fixture(scope="module", params=["plain", "drafting"])
def raw_engine(
    request: pytest.FixtureRequest,
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
) -> Iterator[EngineHarness]:
    config = engine_config(model, drafting_config if request.param == "drafting" else None)
    spec = config.spec.model_copy(update={"logprobs_mode": "raw"})
    engine = loop.run(Engine.start(replace(config, spec=spec)))
    yield EngineHarness(engine, loop, history_store if request.param == "drafting" else None)
    engine.close()


@pytest.mark.engine
@pytest.mark.slow
def test_raw_log_probabilities_are_those_of_the_model(
    raw_engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    sampling = Sampling.model_validate({"n": 1, "max_tokens": 30, "top_logprobs": 4, **SETTINGS})
    results = raw_engine.sample(PROMPTS, sampling, "raw")
    if raw_engine.history is not None:
        raw_engine.add_history("raw", tokens_of(results))
        results = raw_engine.sample(PROMPTS, sampling, "raw")
        assert accepted_share(results) > 0.05
    for prompt, result in zip(PROMPTS, results, strict=True):
        check_likely_tokens(reference, prompt, result.tokens, Sampling(top_logprobs=4))
        processed = reference.logprobs(prompt, result.token_ids, sampling)
        assert not np.allclose(
            processed[range(len(processed)), result.token_ids], np.array(result.logprobs), atol=MIN_DIFFERENCE
        )


@pytest.mark.engine
@pytest.mark.slow
def test_kept_tokens_are_not_known_from_raw_log_probabilities(raw_engine: EngineHarness) -> None:
    with pytest.raises(AdmissionError, match=r"sampling.keptTokens needs engine.logprobsMode: processed"):
        raw_engine.sample([PROMPT], Sampling(n=1, top_k=5, kept_tokens=True, max_tokens=5))
