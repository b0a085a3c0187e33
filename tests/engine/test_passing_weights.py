"""Weights that one engine passes on to another: the other one then computes exactly what the first one does."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest, UpdateMode, WeightSpan
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.response import GenerationResult
from rollout_worker.engine.weight_loading import PassedWeights
from tests.support.engines import engine_config
from tests.support.reference_model import LoopThread, make_adapter, make_model, small_qwen3_moe
from tests.support.responses import PROMPT, WITHOUT_EOS

VERSION = 7
EXTENSION = "tests.support.passing_extension.PassingExtension"
GREEDY = Sampling(n=1, temperature=0, max_tokens=40, logprobs=True, allowed_token_ids=WITHOUT_EOS)
LONG = GREEDY.model_copy(update={"max_tokens": 400})
CHANGED = "the engine has loaded other weights meanwhile"
PROMPTS = [PROMPT, [3, 1, 4, 1, 5, 9, 2, 6], [20, 20, 20], [7]]
Responses = list[tuple[list[int], Sequence[float] | None]]
_numbers = itertools.count()


@dataclass(frozen=True)
class Pair:
    """Two engines of the same kind, which start with the same weights."""

    source: Engine
    target: Engine
    initial: Path
    """The weights with which they start."""
    newer: Path
    """Other weights of the same model."""


async def generate(engine: Engine, prompt: Sequence[int], sampling: Sampling = GREEDY) -> GenerationResult:
    request = RolloutRequest(
        job_uid="test", request_id=str(next(_numbers)), prompt_token_ids=list(prompt), sampling=sampling
    )
    return await engine.generate(request, 0)


async def respond(engine: Engine) -> Responses:
    """Return greedy responses and their log-probabilities, computed one after the other in batches of one."""
    results = [await generate(engine, prompt) for prompt in PROMPTS]
    return [(list(result.token_ids), result.logprobs) for result in results]


async def fingerprint(engine: Engine) -> list[list[tuple[str, str]]]:
    """Return the name and checksum of each tensor of each rank."""
    return await engine.collective_rpc("test_tensors")


def settings(kind: str, model: Path) -> EngineConfig:
    config = replace(engine_config(model), seed=1, overrides={"worker_extension_cls": EXTENSION})
    changes: dict[str, Any] = {}
    if "adapters" in kind:
        changes["max_lora_rank"] = 8
    if "parallel" in kind:
        changes["tensor_parallel_size"] = 2
    if "bfloat16" in kind:
        changes["dtype"] = "bfloat16"
    return replace(config, spec=config.spec.model_copy(update=changes))


@asynccontextmanager
async def running_pair(kind: str, root: Path) -> AsyncIterator[Pair]:
    create = {"create": small_qwen3_moe} if "experts" in kind else {}
    initial, newer = (make_model(root / str(seed), seed=seed, tied="tied" in kind, **create) for seed in (3, 9))
    engines = await asyncio.gather(*(Engine.start(settings(kind, initial)) for _ in range(2)))
    try:
        yield Pair(*engines, initial, newer)
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.close)


@pytest.mark.parametrize("kind", ["parallel", "tied with adapters", "experts in bfloat16"])
def test_the_target_computes_what_the_source_computes(kind: str, loop: LoopThread, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_pair(kind, tmp_path) as pair:
            source, target = pair.source, pair.target
            before = await respond(target)
            assert before == await respond(source)
            await source.load_weights(pair.newer, VERSION)
            expected = await respond(source)
            assert before != expected
            passed = await source.pass_weights()
            await target.receive_passed_weights(passed, UpdateMode.RECOMPUTE)
            assert expected == await respond(target) == await respond(source)
            assert await fingerprint(source) == await fingerprint(target)
            assert VERSION == target.weight_version
            assert [WeightSpan(start=0, weight_version=VERSION)] == (await generate(target, PROMPT)).weight_spans
            if "adapters" in kind:
                adapter = make_adapter(tmp_path / "adapter", pair.newer, 1)
                for engine in (source, target):
                    await engine.load_adapter(adapter, VERSION + 1)
                assert expected != await respond(source) == await respond(target)
            # Later updates load completely, and the target passes the weights on, too.
            await source.load_weights(pair.initial, VERSION + 2)
            restored = await respond(source)
            assert before == restored
            await source.receive_passed_weights(await target.pass_weights(), UpdateMode.RECOMPUTE)
            assert expected == await respond(source)
            await target.load_weights(pair.initial, VERSION + 2)
            assert restored == await respond(target)

    loop.run(scenario())


@pytest.fixture(scope="module")
def pair(loop: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    manager = running_pair("plain", tmp_path_factory.mktemp("pair"))
    yield loop.run(manager.__aenter__())
    loop.run(manager.__aexit__(None, None, None))


@pytest.fixture(autouse=True)
def reset(request: pytest.FixtureRequest, loop: LoopThread) -> Iterator[None]:
    """Restore the shared engines."""
    yield
    if "pair" in request.fixturenames:
        shared: Pair = request.getfixturevalue("pair")
        for engine in (shared.source, shared.target):
            loop.run(engine.collective_rpc("test_undisturb_senders"))
            loop.run(engine.load_weights(shared.initial, 0))


async def wait_for_receiver(source: Engine) -> None:
    """Wait until the target has connected to the source."""
    while not all(await source.collective_rpc("test_has_receiver")):
        await asyncio.sleep(0.05)


def test_the_source_continues_to_decode(pair: Pair, loop: LoopThread) -> None:
    async def scenario() -> None:
        await pair.source.load_weights(pair.newer, VERSION)
        expected = await generate(pair.source, PROMPT, LONG)
        await pair.source.collective_rpc("test_block_senders", 3)
        passed = await pair.source.pass_weights()
        receiving = asyncio.ensure_future(pair.target.receive_passed_weights(passed, UpdateMode.KEEP))
        await wait_for_receiver(pair.source)
        result = await generate(pair.source, PROMPT, LONG)
        assert not receiving.done()
        await pair.source.collective_rpc("test_release_senders")
        assert (expected.token_ids, expected.logprobs) == (result.token_ids, result.logprobs)
        await receiving
        assert await respond(pair.source) == await respond(pair.target)

    loop.run(scenario())


@pytest.mark.parametrize("in_memory_only", [False, True])
def test_an_update_of_the_source_ends_the_passing(pair: Pair, loop: LoopThread, in_memory_only: bool) -> None:
    async def scenario() -> None:
        if in_memory_only:  # the weights of the target are in no directory
            await pair.target.receive_passed_weights(await pair.source.pass_weights(), UpdateMode.KEEP)
        before = await respond(pair.target)
        await pair.source.load_weights(pair.newer, VERSION)
        for num_sent in (0, 5):
            await pair.source.collective_rpc("test_block_senders", num_sent)
            passed = await pair.source.pass_weights()
            receiving = asyncio.ensure_future(pair.target.receive_passed_weights(passed, UpdateMode.KEEP))
            await wait_for_receiver(pair.source)
            await pair.source.load_weights(pair.newer, VERSION)
            with pytest.raises(EngineError, match=r"has stopped sending its weights.*continues with weight version 0"):
                await receiving
            assert before == await respond(pair.target)
        await pair.source.collective_rpc("test_undisturb_senders")
        await pair.target.receive_passed_weights(await pair.source.pass_weights(), UpdateMode.KEEP)
        assert await respond(pair.source) == await respond(pair.target)

    loop.run(scenario())


def test_weights_that_change_while_they_are_read_are_not_passed_on(pair: Pair, loop: LoopThread) -> None:
    async def scenario() -> None:
        assert [False] == await pair.source.collective_rpc("das_read_weights", True, 0.0)
        await pair.source.load_weights(pair.newer, VERSION)
        assert [CHANGED] == await pair.source.collective_rpc("das_read_weights", False, 0.0)
        assert [True] == await pair.source.collective_rpc("das_read_weights", True, 60.0)
        await pair.source.load_weights(pair.initial, 0)
        assert [CHANGED] == await pair.source.collective_rpc("das_pass_weights", "token")
        passing = asyncio.ensure_future(pair.source.pass_weights())
        await pair.source.load_weights(pair.newer, VERSION)  # while they are read, or before
        try:
            passed = await passing
        except EngineError as error:
            assert CHANGED in str(error)
        else:
            with pytest.raises(EngineError, match=r"stopped sending|cannot be reached"):
                await pair.target.receive_passed_weights(passed, UpdateMode.KEEP)

    loop.run(scenario())


def test_a_target_that_does_not_come_costs_the_source_nothing(pair: Pair, loop: LoopThread) -> None:
    async def scenario() -> None:
        passed = await pair.source.pass_weights()
        for wrong in (
            PassedWeights(VERSION, "0" * 32, passed.addresses),
            PassedWeights(VERSION, passed.token, [(passed.addresses[0][0], 1)]),
            PassedWeights(VERSION, passed.token, passed.addresses * 2),
        ):
            with pytest.raises(EngineError, match="continues with weight version 0"):
                await pair.target.receive_passed_weights(wrong, UpdateMode.KEEP)
        await pair.source.load_weights(pair.newer, VERSION)
        assert 40 == len((await generate(pair.source, PROMPT)).token_ids)

    loop.run(scenario())


@pytest.mark.parametrize("damage", ["test_remove_weight", "test_add_copy", "test_quantize"])
def test_weights_that_cannot_be_passed_on_are_refused(pair: Pair, loop: LoopThread, damage: str) -> None:
    async def scenario() -> None:
        await pair.source.collective_rpc(damage)
        try:
            with pytest.raises(EngineError, match="cannot be passed on"):
                await pair.source.pass_weights()
        finally:
            await pair.source.collective_rpc("test_undo")

    loop.run(scenario())


def test_weights_of_another_shape_are_not_received(pair: Pair, loop: LoopThread) -> None:
    async def scenario() -> None:
        await pair.source.collective_rpc("test_reshape")
        try:
            passed = await pair.source.pass_weights()
            with pytest.raises(EngineError, match="in place of"):
                await pair.target.receive_passed_weights(passed, UpdateMode.KEEP)
        finally:
            await pair.source.collective_rpc("test_undo")

    loop.run(scenario())


@pytest.mark.parametrize("killed", ["target", "source"])
def test_a_killed_engine_stops_neither_the_other_one_nor_its_rollouts(
    loop: LoopThread, tmp_path: Path, killed: str
) -> None:
    async def scenario() -> None:
        async with running_pair("plain", tmp_path) as pair:
            source, target = pair.source, pair.target
            await source.load_weights(pair.newer, VERSION)
            survivor, victim = (source, target) if killed == "target" else (target, source)
            expected = await respond(survivor)
            await source.collective_rpc("test_block_senders", 5)
            passed = await source.pass_weights()
            receiving = asyncio.ensure_future(target.receive_passed_weights(passed, UpdateMode.RECOMPUTE))
            running = asyncio.ensure_future(generate(source, PROMPT, LONG))
            await wait_for_receiver(source)
            started = time.monotonic()
            core_of(victim).kill()
            with pytest.raises(EngineError, match="died" if killed == "target" else "continues with weight version 0"):
                await receiving
            assert time.monotonic() - started < 5
            assert expected == await respond(survivor)
            if killed == "target":
                assert 400 == len((await running).token_ids)
                assert (await source.pass_weights()).addresses  # the next target is served, too
            else:
                with pytest.raises(EngineError):
                    await running

    loop.run(scenario())


def core_of(engine: Engine) -> psutil.Process:
    """Return the process of an engine's core."""
    [process] = engine._client.llm.engine_core.resources.engine_manager.processes
    return psutil.Process(process.pid)
