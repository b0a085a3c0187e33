"""Weight updates of a running engine: all later tokens have the distribution of the new weights."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, UpdateMode, WeightSpan
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import ModelError
from rollout_worker.engine import weight_loading
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult, UnusableOutputError
from rollout_worker.engine.vllm_patches import is_finite
from rollout_worker.engine.weight_loading import check_checkpoint, check_finite
from tests.support.engines import USES_V2, EngineHarness, engine_config
from tests.support.reference_model import EOS, LoopThread, ReferenceDistribution, make_model
from tests.support.responses import MAX_LOGPROB_ERROR, PROMPT, WITHOUT_EOS, accepted_share

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

NEW_VERSION = 7
OLD_SPANS = [WeightSpan(start=0, weight_version=0)]
DIFFERENT_MODEL_ERROR = 0.1
"""Log-probabilities under another model have at least this error."""
LONG_PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, EOS, size=290)]
LONG = Sampling(n=1, max_tokens=200, logprobs=True, allowed_token_ids=WITHOUT_EOS)
"""Settings of responses that are long enough for the weights to change while they are generated."""
Corruption = Callable[[Path], None]


def max_error(engine: EngineHarness, reference: ReferenceDistribution) -> float:
    """Return the largest error of an engine's log-probabilities, from a few responses."""
    sampling = Sampling(n=8, max_tokens=12, logprobs=True)
    results = engine.sample([PROMPT], sampling)
    return max(
        reference.max_error(PROMPT, response.token_ids, response.logprobs or [], sampling) for response in results
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the model."""
    return make_model(tmp_path_factory.mktemp("other"), seed=9)


@pytest.fixture(scope="module")
def other_reference(other: Path) -> ReferenceDistribution:
    return ReferenceDistribution(other)


@pytest.fixture(params=["plain_engine", "drafting_engine"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[EngineHarness]:
    harness: EngineHarness = request.getfixturevalue(request.param)
    yield harness
    harness.loop.run(harness.engine.load_weights(model, 0))


@pytest.fixture(scope="module")
def tied_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with tied embeddings."""
    directory = tmp_path_factory.mktemp("tied")
    first, second = (make_model(directory / str(seed), seed=seed, tied=True) for seed in (1, 2))
    return first, second


@pytest.fixture(scope="module")
def small_cache_engine(loop: LoopThread, tied_models: tuple[Path, Path]) -> Iterator[EngineHarness]:
    """An engine with tied embeddings and a KV cache that holds few long responses."""
    config = replace(engine_config(tied_models[0]), overrides={"num_gpu_blocks_override": 16})
    engine = loop.run(Engine.start(config))
    yield EngineHarness(engine, loop)
    engine.close()


@dataclass(frozen=True)
class Update:
    """The outcome of an update while responses to LONG_PROMPT were running."""

    results: list[GenerationResult]
    partials: list[Partial]
    """The last partial of each response."""
    gap_s: float
    drafted: int
    accepted: int
    preemptions: int


async def update_while_running(
    engine: EngineHarness, directory: Path, mode: UpdateMode, responses: int, sampling: Sampling = LONG
) -> Update:
    """Load weights as soon as all responses are running."""
    before = replace(engine.engine.counters)
    partials: dict[int, Partial] = {}

    async def generate(number: int) -> GenerationResult:
        request = engine.request(LONG_PROMPT, sampling, "updated")
        receive = partial(partials.__setitem__, number)
        return await engine.engine.generate(request, 0, on_partial=receive, partial_interval=40)

    tasks = [asyncio.create_task(generate(number)) for number in range(responses)]
    while len(partials) < responses:
        # A response may end without a partial while this process is delayed, for example by its garbage collector.
        if any(task.done() for task in tasks):
            await asyncio.gather(*tasks)
            return await update_while_running(engine, directory, mode, responses, sampling)
        await asyncio.sleep(0.001)
    gap_s = await engine.engine.load_weights(directory, NEW_VERSION, mode)
    results = list(await asyncio.gather(*tasks))
    after = engine.engine.counters
    return Update(
        results,
        [partials[number] for number in range(responses)],
        gap_s,
        drafted=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
        preemptions=after.preemptions - before.preemptions,
    )


@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.KEEP])
def test_running_responses_continue_with_the_new_weights(
    engine: EngineHarness,
    reference: ReferenceDistribution,
    other: Path,
    other_reference: ReferenceDistribution,
    mode: UpdateMode,
) -> None:
    engine.sample([LONG_PROMPT], Sampling(n=1, max_tokens=2))
    update = engine.loop.run(update_while_running(engine, other, mode, 8))
    assert (8 if mode is UpdateMode.RECOMPUTE else 0) == update.preemptions
    if not USES_V2:  # V2 executes one more step of each response that has ended
        assert update.drafted == sum(result.num_draft_tokens for result in update.results)
    assert update.accepted == sum(result.num_accepted_tokens for result in update.results)
    for result, last_partial in zip(update.results, update.partials, strict=True):
        old, new = result.weight_spans
        assert (OLD_SPANS[0], NEW_VERSION) == (old, new.weight_version)
        assert result.weight_spans == last_partial.weight_spans
        assert 0 < new.start < len(result.token_ids)
        assert result.logprobs is not None
        by_old = reference.errors(LONG_PROMPT, result.token_ids, result.logprobs, LONG)
        assert by_old[: new.start].max() < MAX_LOGPROB_ERROR
        assert by_old[new.start :].max() > DIFFERENT_MODEL_ERROR
        if mode is UpdateMode.RECOMPUTE:
            by_new = other_reference.errors(LONG_PROMPT, result.token_ids, result.logprobs, LONG)
        else:
            by_new = other_reference.errors_after_switch(
                reference, new.start, LONG_PROMPT, result.token_ids, result.logprobs, LONG
            )
        assert by_new[new.start :].max() < MAX_LOGPROB_ERROR
    # Later responses use nothing of the old weights, neither for sampling nor from the prefix cache.
    [later] = engine.sample([LONG_PROMPT], LONG)
    assert [WeightSpan(start=0, weight_version=NEW_VERSION)] == later.weight_spans
    assert later.logprobs is not None
    assert other_reference.max_error(LONG_PROMPT, later.token_ids, later.logprobs, LONG) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.KEEP])
