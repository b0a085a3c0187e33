"""Drafting in vLLM's V2 model runner: several ranks, and the layout of batches for CUDA graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import UpdateMode
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.draft_settings import DraftingConfig
from tests.support.engines import EngineHarness, engine_config, needs_v2, start_with_extension
from tests.support.faulty_extension import (
    ExactVerificationExtension,
    PlacesExtension,
    RestingExtension,
    UniformDraftsExtension,
    WarmUpExtension,
)
from tests.support.reference_model import LoopThread, ReferenceDistribution, make_model
from tests.support.responses import (
    MAX_LOGPROB_ERROR,
    PROMPT,
    PROMPTS,
    SAMPLES,
    WITHOUT_EOS,
    accepted_share,
    sample_exactly,
    tokens_of,
)

pytestmark = [needs_v2, pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

BLOCK_SIZE = 128
"""Tokens of one block of the KV cache on CPUs."""
GREEDY = Sampling(n=1, temperature=0, max_tokens=60, allowed_token_ids=WITHOUT_EOS)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest,
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
) -> Iterator[EngineHarness]:
    """An engine on two ranks, or one that lays out batches as with CUDA graphs, although there are none on CPUs."""
    config = engine_config(model, drafting_config)
    ranks, _, layout = request.param.partition(", ")
    if ranks != "one rank":
        config = replace(config, spec=config.spec.model_copy(update={f"{ranks}_parallel_size": 2}))
    if layout == "cuda graphs":
        engine = start_with_extension(loop, config, ExactVerificationExtension)
        loop.run(engine.collective_rpc("test_verify_exactly"))
    elif request.param == "uniform drafts":
        engine = start_with_extension(loop, config, UniformDraftsExtension)
        loop.run(engine.collective_rpc("test_verify_uniformly"))
    else:
        engine = start_with_extension(loop, config, RestingExtension)
    yield EngineHarness(engine, loop, history_store)
    engine.close()


on_all_engines = pytest.mark.parametrize(
    "engine",
    ["tensor", "pipeline", "one rank, cuda graphs", "tensor, cuda graphs", "uniform drafts"],
    indirect=True,
    scope="module",
)
on_two_ranks = pytest.mark.parametrize("engine", ["tensor", "pipeline"], indirect=True, scope="module")
with_uniform_drafts = pytest.mark.parametrize("engine", ["uniform drafts"], indirect=True, scope="module")
with_cuda_graphs = pytest.mark.parametrize("engine", ["one rank, cuda graphs"], indirect=True, scope="module")
deferring = pytest.mark.parametrize(
    "engine", ["one rank, cuda graphs", "tensor, cuda graphs"], indirect=True, scope="module"
)


@on_all_engines
def test_greedy_tokens_are_the_same_with_and_without_drafts(engine: EngineHarness) -> None:
    requests = [engine.request(prompt, GREEDY, "greedy", draft_budget=0) for prompt in PROMPTS]
    expected = tokens_of(engine.generate(requests))
    engine.add_history("greedy", expected[::2])
    actual = engine.sample(PROMPTS, GREEDY, "greedy")
    assert expected == tokens_of(actual)
    assert accepted_share(actual) > 0.2


@on_all_engines
@pytest.mark.parametrize(
    ("name", "settings"), [("t1", {}), ("filtered", {"temperature": 0.7, "top_p": 0.9, "top_k": 12})]
)
def test_sampled_tokens_have_the_exact_distribution_of_the_model(
    engine: EngineHarness, reference: ReferenceDistribution, name: str, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"temperature": 1.0, "max_tokens": 5, "logprobs": True, **settings})
    history = engine.sample([PROMPT], sampling.model_copy(update={"n": 64}), f"sampled-{name}")
    engine.add_history(f"sampled-{name}", tokens_of(history))
    many = sampling.model_copy(update={"n": SAMPLES})
    results = sample_exactly(reference, many, lambda many: engine.sample([PROMPT], many, f"sampled-{name}"))
    for result in results[:64]:
        assert result.logprobs is not None
        assert reference.max_error(PROMPT, result.token_ids, result.logprobs, sampling) < MAX_LOGPROB_ERROR


@on_all_engines
def test_steps_that_do_not_wait_for_drafts_leave_the_tokens_the_same(
    engine: EngineHarness, plain_engine: EngineHarness
) -> None:
    expected = tokens_of(plain_engine.sample(PROMPTS, GREEDY))
    engine.add_history("rests", expected[::2])
    engine.loop.run(engine.engine.collective_rpc("test_rest_often"))
    results = engine.sample(PROMPTS, GREEDY, "rests")
    assert expected == tokens_of(results)
    assert accepted_share(results) > 0.2
    assert sum(engine.loop.run(engine.engine.collective_rpc("test_rests"))) > 5


@with_uniform_drafts
def test_all_requests_of_a_step_verify_as_many_tokens(engine: EngineHarness) -> None:
    responses = tokens_of(engine.sample(PROMPTS, GREEDY, "uniform", draft_budget=0))
    engine.add_history("uniform", responses[::2])
    assert accepted_share(engine.sample(PROMPTS, GREEDY, "uniform")) > 0.2
    [steps] = engine.loop.run(engine.engine.collective_rpc("test_steps_with_drafts"))
    assert [] == [tokens for tokens in steps if len(set(tokens)) > 1]
    assert {2, 3, 5} >= {tokens[0] for tokens in steps} > {5}


@on_two_ranks
def test_responses_on_two_ranks_continue_after_weight_updates_and_aborts(
    engine: EngineHarness, model: Path, tmp_path: Path
) -> None:
    """The weights are replaced by themselves, so that the tokens are known; half of the responses are aborted."""
    requests = [engine.request(prompt, GREEDY, "events", draft_budget=0) for prompt in PROMPTS]
    expected = tokens_of(engine.generate(requests))
    engine.add_history("events", expected[::2])

    async def run() -> list[list[int]]:
        stop = asyncio.Event()
        calls = [
            engine.engine.generate(engine.request(prompt, GREEDY, "events"), 0, stop_event=stop if number % 2 else None)
            for number, prompt in enumerate(PROMPTS)
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.1)
        stop.set()
        for version, mode in enumerate((UpdateMode.RECOMPUTE, UpdateMode.KEEP), start=engine.engine.weight_version + 1):
            await engine.engine.load_weights(model, version, mode)
            await asyncio.sleep(0.05)
        return tokens_of(await asyncio.gather(*tasks))

    actual = engine.loop.run(run())
    assert expected[::2] == actual[::2]
    for whole, part in zip(expected[1::2], actual[1::2], strict=True):
        assert whole[: len(part)] == part
    make_model(tmp_path, seed=5)
    engine.loop.run(engine.engine.load_weights(tmp_path, engine.engine.weight_version + 1, UpdateMode.DRAIN))
    assert expected != tokens_of(engine.sample(PROMPTS, GREEDY, "events"))
    engine.loop.run(engine.engine.load_weights(model, engine.engine.weight_version + 1, UpdateMode.DRAIN))
    assert expected == tokens_of(engine.sample(PROMPTS, GREEDY, "events"))


def test_no_request_is_drafted_for_from_the_tokens_of_another_one(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> None:
    """vLLM preempts all requests at a weight update, and then gives their rows to others."""
    engine = start_with_extension(loop, engine_config(model, drafting_config), PlacesExtension)
    harness = EngineHarness(engine, loop, history_store)

    async def run() -> None:
        await engine.collective_rpc("test_check_places")
        requests = [harness.request(prompt, GREEDY, "places") for prompt in PROMPTS]
        tasks = [asyncio.ensure_future(engine.generate(request, 0)) for request in requests]
        for version in range(1, 6):
            await asyncio.sleep(0.05)
            await engine.load_weights(model, version, UpdateMode.RECOMPUTE)
        await asyncio.gather(*tasks)

    try:
        loop.run(run())
        [(wrong, checked)] = loop.run(engine.collective_rpc("test_places"))
        assert checked > 100
        assert 0 == wrong
    finally:
        engine.close()


@deferring
def test_drafts_are_made_after_the_launch_of_a_step(engine: EngineHarness, plain_engine: EngineHarness) -> None:
    """Each response is long enough that most of its steps read no prompt."""
    expected = tokens_of(plain_engine.sample(PROMPTS, GREEDY))
    engine.add_history("deferred", expected[::2])
    before = engine.loop.run(engine.engine.collective_rpc("test_deferred"))
    assert expected == tokens_of(engine.sample(PROMPTS, GREEDY, "deferred"))
    after = engine.loop.run(engine.engine.collective_rpc("test_deferred"))
    assert all(steps - old_steps > 5 for (steps, _), (old_steps, _) in zip(after, before, strict=True))
    assert after[0][1] > before[0][1]


@deferring
def test_late_drafts_leave_the_tokens_the_same(engine: EngineHarness, plain_engine: EngineHarness) -> None:
    expected = tokens_of(plain_engine.sample(PROMPTS, GREEDY))
    engine.add_history("late", expected[::2])
    engine.loop.run(engine.engine.collective_rpc("test_let_drafts_be_late"))
    late = engine.sample(PROMPTS, GREEDY, "late")
    assert expected == tokens_of(late)
    assert accepted_share(late) > 0.1


@with_cuda_graphs
def test_drafts_are_planned_for_a_request_that_has_not_started_if_its_prompt_is_in_the_cache(
    engine: EngineHarness, plain_engine: EngineHarness
) -> None:
    """vLLM plans places for drafts in the first step of a request that has only its prompt's last token to read."""
    prompts = [[*(prompt * BLOCK_SIZE)[:BLOCK_SIZE], prompt[0]] for prompt in PROMPTS[:8]]
    expected = tokens_of(plain_engine.sample(prompts, GREEDY))
    engine.add_history("cached", expected[::2])
    first = engine.sample(prompts, GREEDY, "cached")
    assert expected == tokens_of(first)
    again = engine.sample(prompts, GREEDY.model_copy(update={"n": 4}), "cached")
    assert [tokens for tokens in expected for _ in range(4)] == tokens_of(again)
    assert accepted_share(again) > 0.2


def test_an_engine_starts_where_vllm_runs_steps_with_drafts_before_drafting_has_started(
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
    plain_engine: EngineHarness,
) -> None:
    """On GPUs, a token outside the vocabulary stops the engine with "device-side assert triggered"."""
    engine = start_with_extension(loop, engine_config(model, drafting_config), WarmUpExtension)
    try:
        expected = tokens_of(plain_engine.sample(PROMPTS, GREEDY))
        harness = EngineHarness(engine, loop, history_store)
        harness.add_history("warm-up", expected[::2])
        actual = harness.sample(PROMPTS, GREEDY, "warm-up")
        assert expected == tokens_of(actual)
        assert accepted_share(actual) > 0.2
    finally:
        engine.close()
