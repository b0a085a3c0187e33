"""Weights that are published as differences: an engine computes with exactly the weights of the trainer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_api import DeltaWeights
from rollout_api.protocol.messages import UpdateMode
from rollout_api.weights.delta_weights import VersionFiles
from rollout_worker.engine import weight_loading
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.patched_checkpoint import DeltaVersion
from tests.engine.test_passing_weights import respond, settings
from tests.support.passing_extension import PassingExtension
from tests.support.reference_model import LoopThread, make_model

Tensors = dict[str, torch.Tensor]


class InspectedExtension(PassingExtension):
    """The extension of an engine whose output projection can be compared, which may compute with a copy."""

    def test_output_projection(self) -> list[list[float]]:
        """Return the weight with which the output projection computes."""
        head = self.model_runner.get_model().lm_head
        units = torch.eye(head.weight.shape[1], dtype=head.weight.dtype)
        logits: torch.Tensor = head.quant_method.apply(head, units)
        return logits.float().tolist()


EXTENSION = f"{__name__}.{InspectedExtension.__name__}"


class Trainer:
    """The weights of a model in bfloat16, of which a few change by a unit in the last place with each version."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model = model
        self._random = torch.Generator().manual_seed(5)
        self.tensors: Tensors = {
            name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()
        }
        self.weights = DeltaWeights(self._named, directory)

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.tensors.items()

    def step(self) -> None:
        """Change one of a hundred elements of each tensor."""
        for tensor in self.tensors.values():
            changed = torch.rand(tensor.shape, generator=self._random) < 0.01
            tensor.view(torch.int16)[changed] += 1

    def publish(self, version: int) -> DeltaVersion:
        """Write the current weights, after a step unless they are the first."""
        if version > 1:
            self.step()
        return delta_version(self.weights.write(version))

    def save(self, directory: Path) -> Path:
        """Save the current weights as a checkpoint."""
        shutil.copytree(self._model, directory)
        save_file(self.tensors, directory / "model.safetensors")
        return directory


def delta_version(files: VersionFiles) -> DeltaVersion:
    """Return the version as an engine's transport describes it."""
    return DeltaVersion(
        files.directory, files.sha256 or str(files.directory), tuple((one.name, one.sha256) for one in files.deltas)
    )


async def weights_of(engine: Engine) -> tuple[Any, ...]:
    """Return all that an engine computes with, and greedy responses."""
    return (
        await engine.collective_rpc("test_tensors"),
        await engine.collective_rpc("test_output_projection"),
        await respond(engine),
    )


