"""New weights in a running engine: what is sampled then comes from them, all of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, UpdateMode, WeightSpan
from rollout_worker.engine import host
from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.host import Engine, Generated
from rollout_worker.engine.model_source import ModelError, resolve_adapter, resolve_checkpoint
from rollout_worker.engine.weights import check_weights
from tests.support.engines import Bed, config
from tests.support.reference_model import EOS, Law, LoopThread, make_model

PROMPT = [5, 1, 9, 2]
LONG_PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, EOS, size=290)]
RUNNING = Sampling(n=1, max_tokens=200, logprobs=True, allowed_token_ids=list(range(12)))
"""Responses long enough for the weights to change meanwhile."""


def worst_logprob_error(bed: Bed, law: Law) -> float:
    """Largest difference between an engine's log-probabilities and the law's."""
    sampling = Sampling(n=8, max_tokens=12, logprobs=True)
    worst = 0.0
    for response in bed.sample([PROMPT], sampling):
        assert response.logprobs is not None
        worst = max(worst, law.worst_error(PROMPT, response.token_ids, response.logprobs, sampling))
    return worst


def test_tied_embeddings_are_reloaded_whole(tmp_path: Path, loop: LoopThread) -> None:
    first, second = (make_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (1, 2))
    engine = loop.run(Engine.start(config(first)))
    try:
        bed = Bed(engine, loop)
        assert worst_logprob_error(bed, Law(first)) < 1e-3
        assert worst_logprob_error(bed, Law(second)) > 0.1
        loop.run(engine.load_weights(second, 2))
        assert worst_logprob_error(bed, Law(second)) < 1e-3
        assert bed.sample([PROMPT], Sampling(n=1, max_tokens=5))[0].weight_version == 2
    finally:
        engine.close()


def test_weights_are_reloaded_while_drafting(tmp_path: Path, drafted: Bed, model: Path) -> None:
    other = make_model(tmp_path / "other", seed=9)
    drafted.loop.run(drafted.engine.load_weights(other, 2))
    try:
        drafted.sample([PROMPT], Sampling(n=16, max_tokens=40), problem="reload")
        assert worst_logprob_error(drafted, Law(other)) < 1e-3
    finally:
        drafted.loop.run(drafted.engine.load_weights(model, 0))
    assert worst_logprob_error(drafted, Law(model)) < 1e-3


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=9)


@pytest.fixture(scope="module")
def other_law(other: Path) -> Law:
    return Law(other)


@pytest.fixture(params=["plain", "drafted"])
def bed(request: pytest.FixtureRequest, model: Path) -> Iterator[Bed]:
    found: Bed = request.getfixturevalue(request.param)
    yield found
    found.loop.run(found.engine.load_weights(model, 0))


@dataclass(frozen=True)
class Updated:
    """What came of weights that became version 7 while responses to LONG_PROMPT were running."""

    made: list[Generated]
    parts: list[Partial]
    """The last of each response."""
    gap: float
    drafted: int
    accepted: int
    preemptions: int


async def updated_meanwhile(bed: Bed, directory: Path, mode: UpdateMode, count: int) -> Updated:
    """Load weights once each of so many responses is running."""
    counters = replace(bed.engine.counters)
    parts: dict[int, Partial] = {}

    async def run(number: int) -> Generated:
        request = bed.request(LONG_PROMPT, RUNNING, "updated")
        return await bed.engine.generate(request, 0, on_partial=partial(parts.__setitem__, number), every=40)

    tasks = [asyncio.create_task(run(number)) for number in range(count)]
    while len(parts) < count:
        # of a response that ends while this process is held up, by its garbage collector for one, there is no part
        if any(task.done() for task in tasks):
            await asyncio.gather(*tasks)
            return await updated_meanwhile(bed, directory, mode, count)
        await asyncio.sleep(0.001)
    gap = await bed.engine.load_weights(directory, 7, mode)
    made = await asyncio.gather(*tasks)
    counted = bed.engine.counters
    return Updated(
        list(made),
        [parts[number] for number in range(count)],
        gap,
        drafted=counted.drafted - counters.drafted,
        accepted=counted.accepted - counters.accepted,
        preemptions=counted.preemptions - counters.preemptions,
    )


@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.KEEP])
def test_running_responses_go_on_under_new_weights(
    bed: Bed, law: Law, other: Path, other_law: Law, mode: UpdateMode
) -> None:
    bed.sample([LONG_PROMPT], Sampling(n=1, max_tokens=2))
    updated = bed.loop.run(updated_meanwhile(bed, other, mode, 8))
    assert (8 if mode is UpdateMode.RECOMPUTE else 0) == updated.preemptions
    drafts = [(response.drafted, response.accepted) for response in updated.made]
    assert (updated.drafted, updated.accepted) == tuple(map(sum, zip(*drafts, strict=True)))
    for response, part in zip(updated.made, updated.parts, strict=True):
        old, new = response.spans
        assert (WeightSpan(start=0, weight_version=0), 7) == (old, new.weight_version)
        assert response.spans == part.spans
        assert 0 < new.start < len(response.token_ids)
        assert response.logprobs is not None
        under_old = law.errors(LONG_PROMPT, response.token_ids, response.logprobs, RUNNING)
        assert under_old[: new.start].max() < 1e-3 < 0.1 < under_old[new.start :].max()
        if mode is UpdateMode.RECOMPUTE:
            under_new = other_law.errors(LONG_PROMPT, response.token_ids, response.logprobs, RUNNING)
        else:
            under_new = other_law.errors_over(
                law, new.start, LONG_PROMPT, response.token_ids, response.logprobs, RUNNING
            )
        assert under_new[new.start :].max() < 1e-3
    # what comes after has nothing of the old, its prompt's keys and values included
    [after] = bed.sample([LONG_PROMPT], RUNNING)
    assert [WeightSpan(start=0, weight_version=7)] == after.spans
    assert after.logprobs is not None
    assert other_law.worst_error(LONG_PROMPT, after.token_ids, after.logprobs, RUNNING) < 1e-3


def test_drained_responses_end_under_the_old_weights(bed: Bed, other: Path, other_law: Law) -> None:
    updated = bed.loop.run(updated_meanwhile(bed, other, UpdateMode.DRAIN, 8))
    assert [[WeightSpan(start=0, weight_version=0)]] * 8 == [response.spans for response in updated.made]
    assert updated.gap < max(response.finished - response.started for response in updated.made) / 2
    assert worst_logprob_error(bed, other_law) < 1e-3
    assert 7 == bed.engine.weight_version


def test_drained_responses_end_first_though_the_cache_is_too_small_for_all(
    loop: LoopThread, model: Path, other: Path
) -> None:
    small = replace(config(model), overrides={"num_gpu_blocks_override": 16})
    engine = loop.run(Engine.start(small))
    try:
        bed = Bed(engine, loop)
        updated = loop.run(updated_meanwhile(bed, other, UpdateMode.DRAIN, 8))
        assert updated.preemptions
        assert [[WeightSpan(start=0, weight_version=0)]] * 8 == [response.spans for response in updated.made]
    finally:
        engine.close()


def test_spans_are_right_where_vllm_has_no_labels(bed: Bed, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.engine._labels, "_labelled", False)
    noted = bed.loop.run(updated_meanwhile(bed, other, UpdateMode.RECOMPUTE, 4)).made
    laws = Law(bed.engine.config.model), Law(other)
    for response in noted:
        old, new = response.spans
        assert (0, 7) == (old.weight_version, new.weight_version)
        assert response.logprobs is not None
        errors = [law.errors(LONG_PROMPT, response.token_ids, response.logprobs, RUNNING) for law in laws]
        assert errors[0][: new.start].max() < 1e-3
        assert errors[1][new.start :].max() < 1e-3


def shorten(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return spoil


def widen(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].new_zeros(64, 129)


def lengthen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].new_zeros(65)


def to_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].char()


def point_nowhere(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shorten, "model.safetensors cannot be read"),
        (rewrite(widen), r"down_proj.weight has shape \[64, 129\] where the model has \[64, 128\]"),
        (rewrite(lambda tensors: tensors.pop("model.norm.weight")), "has no model.norm.weight"),
        (rewrite(lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone())), "has extra, which"),
        (rewrite(to_integers), "model.norm.weight is I8 where the model has F32"),
        (point_nowhere, "model-00001-of-00002.safetensors cannot be read"),
    ],
)
def test_broken_weights_are_refused_before_anything_is_touched(
    tmp_path: Path, drafted: Bed, other: Path, law: Law, spoil: Callable[[Path], None], message: str
) -> None:
    broken = Path(shutil.copytree(other, tmp_path / "broken"))
    spoil(broken)
    with pytest.raises(EngineError, match=message):
        drafted.loop.run(drafted.engine.load_weights(broken, 7))
    assert 0 == drafted.engine.weight_version
    assert worst_logprob_error(drafted, law) < 1e-3


def test_weights_of_another_float_type_are_the_models(tmp_path: Path, other: Path) -> None:
    half = Path(shutil.copytree(other, tmp_path / "half"))
    rewrite(lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))(half)
    check_weights(half, other)


@pytest.mark.parametrize(
    "spoil",
    [shorten, rewrite(lengthen), rewrite(lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()))],
)
def test_the_old_weights_go_on_if_vllm_fails_half_way(
    tmp_path: Path,
    bed: Bed,
    other: Path,
    other_law: Law,
    law: Law,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
) -> None:
    broken = Path(shutil.copytree(other, tmp_path / "broken"))
    spoil(broken)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(host, "check_weights", lambda *_: None)
        with pytest.raises(EngineError, match="goes on with version 0"):
            bed.loop.run(updated_meanwhile(bed, broken, UpdateMode.RECOMPUTE, 4))
    assert worst_logprob_error(bed, law) < 1e-3
    assert 0 == bed.sample([PROMPT], Sampling(n=1, max_tokens=2))[0].weight_version
    bed.loop.run(bed.engine.load_weights(other, 8))
    assert worst_logprob_error(bed, other_law) < 1e-3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    make_model(directory / "inside")
    return directory


def test_a_checkpoint_outside_the_allowed_roots_is_refused(tmp_path: Path, cache: Path) -> None:
    outside = make_model(tmp_path / "outside")
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(str(outside), cache, cache / "inside", [])
    assert outside == resolve_checkpoint(str(outside), cache, cache / "inside", [str(tmp_path)])
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(f"file://{cache}/{'../' * len(cache.parts)}{outside}", cache, cache / "inside", [])


def test_what_an_image_ships_is_found_after_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = make_model(tmp_path / "shipped" / "examples" / "model")
    with pytest.raises(ModelError, match="neither a directory nor in the model cache"):
        resolve_checkpoint("examples/model", cache, cache / "inside", [])
    monkeypatch.setenv("ROLLOUT_SHIPPED_MODELS", str(tmp_path / "shipped"))
    assert shipped == resolve_checkpoint("examples/model", cache, cache / "inside", [])
    assert cache / "inside" == resolve_checkpoint("inside", cache, cache / "inside", [])
    make_model(cache / "examples" / "model")
    assert cache / "examples" / "model" == resolve_checkpoint("examples/model", cache, cache / "inside", [])


def test_a_checkpoint_of_another_shape_or_format_is_refused(tmp_path: Path, cache: Path) -> None:
    tied = make_model(tmp_path / "tied", tied=True)
    with pytest.raises(ModelError, match="tie_word_embeddings True where the model has False"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    with pytest.raises(ModelError, match="other weight formats are not loaded"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])


def test_an_adapter_outside_the_allowed_roots_or_without_safetensors_is_refused(tmp_path: Path, cache: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_adapter(str(adapter), cache, cache / "inside", [])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(ModelError, match=f"has no {name}"):
            resolve_adapter(str(adapter), cache, cache / "inside", [str(tmp_path)])
        (adapter / name).touch()
    assert adapter == resolve_adapter(str(adapter), cache, cache / "inside", [str(tmp_path)])