def test_accepted_drafts_of_the_last_step_before_an_update_are_counted(
    drafting_engine: EngineHarness, model: Path, mode: UpdateMode
) -> None:
    greedy = Sampling(n=1, temperature=0, max_tokens=200, allowed_token_ids=WITHOUT_EOS)
    update = drafting_engine.loop.run(update_while_running(drafting_engine, model, mode, 8, greedy))
    drafting_engine.loop.run(drafting_engine.engine.load_weights(model, 0))
    assert accepted_share(update.results) > 0.5
    assert update.accepted == sum(result.num_accepted_tokens for result in update.results)


def test_drained_responses_end_with_the_old_weights(
    engine: EngineHarness, other: Path, other_reference: ReferenceDistribution
) -> None:
    update = engine.loop.run(update_while_running(engine, other, UpdateMode.DRAIN, 8))
    assert [OLD_SPANS] * 8 == [result.weight_spans for result in update.results]
    assert update.gap_s < max(result.finished - result.started for result in update.results) / 2
    assert max_error(engine, other_reference) < MAX_LOGPROB_ERROR
    assert NEW_VERSION == engine.engine.weight_version


def test_tied_embeddings_are_reloaded_completely(
    small_cache_engine: EngineHarness, tied_models: tuple[Path, Path]
) -> None:
    first, second = (ReferenceDistribution(directory) for directory in tied_models)
    assert max_error(small_cache_engine, first) < MAX_LOGPROB_ERROR
    assert max_error(small_cache_engine, second) > DIFFERENT_MODEL_ERROR
    small_cache_engine.loop.run(small_cache_engine.engine.load_weights(tied_models[1], 2))
    assert max_error(small_cache_engine, second) < MAX_LOGPROB_ERROR
    [result] = small_cache_engine.sample([PROMPT], Sampling(n=1, max_tokens=5))
    assert [WeightSpan(start=0, weight_version=2)] == result.weight_spans
    small_cache_engine.loop.run(small_cache_engine.engine.load_weights(tied_models[0], 0))