@pytest.fixture(scope="module", params=["tied in bfloat16", "parallel in bfloat16"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=3, tied="tied" in kind)


@pytest.fixture(scope="module")
def engine(kind: str, model: Path, loop: LoopThread) -> Iterator[Engine]:
    config = settings(kind, model)
    engine = loop.run(Engine.start(replace(config, overrides={"worker_extension_cls": EXTENSION})))
    yield engine
    engine.close()


def test_after_a_small_change_the_output_projection_computes_with_the_new_weights(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    trainer.step()
    checkpoint = trainer.save(tmp_path / "changed")
    loop.run(engine.load_weights(checkpoint, 1))
    weight = trainer.tensors.get("lm_head.weight", trainer.tensors["model.embed_tokens.weight"])
    parts = loop.run(engine.collective_rpc("test_output_projection"))
    computed = torch.cat([torch.tensor(part).t() for part in parts])
    assert torch.equal(weight.float(), computed[: len(weight)])


def test_differences_give_exactly_the_weights_of_the_full_version(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    versions = []
    for version in range(1, 5):
        versions.append(trainer.publish(version))
        loop.run(engine.load_deltas(versions[-1], version, UpdateMode.RECOMPUTE))
        assert version == engine.weight_version
    assert [0, 1, 2, 3] == [len(version.deltas) for version in versions]
    assert 1 == len({version.keyframe for version in versions})
    applied = loop.run(weights_of(engine))
    loop.run(engine.load_weights(trainer.save(tmp_path / "full"), 5))
    full = loop.run(weights_of(engine))
    assert full == applied
    # An engine that has none of these versions in memory begins with the keyframe.
    loop.run(engine.load_deltas(versions[0], 6, UpdateMode.RECOMPUTE))
    assert full != loop.run(weights_of(engine))
    # It has missed two versions, which it applies as well.
    loop.run(engine.load_deltas(versions[3], 7, UpdateMode.KEEP))
    assert full == loop.run(weights_of(engine))
    loop.run(engine.load_weights(model, 8))
    loop.run(engine.load_deltas(versions[3], 9, UpdateMode.DRAIN))
    assert full == loop.run(weights_of(engine))


def test_damaged_files_leave_the_engine_with_its_weights(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    loop.run(engine.load_deltas(trainer.publish(1), 1, UpdateMode.RECOMPUTE))
    before = loop.run(weights_of(engine))
    second = trainer.publish(2)
    path = second.keyframe / second.deltas[0][0]
    intact = path.read_bytes()
    path.write_bytes(intact[:-1])
    with pytest.raises(EngineError, match=r"\.delta has the checksum .* continues with weight version 1"):
        loop.run(engine.load_deltas(second, 2, UpdateMode.RECOMPUTE))
    assert (1, before) == (engine.weight_version, loop.run(weights_of(engine)))
    third = trainer.publish(3)
    path.unlink()
    with pytest.raises(EngineError, match="cannot be read"):
        loop.run(engine.load_deltas(third, 3, UpdateMode.RECOMPUTE))
    path.write_bytes(intact)
    loop.run(engine.load_deltas(third, 3, UpdateMode.RECOMPUTE))
    applied = loop.run(weights_of(engine))
    loop.run(engine.load_weights(trainer.save(tmp_path / "full"), 4))
    assert loop.run(weights_of(engine)) == applied

    # A keyframe of which the difference was made must not be exchanged.
    keyframe = third.keyframe / "model.safetensors"
    changed = load_file(keyframe)
    changed["model.norm.weight"].view(torch.int16)[3] += 1
    save_file(changed, keyframe)
    with pytest.raises(EngineError, match="do not lead to what was published"):
        loop.run(engine.load_deltas(third, 5, UpdateMode.RECOMPUTE))
    assert (4, applied) == (engine.weight_version, loop.run(weights_of(engine)))
    keyframe.unlink()
    with pytest.raises(EngineError, match="no safetensors file"):
        loop.run(engine.load_deltas(third, 5, UpdateMode.RECOMPUTE))


def test_a_copy_in_memory_that_is_wrong_is_read_again(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    loop.run(engine.load_deltas(trainer.publish(1), 1, UpdateMode.RECOMPUTE))
    engine._loader._patched._words("model.embed_tokens.weight")[5] += 1
    loop.run(engine.load_deltas(trainer.publish(2), 2, UpdateMode.RECOMPUTE))
    applied = loop.run(weights_of(engine))
    loop.run(engine.load_weights(trainer.save(tmp_path / "full"), 3))
    assert loop.run(weights_of(engine)) == applied


def test_weights_of_another_model_are_rejected(engine: Engine, loop: LoopThread, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    del trainer.tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"has no model.norm.weight.* continues with weight version"):
        loop.run(engine.load_deltas(trainer.publish(1), 1, UpdateMode.RECOMPUTE))


def test_previous_differences_are_restored_if_vllm_fails_to_load_new_ones(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    for version in (1, 2):
        loop.run(engine.load_deltas(trainer.publish(version), version, UpdateMode.RECOMPUTE))
    before = loop.run(weights_of(engine))
    trainer.tensors["model.norm.weight"] = torch.zeros(65, dtype=torch.bfloat16)
    wrong = trainer.publish(3)
    assert not wrong.deltas
    with monkeypatch.context() as unchecked:
        unchecked.setattr(weight_loading, "check_tensors", lambda *_: None)
        with pytest.raises(EngineError, match="continues with weight version 2"):
            loop.run(engine.load_deltas(wrong, 3, UpdateMode.RECOMPUTE))
    assert before == loop.run(weights_of(engine))


def test_updates_at_the_same_time_take_place_one_after_the_other(
    engine: Engine, loop: LoopThread, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path / "deltas")
    versions = [trainer.publish(version) for version in (1, 2, 3)]

    async def load_all() -> None:
        loads = [engine.load_deltas(one, number, UpdateMode.RECOMPUTE) for number, one in enumerate(versions, 1)]
        await asyncio.gather(*loads)

    loop.run(load_all())
    applied = loop.run(weights_of(engine))
    loop.run(engine.load_weights(trainer.save(tmp_path / "full"), 4))
    assert loop.run(weights_of(engine)) == applied
