"""LoRA adapters in a running engine: what is sampled follows the law of the model with the adapter merged in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, UpdateMode, WeightSpan
from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.drafting import Drafting
from rollout_worker.engine.host import Engine, Generated
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore
from tests.engine.test_continuing import ENDLESS, so_far
from tests.support.engines import KEYS, Bed, config
from tests.support.reference_model import Law, LoopThread, chi_square, make_adapter, make_model, merged_law

PROMPT = [5, 1, 9, 2]
RANK = 5
SAMPLING = Sampling(n=8, max_tokens=40, logprobs=True)
LONG = Sampling(n=1, max_tokens=150, logprobs=True, allowed_token_ids=ENDLESS)


@pytest.fixture(scope="module")
def adapting(model: Path, loop: LoopThread, drafting: Drafting, redis_server: str) -> Iterator[Bed]:
    """An engine that drafts and has room for adapters."""
    base = config(model, drafting)
    spec = base.spec.model_copy(update={"max_lora_rank": RANK, "max_num_seqs": 16})
    engine = loop.run(Engine.start(replace(base, spec=spec, weight_version=3)))
    yield Bed(engine, loop, HistoryStore(connect(redis_server), KEYS, window=16))
    engine.close()


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(directory / str(seed), model, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def laws(model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Law]:
    directory = tmp_path_factory.mktemp("merged")
    return [merged_law(model, adapter, directory / adapter.name) for adapter in adapters]


@pytest.fixture(autouse=True)
def afterwards_full_weights(adapting: Bed, model: Path) -> Iterator[None]:
    yield
    adapting.loop.run(adapting.engine.load_weights(model, 3))


def worst(law: Law, responses: list[Generated], sampling: Sampling) -> float:
    return max(law.worst_error(PROMPT, r.token_ids, r.logprobs or [], sampling) for r in responses)


def test_responses_follow_the_law_with_the_adapter(
    adapting: Bed, law: Law, adapters: list[Path], laws: list[Law]
) -> None:
    assert worst(law, adapting.sample([PROMPT], SAMPLING), SAMPLING) < 1e-3
    for number, (adapter, merged) in enumerate(zip(adapters, laws, strict=True)):
        adapting.loop.run(adapting.engine.load_adapter(adapter, 4 + number))
        made = adapting.sample([PROMPT], SAMPLING, "adapted")
        assert worst(merged, made, SAMPLING) < 1e-3
        assert worst(law, made, SAMPLING) > 0.1
        assert [[WeightSpan(start=0, weight_version=4 + number)]] * 8 == [one.spans for one in made]
    short = Sampling(n=1500, max_tokens=5)
    adapting.remember("adapted", [one.token_ids for one in made])
    sampled = adapting.sample([PROMPT], short, "adapted")
    p, tested = chi_square(laws[-1], PROMPT, [one.token_ids for one in sampled], short)
    assert p > 1e-4
    assert tested > 1500
    assert sum(one.accepted for one in sampled) > 0.05 * tested


def test_running_responses_keep_their_adapter_and_unused_ones_are_removed(
    adapting: Bed, law: Law, adapters: list[Path], laws: list[Law]
) -> None:
    engine = adapting.engine

    async def begin() -> asyncio.Task[Generated]:
        begun = asyncio.Event()
        request = adapting.request(PROMPT, LONG)
        task = asyncio.create_task(engine.generate(request, 0, on_partial=lambda _: begun.set(), every=20))
        await begun.wait()
        return task

    async def run() -> tuple[list[Generated], int]:
        tasks = [await begin()]
        for number, adapter in enumerate(adapters[:2]):
            await engine.load_adapter(adapter, 4 + number)
            tasks.append(await begin())
        made = list(await asyncio.gather(*tasks))
        await asyncio.gather(*engine._adapters._removals)
        return made, len(await engine._llm.list_loras())

    made, loaded = adapting.loop.run(run())
    for one, version, own in zip(made, (3, 4, 5), (law, laws[0], laws[1]), strict=True):
        assert [WeightSpan(start=0, weight_version=version)] == one.spans
        assert worst(own, [one], LONG) < 1e-3
    assert 1 == loaded


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_responses_of_an_adapter_end_before_other_weights_come(
    tmp_path: Path, adapting: Bed, adapters: list[Path], laws: list[Law], mode: UpdateMode
) -> None:
    other = make_model(tmp_path / "other", seed=9)
    engine = adapting.engine

    async def run() -> tuple[list[Generated], Generated]:
        await engine.load_adapter(adapters[0], 4)
        begun = asyncio.Event()
        requests = [adapting.request(PROMPT, LONG) for _ in range(24)]  # more than run at a time
        tasks = [
            asyncio.create_task(engine.generate(request, 0, on_partial=lambda _: begun.set(), every=20))
            for request in requests
        ]
        await begun.wait()
        loading = asyncio.create_task(engine.load_weights(other, 6, mode))
        await asyncio.sleep(0.1)
        late = await engine.generate(adapting.request(PROMPT, LONG), 0)
        await loading
        return list(await asyncio.gather(*tasks)), late

    made, late = adapting.loop.run(run())
    assert worst(laws[0], made, LONG) < 1e-3
    assert {4} == {one.weight_version for one in made}
    assert worst(Law(other), [late], LONG) < 1e-3
    assert [WeightSpan(start=0, weight_version=6)] == late.spans
    assert 6 == engine.weight_version


def test_a_response_of_the_base_goes_on_with_an_adapter(
    adapting: Bed, law: Law, adapters: list[Path], laws: list[Law]
) -> None:
    [begun] = adapting.sample([PROMPT], LONG)
    prefix: Partial = so_far(begun, 50)
    adapting.loop.run(adapting.engine.load_adapter(adapters[0], 4))
    [made] = adapting.go_on(PROMPT, LONG, [prefix])
    assert [WeightSpan(start=0, weight_version=3), WeightSpan(start=50, weight_version=4)] == made.spans
    assert made.logprobs is not None
    assert law.errors(PROMPT, made.token_ids, made.logprobs, LONG)[:50].max() < 1e-3
    assert laws[0].errors(PROMPT, made.token_ids, made.logprobs, LONG)[50:].max() < 1e-3


def test_an_adapter_that_vllm_cannot_load_changes_nothing(tmp_path: Path, adapting: Bed, model: Path, law: Law) -> None:
    large = make_adapter(tmp_path / "large", model, 1, rank=9)
    cut = make_adapter(tmp_path / "cut", model, 1)
    path = cut / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    strange = make_adapter(tmp_path / "strange", model, 1)
    tensors = load_file(strange / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.other.lora_A.weight"] = torch.zeros(RANK, 64)
    save_file(tensors, strange / "adapter_model.safetensors")
    for adapter in (large, cut, strange, tmp_path / "nowhere"):
        with pytest.raises(EngineError, match="goes on with version 3"):
            adapting.loop.run(adapting.engine.load_adapter(adapter, 4))
    assert worst(law, adapting.sample([PROMPT], SAMPLING), SAMPLING) < 1e-3
    assert 3 == adapting.engine.weight_version


def test_an_engine_without_room_refuses_adapters(plain: Bed, adapters: list[Path]) -> None:
    with pytest.raises(EngineError, match="maxLoraRank is 0"):
        plain.loop.run(plain.engine.load_adapter(adapters[0], 4))