def test_preempted_responses_end_before_drained_weights_are_loaded(
    small_cache_engine: EngineHarness, tied_models: tuple[Path, Path]
) -> None:
    update = small_cache_engine.loop.run(update_while_running(small_cache_engine, tied_models[1], UpdateMode.DRAIN, 8))
    assert update.preemptions
    assert [OLD_SPANS] * 8 == [result.weight_spans for result in update.results]
    small_cache_engine.loop.run(small_cache_engine.engine.load_weights(tied_models[0], 0))


def truncate_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Corruption:
    """A corruption that applies *edit* to the tensors of a checkpoint."""

    def corrupt(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")

    return corrupt


def widen_projection(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].new_zeros(64, 129)


def lengthen_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].new_zeros(65)


def make_norm_integer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].char()


def remove_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["extra"] = tensors["model.norm.weight"].clone()


def set_value(name: str, value: float) -> Corruption:
    """A corruption that replaces the last value of a tensor."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return edit_tensors(edit)


def write_index(contents: bytes) -> Corruption:
    """A corruption that gives a checkpoint an index with these contents."""
    return lambda directory: (directory / "model.safetensors.index.json").write_bytes(contents)


def map_norm_to(file: Any) -> Corruption:
    """A corruption that gives a checkpoint an index which maps the first tensor to *file*."""
    return write_index(json.dumps({"weight_map": {"model.norm.weight": file}}).encode())


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (truncate_file, "model.safetensors cannot be read"),
        (edit_tensors(widen_projection), r"down_proj.weight has shape \[64, 129\], but the model has \[64, 128\]"),
        (edit_tensors(remove_norm), "has no model.norm.weight"),
        (edit_tensors(add_tensor), "has extra, which the model does not have"),
        (edit_tensors(make_norm_integer), "model.norm.weight is I8, but the model has F32"),
        (map_norm_to("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors cannot be read"),
        (map_norm_to(["model.safetensors"]), "must map 'model.norm.weight' to the name of a file in this directory"),
        (map_norm_to(7), "to the name of a file in this directory, not to 7"),
        (map_norm_to("../other/model.safetensors"), "to the name of a file in this directory"),
        (map_norm_to("./model.safetensors"), "to the name of a file in this directory"),
        (map_norm_to(".."), "to the name of a file in this directory"),
        (map_norm_to(""), "to the name of a file in this directory"),
        (write_index(b"[]"), "index.json has no weight_map"),
        (write_index(b'{"weight_map": []}'), "index.json has no weight_map"),
        (write_index(b"[" * 100_000), "index.json cannot be read: maximum recursion depth"),
        (write_index(b"\xff\x00"), "index.json cannot be read"),
        (set_value("model.norm.weight", math.nan), "model.norm.weight in model.safetensors has values that are NaN"),
        (set_value("model.layers.1.mlp.down_proj.weight", math.inf), "down_proj.weight in model.safetensors has"),
    ],
)
def test_corrupt_weights_are_rejected_before_they_are_loaded(
    tmp_path: Path,
    drafting_engine: EngineHarness,
    other: Path,
    reference: ReferenceDistribution,
    corrupt: Corruption,
    message: str,
) -> None:
    checkpoint = Path(shutil.copytree(other, tmp_path / "corrupt"))
    corrupt(checkpoint)
    with pytest.raises(EngineError, match=message):
        drafting_engine.loop.run(drafting_engine.engine.load_weights(checkpoint, NEW_VERSION))
    assert 0 == drafting_engine.engine.weight_version
    assert max_error(drafting_engine, reference) < MAX_LOGPROB_ERROR


def test_weights_of_another_float_data_type_are_accepted(tmp_path: Path, other: Path) -> None:
    half = Path(shutil.copytree(other, tmp_path / "half"))
    edit_tensors(lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))(half)
    check_checkpoint(half, other)


def test_values_that_are_not_finite_in_the_model_are_accepted(tmp_path: Path, other: Path) -> None:
    masked, diverged = (Path(shutil.copytree(other, tmp_path / name)) for name in ("masked", "diverged"))
    set_value("model.norm.weight", -math.inf)(masked)
    set_value("model.norm.weight", -math.inf)(diverged)
    set_value("model.layers.1.mlp.down_proj.weight", -math.inf)(diverged)
    check_finite(masked, [masked / "model.safetensors"], masked)
    with pytest.raises(ModelError, match=r"model.norm.weight in model.safetensors has values"):
        check_finite(masked, [masked / "model.safetensors"], other)
    with pytest.raises(ModelError, match=r"down_proj.weight in model.safetensors has values"):
        check_finite(diverged, [diverged / "model.safetensors"], masked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_values_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    largest = torch.full((5, 1000), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)  # although their sum overflows
    for value in (math.nan, math.inf, -math.inf):
        largest[3, 400] = value
        assert not is_finite(largest)
    assert is_finite(torch.tensor(1, dtype=dtype))
    assert not is_finite(torch.tensor(math.nan, dtype=dtype))
    assert is_finite(torch.ones(3, dtype=torch.int8))
    for shape in (0, (3, 0), (0, 3)):
        assert is_finite(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_only_values_of_8_bits_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = numbers.to(torch.float32).isfinite()
    assert is_finite(numbers[finite])
    assert is_finite(numbers[:0])
    for number in numbers[~finite]:
        assert not is_finite(number)


def test_rollouts_of_weights_with_which_the_model_overflows_name_the_version(
    tmp_path: Path, engine: EngineHarness, other: Path, model: Path, reference: ReferenceDistribution
) -> None:
    huge = Path(shutil.copytree(other, tmp_path / "huge"))
    edit_tensors(lambda tensors: tensors["model.norm.weight"].fill_(torch.finfo(torch.float32).max))(huge)
    engine.loop.run(engine.engine.load_weights(huge, NEW_VERSION))
    for sampling in (Sampling(n=1, max_tokens=5, logprobs=True), Sampling(n=1, max_tokens=5, prompt_logprobs=True)):
        with pytest.raises(UnusableOutputError, match=f"weight version {NEW_VERSION} must have values that are NaN"):
            engine.sample([PROMPT], sampling)
    assert not engine.engine.stopped
    engine.loop.run(engine.engine.load_weights(model, 8))
    assert max_error(engine, reference) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("corrupt", [truncate_file, edit_tensors(lengthen_norm), edit_tensors(add_tensor)])
def test_the_old_weights_are_restored_if_vllm_fails_to_load_new_ones(
    tmp_path: Path,
    engine: EngineHarness,
    other: Path,
    other_reference: ReferenceDistribution,
    reference: ReferenceDistribution,
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Corruption,
) -> None:
    checkpoint = Path(shutil.copytree(other, tmp_path / "corrupt"))
    corrupt(checkpoint)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(weight_loading, "check_checkpoint", lambda *_: None)
        with pytest.raises(EngineError, match="continues with weight version 0"):
            engine.loop.run(update_while_running(engine, checkpoint, UpdateMode.RECOMPUTE, 4))
    assert max_error(engine, reference) < MAX_LOGPROB_ERROR
    [result] = engine.sample([PROMPT], Sampling(n=1, max_tokens=2))
    assert OLD_SPANS == result.weight_spans
    engine.loop.run(engine.engine.load_weights(other, 8))
    assert max_error(engine, other_reference) < MAX_LOGPROB_ERROR
