"""Published files are verified before an engine loads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rollout_api import DeltaWeights, WeightUpdate
from rollout_api.weights.checksum import checksum
from rollout_worker.job.weight_transport import DirectoryTransport, UnusableWeightsError


class Trainer:
    """Publishes two versions as a keyframe and a difference."""

    def __init__(self, directory: Path) -> None:
        self.tensors = {"a": torch.zeros(1000)}
        self.weights = DeltaWeights(self.tensors, directory)

    def publish(self, version: int) -> WeightUpdate:
        self.tensors["a"][version] = 1.0
        files = self.weights.write(version)
        return WeightUpdate(weight_version=version, uri=str(files.directory), sha256=files.sha256, deltas=files.deltas)


class Job:
    """A transport that counts how often it computes a checksum."""

    def __init__(self, root: Path) -> None:
        self.computed: list[Path] = []
        for name in ("model", "cache", "weights"):
            (root / name).mkdir()
        self.transport = DirectoryTransport(
            root / "model", root / "cache", [str(root / "weights")], checksum=self._checksum
        )

    async def _checksum(self, directory: Path, _: str) -> str:
        self.computed.append(directory)
        return checksum(directory)

    def prepare(self, update: WeightUpdate) -> None:
        asyncio.run(self.transport.prepare(update, "engine-0"))


def test_a_keyframe_is_verified_once_for_all_its_differences(tmp_path: Path) -> None:
    job = Job(tmp_path)
    trainer = Trainer(tmp_path / "weights/run")
    updates = [trainer.publish(version) for version in (1, 2, 3)]
    for update in updates:
        job.prepare(update)
    assert [Path(updates[0].uri)] == job.computed


def test_keyframes_must_be_allowed_and_unchanged(tmp_path: Path) -> None:
    job = Job(tmp_path)
    outside = Trainer(tmp_path / "elsewhere").publish(1)
    with pytest.raises(UnusableWeightsError, match=r"add its root to spec\.weights\.allowedRoots"):
        job.prepare(outside)
    inside = Trainer(tmp_path / "weights/run").publish(1)
    with (Path(inside.uri) / "model.safetensors").open("ab") as file:
        file.write(b"?")
    with pytest.raises(UnusableWeightsError, match="the files were changed, or are still being written"):
        job.prepare(inside)
    with pytest.raises(UnusableWeightsError, match="does not exist"):
        job.prepare(inside.model_copy(update={"uri": str(tmp_path / "weights/none")}))
