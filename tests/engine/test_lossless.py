"""Drafting leaves the output distribution unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, FinishReason, RolloutRequest
from rollout_store.history.store import HistoryStore
from rollout_store.job.admission_rules import AdmissionError
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult
from tests.support.engines import EngineHarness, engine_config, needs_v2
from tests.support.reference_model import EOS, VOCABULARY, LoopThread, ReferenceDistribution, chi_square
from tests.support.responses import (
    MAX_LOGPROB_ERROR,
    MIN_P_VALUE,
    PROMPT,
    PROMPTS,
    SAMPLES,
    WITHOUT_EOS,
    accepted_share,
    check_likely_tokens,
    sample_exactly,
    tokens_of,
)

pytestmark = pytest.mark.v2

REPOSITORY = Path(__file__).parents[2]


def sample_with_drafts(
    engine: EngineHarness, problem: str, sampling: Sampling, samples: int = SAMPLES
) -> list[GenerationResult]:
    """Sample responses to PROMPT, drafted from a history of responses with the same settings."""
    history = engine.sample([PROMPT], sampling.model_copy(update={"n": 64}), problem)
    engine.add_history(problem, tokens_of(history))
    return engine.sample([PROMPT], sampling.model_copy(update={"n": samples}), problem)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("greedy", {}),
        ("penalties", {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
        ("min-tokens-3", {"min_tokens": 3}),
        ("min-tokens-40", {"min_tokens": 40}),
        ("allowed", {"allowed_token_ids": [1, 3, 5, 7, 11, EOS]}),
        ("stop-token", {"stop_token_ids": [7]}),
        ("stop-string", {"stop": ["w7 w", "w3"]}),
        ("ignore-eos", {"ignore_eos": True}),
    ],
)
def test_greedy_tokens_are_the_same_with_and_without_drafts(
    plain_engine: EngineHarness, drafting_engine: EngineHarness, name: str, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "temperature": 0, "max_tokens": 60, **settings})
    expected = plain_engine.sample(PROMPTS, sampling)
    problem = f"greedy-{name}"
    drafting_engine.add_history(problem, tokens_of(expected)[::2])
    actual = drafting_engine.sample(PROMPTS, sampling, problem)
    assert tokens_of(expected) == tokens_of(actual)
    assert [response.finish_reason for response in expected] == [response.finish_reason for response in actual]
    assert accepted_share(actual) > 0.2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("t1", {}),
        ("t0.7", {"temperature": 0.7}),
        ("top-p", {"top_p": 0.9}),
        ("top-k", {"top_k": 20}),
        ("top-k-4", {"top_k": 4, "temperature": 1.3}),
        ("all-three", {"temperature": 0.8, "top_p": 0.8, "top_k": 6}),
        ("penalties", {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
        ("allowed", {"allowed_token_ids": [0, 1, 2, 5, 8, 13, 21]}),
        ("min-tokens", {"min_tokens": 4}),
        ("ignore-eos", {"ignore_eos": True}),
        ("seeded", {"seed": 11}),
        ("structured-outputs", {"structured_outputs": {"regex": "(w1?[0-9]w[2468]){1,2}"}}),
    ],
)
def test_sampled_tokens_have_the_exact_distribution_of_the_model(
    drafting_engine: EngineHarness, reference: ReferenceDistribution, name: str, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"temperature": 1.0, "max_tokens": 5, **settings})
    sample_exactly(reference, sampling, partial(sample_with_drafts, drafting_engine, f"distribution-{name}"))


def test_settings_that_exclude_drafts_apply_beside_responses_with_drafts(
    drafting_engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """Half of the batch is drafted."""
    drafted, problem = Sampling(n=32, max_tokens=400, allowed_token_ids=WITHOUT_EOS), "beside-drafts"
    drafting_engine.add_history(problem, tokens_of(drafting_engine.sample([PROMPT], drafted, problem)))
    restricted = {"min_p": 0.1, "logit_bias": {3: 1.5, EOS: -1.0}}
    sampling = Sampling.model_validate(
        {"n": SAMPLES, "max_tokens": 5, "temperature": 0.8, "logprobs": True, **restricted}
    )

    def sample_beside_drafts(sampling: Sampling) -> list[GenerationResult]:
        requests = [drafting_engine.request(PROMPT, each, problem) for each in (drafted, sampling)]
        results = drafting_engine.generate(requests)
        assert accepted_share(results[: drafted.n]) > 0.05
        return results[drafted.n :]

    results = sample_exactly(reference, sampling, sample_beside_drafts, min_accepted_share=-1)
    assert {0} == {result.num_draft_tokens for result in results}
    for result in results[:50]:
        assert result.logprobs is not None
        assert reference.max_error(PROMPT, result.token_ids, result.logprobs, sampling) < MAX_LOGPROB_ERROR


def test_settings_without_an_effect_do_not_exclude_drafts(drafting_engine: EngineHarness) -> None:
    sampling = Sampling.model_validate({"max_tokens": 40, "min_p": 0, "logit_bias": {"5": 0, "6": -0.0}})
    assert accepted_share(sample_with_drafts(drafting_engine, "no-effect", sampling, samples=16)) > 0.05


def test_drafts_that_a_grammar_rejects_are_not_sampled(drafting_engine: EngineHarness) -> None:
    """The history has responses without the grammar, too."""
    free = Sampling(n=32, max_tokens=60, allowed_token_ids=WITHOUT_EOS)
    problem = "rejected-by-a-grammar"
    drafting_engine.add_history(problem, tokens_of(drafting_engine.sample([PROMPT], free, problem)))
    regex = "(w[13579]w[02468]){5,25}"
    sampling = Sampling(n=32, max_tokens=60, structured_outputs={"regex": regex})
    results = drafting_engine.sample([PROMPT], sampling, problem)
    assert {FinishReason.STOP} == {result.finish_reason for result in results}
    for result in results:
        assert re.fullmatch(regex, "".join(f"w{token}" for token in result.token_ids if token != EOS))
    assert (
        sum(result.num_draft_tokens for result in results) > sum(result.num_accepted_tokens for result in results) > 0
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "root ::= missing"}},
        {"structured_outputs": {"json": {"type": "unknown"}}},
        {"structured_outputs": {"regex": "x"}},  # no token of the model begins with x
        pytest.param({"allowed_token_ids": [1, 2] * 600}, marks=needs_v2),
    ],
)
def test_what_vllm_cannot_apply_is_refused_and_the_engine_continues(
    drafting_engine: EngineHarness, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "max_tokens": 5, **settings})
    with pytest.raises(AdmissionError, match="vLLM"):
        drafting_engine.sample([PROMPT], sampling)
    assert drafting_engine.sample([PROMPT], Sampling(n=1, max_tokens=5))


def test_a_response_ends_when_comparing_it_with_its_grammar_takes_too_long(drafting_engine: EngineHarness) -> None:
    """With nested repetitions, the time grows with a high power of the length."""
    grammar = {"regex": "(" * 5 + "(w1)" + "{1,200})" * 5}
    short = Sampling(n=1, max_tokens=10, min_tokens=10, structured_outputs=grammar)
    [response] = drafting_engine.sample([PROMPT], short)
    assert [1] * 10 == list(response.token_ids)
    with pytest.raises(AdmissionError, match="takes too long"):
        drafting_engine.sample([PROMPT], Sampling(n=1, max_tokens=200, min_tokens=200, structured_outputs=grammar))
    assert drafting_engine.sample([PROMPT], Sampling(n=1, max_tokens=5))


@pytest.mark.engine
@pytest.mark.slow
def test_a_response_can_continue_behind_end_tokens_of_the_model(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, temperature=1.0, max_tokens=60, ignore_eos=True)
    responses = drafting_engine.sample(PROMPTS, sampling, "behind-the-end")
    assert {(FinishReason.LENGTH, 60)} == {(each.finish_reason, len(each.token_ids)) for each in responses}
    assert any(EOS in each.token_ids[:-1] for each in responses)


@pytest.fixture(scope="module")
def small_cache_engine(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[EngineHarness]:
    """A drafting engine with a KV cache that holds few of the responses."""
    config = replace(engine_config(model, drafting_config), overrides={"num_gpu_blocks_override": 16})
    engine = loop.run(Engine.start(config))
    yield EngineHarness(engine, loop, history_store)
    engine.close()


def test_greedy_tokens_are_the_same_when_responses_are_preempted(
    plain_engine: EngineHarness, small_cache_engine: EngineHarness
) -> None:
    sampling = Sampling(n=1, temperature=0, max_tokens=300, allowed_token_ids=WITHOUT_EOS)
    expected = plain_engine.sample(PROMPTS[:12], sampling)
    small_cache_engine.add_history("preempted", tokens_of(expected)[::2])
    before = small_cache_engine.engine.counters.preemptions
    actual = small_cache_engine.sample(PROMPTS[:12], sampling, "preempted")
    assert small_cache_engine.engine.counters.preemptions > before
    assert tokens_of(expected) == tokens_of(actual)
    assert accepted_share(actual) > 0.2


@pytest.mark.slow
def test_the_test_detects_a_temperature_that_is_off_by_15_percent(
    drafting_engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=5)
    wrong = sampling.model_copy(update={"temperature": 1.15})
    with pytest.raises(AssertionError, match="p-value"):
        sample_exactly(reference, wrong, lambda _: sample_with_drafts(drafting_engine, "off", sampling))


@pytest.mark.engine
@pytest.mark.slow
def test_the_test_detects_the_defect_of_vllms_sampling_on_cpu(
    model: Path,
    loop: LoopThread,
    reference: ReferenceDistribution,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
    drafting_engine: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not loop.run(drafting_engine.engine.stats())["sampling_patched"]:
        pytest.skip("vLLM's expand_batch_to_tokens returns the right values on this machine")
    speculative_config = {
        "method": "custom_class",
        "model": "tests.support.unpatched_proposer.UnpatchedProposer",
        "num_speculative_tokens": drafting_config.max_draft_tokens,
    }
    config = replace(engine_config(model, drafting_config), overrides={"speculative_config": speculative_config})
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    engine = loop.run(Engine.start(config))
    try:
        sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=5)
        results = sample_with_drafts(EngineHarness(engine, loop, history_store), "unpatched", sampling)
        p, _ = chi_square(reference, PROMPT, tokens_of(results), sampling)
        assert p < MIN_P_VALUE
    finally:
        engine.close()


def test_log_probabilities_are_exact_when_drafts_are_accepted(
    drafting_engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=20, logprobs=True)
    results = sample_with_drafts(drafting_engine, "logprobs", sampling, samples=64)
    assert accepted_share(results) > 0.05
    for result in results:
        assert result.logprobs is not None
        assert reference.max_error(PROMPT, result.token_ids, result.logprobs, sampling) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_tokens": 5}])
def test_the_most_likely_tokens_are_exact_when_drafts_are_accepted(
    drafting_engine: EngineHarness, reference: ReferenceDistribution, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"temperature": 0.7, "max_tokens": 20, "top_logprobs": 5, **settings})
    results = sample_with_drafts(drafting_engine, f"likely-tokens-{settings}", sampling, samples=64)
    assert accepted_share(results) > 0.05
    for result in results:
        check_likely_tokens(reference, PROMPT, result.tokens, sampling)


def test_a_seed_has_the_same_tokens_in_any_request_and_order_of_arrival(drafting_engine: EngineHarness) -> None:
    """Nothing is drafted, because drafts determine how the numbers of a random stream are used."""

    def step(uid: str, seed: int, numbers: Iterable[int]) -> dict[int, list[list[int]]]:
        requests = [
            RolloutRequest(
                job_uid=uid,
                request_id=f"{uid}-{number}",
                problem_id="never-seen",
                prompt_token_ids=PROMPTS[number],
                sampling=Sampling(n=3, seed=seed, max_tokens=30),
                draft_mode=DraftMode.OFF,
            )
            for number in numbers
        ]
        tokens = tokens_of(drafting_engine.generate(requests))
        return {number: tokens[3 * index : 3 * index + 3] for index, number in enumerate(numbers)}

    first = step("a", 5, range(6))
    assert first == step("b", 5, [3, 1, 5, 0, 4, 2])
    assert first[2] == step("c", 5, [2])[2]
    assert first != step("a", 6, range(6))
    assert 18 == len({tuple(tokens) for group in first.values() for tokens in group})


def test_the_seed_of_a_job_has_other_tokens_in_each_request() -> None:
    defaults = Sampling(seed=5)
    requests = [
        RolloutRequest(job_uid="a", request_id=name, prompt_token_ids=[1]).with_defaults(defaults) for name in "abab"
    ]
    seeds = [request.sampling.seed for request in requests]
    assert (2, seeds[:2]) == (len(set(seeds)), seeds[2:])
    assert seeds == [request.with_defaults(defaults).sampling.seed for request in requests]
    own = RolloutRequest(job_uid="a", request_id="a", prompt_token_ids=[1], sampling=Sampling(seed=7))
    assert 7 == own.with_defaults(defaults).sampling.seed


def test_a_seed_has_the_same_tokens_if_its_prompt_is_read_in_several_steps(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, seed=7, max_tokens=4)
    requests = [
        RolloutRequest(
            job_uid="chunks",
            request_id=str(number),
            prompt_token_ids=[(number + place * (number + 3)) % EOS for place in range(480)],
            sampling=sampling,
            draft_budget=0,
        )
        for number in range(40)
    ]
    together = tokens_of(drafting_engine.generate(requests))  # more tokens than a step may have
    alone = [tokens_of(drafting_engine.generate([request]))[0] for request in requests]
    assert together == alone


def test_almost_every_token_of_the_vocabulary_is_sampled(drafting_engine: EngineHarness) -> None:
    """The tests of the distribution would show little with a model that is almost deterministic."""
    responses = tokens_of(drafting_engine.sample([PROMPT], Sampling(n=400, max_tokens=10)))
    assert len({token for tokens in responses for token in tokens}) >= VOCABULARY - 4
