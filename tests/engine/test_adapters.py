"""LoRA adapters in a running engine: responses have the distribution of the model with the adapter merged in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import UpdateMode, WeightSpan
from rollout_store.history.store import HistoryStore
from rollout_store.job.engines import EngineError
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import (
    LoopThread,
    ReferenceDistribution,
    make_adapter,
    make_model,
    merged_distribution,
)
from tests.support.responses import MAX_LOGPROB_ERROR, PROMPT, WITHOUT_EOS, prefix_of, sample_exactly, tokens_of
from tests.support.waiting import wait_for_async

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

RANK = 5
BASE_VERSION = 3
MAX_NUM_SEQS = 16
DIFFERENT_MODEL_ERROR = 0.1
"""Log-probabilities under another model have at least this error."""
SAMPLING = Sampling(n=8, max_tokens=40, logprobs=True)
LONG = Sampling(n=1, max_tokens=150, logprobs=True, allowed_token_ids=WITHOUT_EOS)


@pytest.fixture(scope="module")
def lora_engine(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[EngineHarness]:
    """An engine that drafts and supports adapters."""
    config = engine_config(model, drafting_config)
    spec = config.spec.model_copy(update={"max_lora_rank": RANK, "max_num_seqs": MAX_NUM_SEQS})
    engine = loop.run(Engine.start(replace(config, spec=spec, weight_version=BASE_VERSION)))
    yield EngineHarness(engine, loop, history_store)
    engine.close()


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(directory / str(seed), model, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def adapter_references(
    model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[ReferenceDistribution]:
    """The distribution of the model with each adapter."""
    directory = tmp_path_factory.mktemp("merged")
    return [merged_distribution(model, adapter, directory / adapter.name) for adapter in adapters]


@pytest.fixture(autouse=True)
def restored_weights(lora_engine: EngineHarness, model: Path) -> Iterator[None]:
    yield
    lora_engine.loop.run(lora_engine.engine.load_weights(model, BASE_VERSION))


def max_error(reference: ReferenceDistribution, results: list[GenerationResult], sampling: Sampling) -> float:
    return max(
        reference.max_error(PROMPT, response.token_ids, response.logprobs or [], sampling) for response in results
    )


async def start_response(engine: EngineHarness) -> asyncio.Task[GenerationResult]:
    """Start a long response and wait until it is running."""
    started = asyncio.Event()
    request = engine.request(PROMPT, LONG)
    task = asyncio.create_task(
        engine.engine.generate(request, 0, on_partial=lambda _: started.set(), partial_interval=20)
    )
    await started.wait()
    return task


def test_responses_have_the_distribution_of_the_model_with_the_adapter(
    lora_engine: EngineHarness,
    reference: ReferenceDistribution,
    adapters: list[Path],
    adapter_references: list[ReferenceDistribution],
) -> None:
    assert max_error(reference, lora_engine.sample([PROMPT], SAMPLING), SAMPLING) < MAX_LOGPROB_ERROR
    results: list[GenerationResult] = []
    for version, (adapter, merged) in enumerate(zip(adapters, adapter_references, strict=True), BASE_VERSION + 1):
        lora_engine.loop.run(lora_engine.engine.load_adapter(adapter, version))
        results = lora_engine.sample([PROMPT], SAMPLING, "adapted")
        assert max_error(merged, results, SAMPLING) < MAX_LOGPROB_ERROR
        assert max_error(reference, results, SAMPLING) > DIFFERENT_MODEL_ERROR
        assert [[WeightSpan(start=0, weight_version=version)]] * 8 == [response.weight_spans for response in results]
    short = Sampling(n=1500, max_tokens=5)
    lora_engine.add_history("adapted", tokens_of(results))
    sample_exactly(adapter_references[-1], short, lambda short: lora_engine.sample([PROMPT], short, "adapted"))


def test_running_responses_keep_their_adapter_and_unused_adapters_are_removed(
    lora_engine: EngineHarness,
    reference: ReferenceDistribution,
    adapters: list[Path],
    adapter_references: list[ReferenceDistribution],
) -> None:
    engine = lora_engine.engine

    async def run() -> list[GenerationResult]:
        tasks = [await start_response(lora_engine)]
        for version, adapter in enumerate(adapters[:2], BASE_VERSION + 1):
            await engine.load_adapter(adapter, version)
            tasks.append(await start_response(lora_engine))
        results = list(await asyncio.gather(*tasks))

        async def unused_are_removed() -> bool:
            return [1] == [len(loaded) for loaded in await engine.collective_rpc("list_loras")]

        await wait_for_async(unused_are_removed, 30, "vLLM keeps adapters that no response uses.")
        return results

    results = lora_engine.loop.run(run())
    references = (reference, *adapter_references[:2])
    for version, (result, own_reference) in enumerate(zip(results, references, strict=True), BASE_VERSION):
        assert [WeightSpan(start=0, weight_version=version)] == result.weight_spans
        assert max_error(own_reference, [result], LONG) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_responses_with_an_adapter_end_before_other_full_weights_are_loaded(
    tmp_path: Path,
    lora_engine: EngineHarness,
    adapters: list[Path],
    adapter_references: list[ReferenceDistribution],
    mode: UpdateMode,
) -> None:
    other = make_model(tmp_path / "other", seed=9)
    engine = lora_engine.engine

    async def run() -> tuple[list[GenerationResult], GenerationResult]:
        await engine.load_adapter(adapters[0], 4)
        tasks = [await start_response(lora_engine)]
        requests = [lora_engine.request(PROMPT, LONG) for _ in range(MAX_NUM_SEQS + 8)]  # some of them are queued
        tasks += [asyncio.create_task(engine.generate(request, 0)) for request in requests]
        await asyncio.sleep(0)  # the tasks pass their requests to vLLM
        loading = asyncio.create_task(engine.load_weights(other, 6, mode))
        while not engine.admission_paused:
            await asyncio.sleep(0.001)
        late = await engine.generate(lora_engine.request(PROMPT, LONG), 0)
        await loading
        return list(await asyncio.gather(*tasks)), late

    results, late = lora_engine.loop.run(run())
    assert max_error(adapter_references[0], results, LONG) < MAX_LOGPROB_ERROR
    assert {4} == {result.weight_spans[-1].weight_version for result in results}
    assert max_error(ReferenceDistribution(other), [late], LONG) < MAX_LOGPROB_ERROR
    assert [WeightSpan(start=0, weight_version=6)] == late.weight_spans
    assert 6 == engine.weight_version


def test_a_response_of_the_full_weights_continues_with_an_adapter(
    lora_engine: EngineHarness,
    reference: ReferenceDistribution,
    adapters: list[Path],
    adapter_references: list[ReferenceDistribution],
) -> None:
    [started] = lora_engine.sample([PROMPT], LONG)
    lora_engine.loop.run(lora_engine.engine.load_adapter(adapters[0], 4))
    [result] = lora_engine.continue_from(PROMPT, LONG, [prefix_of(started, 50)])
    expected_spans = [WeightSpan(start=0, weight_version=BASE_VERSION), WeightSpan(start=50, weight_version=4)]
    assert expected_spans == result.weight_spans
    assert result.logprobs is not None
    before = reference.errors(PROMPT, result.token_ids, result.logprobs, LONG)
    after = adapter_references[0].errors(PROMPT, result.token_ids, result.logprobs, LONG)
    assert before[:50].max() < MAX_LOGPROB_ERROR
    assert after[50:].max() < MAX_LOGPROB_ERROR


def test_an_adapter_that_vllm_cannot_load_changes_nothing(
    tmp_path: Path, lora_engine: EngineHarness, model: Path, reference: ReferenceDistribution
) -> None:
    too_large = make_adapter(tmp_path / "too-large", model, 1, rank=RANK + 4)
    truncated = make_adapter(tmp_path / "truncated", model, 1)
    path = truncated / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    unknown_module = make_adapter(tmp_path / "unknown-module", model, 1)
    tensors = load_file(unknown_module / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.other.lora_A.weight"] = torch.zeros(RANK, 64)
    save_file(tensors, unknown_module / "adapter_model.safetensors")
    diverged = make_adapter(tmp_path / "diverged", model, 1)
    tensors = load_file(diverged / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, diverged / "adapter_model.safetensors")
    unreadable = [make_adapter(tmp_path / f"unreadable-{number}", model, 1) for number in range(2)]
    for adapter, contents in zip(unreadable, ("[]", "[" * 100_000), strict=True):
        (adapter / "adapter_config.json").write_text(contents)
    for adapter in (too_large, truncated, unknown_module, diverged, *unreadable, tmp_path / "missing"):
        with pytest.raises(EngineError, match=f"continues with weight version {BASE_VERSION}"):
            lora_engine.loop.run(lora_engine.engine.load_adapter(adapter, 4))
    assert max_error(reference, lora_engine.sample([PROMPT], SAMPLING), SAMPLING) < MAX_LOGPROB_ERROR
    assert BASE_VERSION == lora_engine.engine.weight_version


def test_an_engine_without_adapter_support_rejects_adapters(plain_engine: EngineHarness, adapters: list[Path]) -> None:
    with pytest.raises(EngineError, match="maxLoraRank is 0"):
        plain_engine.loop.run(plain_engine.engine.load_adapter(adapters[0], 4))
