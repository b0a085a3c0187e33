"""Responses that are returned in parts, continued from a prefix, and stopped early."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, FinishReason, Partial, WeightSpan
from rollout_worker.engine.response import GenerationResult
from tests.support.engines import MAX_DRAFT_TOKENS, EngineHarness
from tests.support.reference_model import EOS, ReferenceDistribution
from tests.support.responses import (
    MAX_LOGPROB_ERROR,
    PROMPT,
    PROMPTS,
    SAMPLES,
    WITHOUT_EOS,
    prefix_of,
    sample_exactly,
    tokens_of,
)

pytestmark = pytest.mark.v2

LONG = Sampling(n=1, max_tokens=500, allowed_token_ids=WITHOUT_EOS, logprobs=True)
FIRST_VERSION = [WeightSpan(start=0, weight_version=0)]


@pytest.fixture(params=["plain_engine", "drafting_engine"])
def engine(request: pytest.FixtureRequest) -> EngineHarness:
    harness: EngineHarness = request.getfixturevalue(request.param)
    return harness


def is_idle(engine: EngineHarness) -> bool:
    """Return whether neither vLLM nor the drafter has a response; first sample one more, which updates both."""
    engine.sample([PROMPT], Sampling(n=1, max_tokens=2))
    stats = engine.loop.run(engine.engine.stats())
    num_tracked = stats["tracked_responses"] if engine.engine.config.drafting else 0
    return engine.engine.counters.running == 0 and num_tracked == 0


@pytest.mark.parametrize("interval", [40, 100])
def test_partials_are_returned_after_at_most_the_interval(engine: EngineHarness, interval: int) -> None:
    sampling = Sampling(n=1, max_tokens=300, allowed_token_ids=WITHOUT_EOS, logprobs=True, temperature=0.3)
    cache_usage: list[float] = []
    result, partials = engine.generate_partially(
        engine.request(PROMPT, sampling, "partials"),
        interval,
        max_gap=interval,
        on_partial=lambda _: cache_usage.append(engine.engine.counters.kv_cache_usage),
    )
    assert 0 < max(cache_usage) < 1
    max_step_tokens = 1 + (MAX_DRAFT_TOKENS if engine.engine.config.drafting else 0)
    assert len(partials) <= 300 / (interval - max_step_tokens)
    assert result.logprobs is not None
    for partial in partials:
        length = len(partial.token_ids)
        assert result.token_ids[:length] == partial.token_ids
        assert result.logprobs[:length] == partial.logprobs
        assert result.weight_spans == partial.weight_spans == FIRST_VERSION


def test_partials_have_the_most_likely_tokens(engine: EngineHarness) -> None:
    request = engine.request(PROMPT, Sampling(n=1, max_tokens=120, allowed_token_ids=WITHOUT_EOS, top_logprobs=2))
    result, partials = engine.generate_partially(request, 40)
    assert result.tokens.top_logprobs is not None
    assert {2} == {len(likely) for likely in result.tokens.top_logprobs}
    for partial in partials:
        assert partial.since(0) == result.tokens.model_copy(
            update={name: values[: partial.num_tokens] for name, values in result.tokens if isinstance(values, list)}
            | {"weight_spans": FIRST_VERSION}
        )


def test_no_partial_is_returned_of_a_short_response_or_without_an_interval(drafting_engine: EngineHarness) -> None:
    partials: list[Partial] = []
    for sampling, interval in ((Sampling(n=1, max_tokens=30), 64), (Sampling(n=1, max_tokens=200), 0)):
        request = drafting_engine.request(PROMPT, sampling)
        generate = drafting_engine.engine.generate(request, 0, on_partial=partials.append, partial_interval=interval)
        drafting_engine.loop.run(generate)
    assert [] == partials


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.2},
        {"min_tokens": 20},
        {"allowed_token_ids": [1, 3, 5, 7, 11, EOS]},
        {"stop_token_ids": [7]},
        {"ignore_eos": True},
        {"ignore_eos": True, "stop_token_ids": [7]},
        {"top_logprobs": 3},
    ],
)
def test_a_continued_greedy_response_equals_an_uninterrupted_one(
    engine: EngineHarness, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "temperature": 0, "max_tokens": 60, "logprobs": True, **settings})
    problem = f"continued-{settings}"
    whole = engine.sample(PROMPTS, sampling, problem)
    if engine.history is not None:
        engine.add_history(problem, tokens_of(whole)[::2])
    for length in (1, 13, 59):
        longer = [
            (prompt, response)
            for prompt, response in zip(PROMPTS, whole, strict=True)
            if len(response.token_ids) > length
        ]
        requests = [
            engine.request(prompt, sampling, problem, prefix=prefix_of(response, length)) for prompt, response in longer
        ]
        for (_, expected), actual in zip(longer, engine.generate(requests), strict=True):
            assert expected.token_ids == actual.token_ids
            assert expected.finish_reason == actual.finish_reason
            assert expected.weight_spans == actual.weight_spans
            assert expected.logprobs is not None
            assert actual.logprobs is not None
            assert np.allclose(expected.logprobs, actual.logprobs, atol=MAX_LOGPROB_ERROR)
            assert expected.ranks == actual.ranks
            for exact, found in zip(expected.top_logprobs or (), actual.top_logprobs or (), strict=True):
                assert list(exact) == list(found)
                assert np.allclose(list(exact.values()), list(found.values()), atol=MAX_LOGPROB_ERROR)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"min_tokens": 4},
        {"seed": 11},
    ],
)
def test_a_continued_response_has_the_exact_distribution(
    drafting_engine: EngineHarness, reference: ReferenceDistribution, settings: dict[str, object]
) -> None:
    problem = f"continued-distribution-{settings}"
    sampling = Sampling.model_validate({"n": SAMPLES, "max_tokens": 6, **settings})
    history = drafting_engine.sample([PROMPT], sampling.model_copy(update={"n": 64}), problem)
    drafting_engine.add_history(problem, tokens_of(history))

    def sample(sampling: Sampling) -> list[GenerationResult]:
        two_tokens = sampling.model_copy(update={"max_tokens": 2, "min_tokens": min(2, sampling.min_tokens)})
        started = drafting_engine.sample([PROMPT], two_tokens, problem)
        return drafting_engine.continue_from(
            PROMPT, sampling.model_copy(update={"n": 1}), [prefix_of(response, 2) for response in started], problem
        )

    sample_exactly(reference, sampling, sample, min_accepted_share=0.02)


def test_the_first_draft_after_a_prefix_continues_the_history(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS)
    whole = drafting_engine.sample(PROMPTS, sampling, "whole")
    for number, result in enumerate(whole):
        drafting_engine.add_history(f"whole-{number}", [result.token_ids])
    before = drafting_engine.vllm_counts()
    short = sampling.model_copy(update={"max_tokens": 40 + 1 + MAX_DRAFT_TOKENS + 1})
    results = drafting_engine.generate(
        [
            drafting_engine.request(prompt, short, f"whole-{number}", prefix=prefix_of(result, 40))
            for number, (prompt, result) in enumerate(zip(PROMPTS, whole, strict=True))
        ]
    )
    # The first step samples one token without a draft, the second accepts a whole draft and samples one more.
    assert [(MAX_DRAFT_TOKENS, 2)] * len(PROMPTS) == [
        (result.num_accepted_tokens, result.num_decoding_steps) for result in results
    ]
    drafting_engine.check_counts(results, before)


@pytest.mark.parametrize(
    ("prefix", "reason", "ignore_eos"),
    [
        ([1, 2, 3, 4], FinishReason.LENGTH, False),
        ([1, EOS], FinishReason.STOP, False),
        ([1, 2, 3, 7], FinishReason.STOP, False),
        ([1, 2, 3, EOS], FinishReason.LENGTH, True),
        ([1, EOS, 7], FinishReason.STOP, True),
    ],
)
def test_a_prefix_that_has_ended_is_returned_without_sampling(
    drafting_engine: EngineHarness, prefix: list[int], reason: FinishReason, *, ignore_eos: bool
) -> None:
    before = drafting_engine.engine.counters.prompt_tokens
    sampling = Sampling(n=1, max_tokens=4, stop_token_ids=[7], ignore_eos=ignore_eos)
    partial = Partial(token_ids=prefix, weight_spans=FIRST_VERSION)
    [result] = drafting_engine.continue_from(PROMPT, sampling, [partial])
    assert (prefix, reason, FIRST_VERSION) == (result.token_ids, result.finish_reason, result.weight_spans)
    assert before == drafting_engine.engine.counters.prompt_tokens


def test_a_stopped_response_returns_its_tokens_so_far(engine: EngineHarness, reference: ReferenceDistribution) -> None:
    partials: list[Partial] = []

    async def run() -> GenerationResult:
        stop_event = asyncio.Event()

        def stop_after_three(partial: Partial) -> None:
            partials.append(partial)
            if len(partials) == 3:
                stop_event.set()

        return await engine.engine.generate(
            engine.request(PROMPT, LONG),
            0,
            on_partial=stop_after_three,
            partial_interval=16,
            stop_event=stop_event,
        )

    result = engine.loop.run(run())
    assert 0 <= result.num_accepted_tokens <= result.num_draft_tokens
    assert result.finish_reason is None
    assert 3 == len(partials)
    assert partials[-1].token_ids == result.token_ids[: len(partials[-1].token_ids)]
    assert len(partials[-1].token_ids) <= len(result.token_ids) < 300
    assert FIRST_VERSION == result.weight_spans
    assert result.logprobs is not None
    assert reference.max_error(PROMPT, result.token_ids, result.logprobs, LONG) < MAX_LOGPROB_ERROR
    assert is_idle(engine)


@pytest.mark.parametrize("turns", [0, 1, 5, 40])
def test_a_response_can_be_stopped_at_any_time(engine: EngineHarness, turns: int) -> None:
    """Also before vLLM has received it; *turns* is the number of turns of the event loop."""

    async def run() -> GenerationResult:
        stop_event = asyncio.Event()
        request = engine.request(PROMPT, LONG)
        task = asyncio.create_task(engine.engine.generate(request, 0, stop_event=stop_event))
        for _ in range(turns):
            await asyncio.sleep(0)
        stop_event.set()
        return await task

    result = engine.loop.run(run())
    assert result.finish_reason is None
    assert len(result.token_ids) < 300
    assert bool(result.token_ids) == bool(result.weight_spans)
    assert is_idle(engine)


@pytest.mark.parametrize("interval", [0, 400])
def test_a_stopped_response_returns_tokens_that_vllm_held_back(engine: EngineHarness, interval: int) -> None:
    async def run() -> GenerationResult:
        stop_event = asyncio.Event()
        # Without drafts, so that tokens that vLLM samples after the stop do not count as accepted.
        request = engine.request(PROMPT, LONG, draft_mode=DraftMode.OFF)
        before = engine.engine.counters.tokens
        task = asyncio.create_task(engine.engine.generate(request, 0, partial_interval=interval, stop_event=stop_event))
        while engine.engine.counters.tokens < before + 40:
            await asyncio.sleep(0.001)
        stop_event.set()
        return await task

    result = engine.loop.run(run())
    assert 40 <= len(result.token_ids) < 400
    assert 0 == result.num_accepted_tokens
    assert result.logprobs is not None
    assert len(result.token_ids) == len(result.logprobs)


def test_a_cancelled_response_is_aborted(engine: EngineHarness) -> None:
    async def run() -> int:
        started = asyncio.Event()
        generate = engine.engine.generate(
            engine.request(PROMPT, LONG), 0, on_partial=lambda _: started.set(), partial_interval=16
        )
        task = asyncio.create_task(generate)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine.engine.counters.tokens

    before = engine.loop.run(run())
    assert is_idle(engine)
    assert engine.engine.counters.tokens - before < 200


def test_read_and_cached_tokens_are_counted(engine: EngineHarness) -> None:
    prompt = [int(token) for token in np.random.default_rng(77).integers(0, EOS, size=300)]
    counters = engine.engine.counters
    read, cached = counters.prompt_tokens, counters.cached_tokens
    first, second = (engine.sample([prompt], Sampling(n=1, max_tokens=4))[0] for _ in range(2))
    assert 0 == first.num_cached_tokens
    assert 128 <= second.num_cached_tokens < 300
    assert 600 == counters.prompt_tokens - read
    assert second.num_cached_tokens == counters.cached_tokens - cached
