"""How engines follow published weights, without vLLM: transfers from a trainer's memory, and checksums of files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_api import WeightUpdate, encode
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import InitWeightTransfer, TransferStep, WeightTransfer
from rollout_api.weights.checksum import checksum
from rollout_store.job import EngineReport, JobStore, job_record
from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine_worker import published_weights
from rollout_worker.engine_worker.published_weights import PublishedWeights, UnusableWeightsError
from tests.support.manifests import SMALL_CPU_ENGINE

UPDATE = WeightUpdate(weight_version=5, uri="memory:1", transfer=WeightTransfer(group="g", engines=["engine"], base=4))
GROUP = InitWeightTransfer(group="g", engines={"engine": 1}, init_info={})


def published_weights_of(job_store: Any, *, full_version: int = 4) -> Any:
    """Return the published weights of an engine that receives differences."""
    spec = EngineSpec.model_validate(SMALL_CPU_ENGINE)
    config = EngineConfig(model=Path("/model"), spec=spec, cpu=False, weight_transfer="sparse_nccl")

    async def renew() -> None:
        pass

    lease: Any = SimpleNamespace(engine_id="engine", report=EngineReport("engine", transfer_group="g"), renew=renew)
    engine: Any = SimpleNamespace(config=config, full_weight_version=full_version)
    unused: Any = None
    return PublishedWeights(engine, job_store, unused, lease, unused, unused)


def test_differences_are_applied_only_to_the_weights_that_they_belong_to() -> None:
    published_weights_of(None)._prepare_transfer(UPDATE)
    with pytest.raises(UnusableWeightsError, match="differences to weight version 4, which the engine does not have"):
        published_weights_of(None, full_version=3)._prepare_transfer(UPDATE)


async def received(url: str, messages: list[bytes], *, group: InitWeightTransfer = GROUP) -> list[dict[str, Any]]:
    """Return what an engine is told when these messages are in the stream of steps."""
    keys = MessageKeys("uid")
    store = JobStore.connect(url, keys)
    try:
        await store.job.set_weights(1, UPDATE)
        await store.job.set_transfer_group(1, group)
        for message in messages:
            await store._client.xadd(keys.transfer_steps(UPDATE.uri), {MESSAGE_FIELD: message})
        steps: AsyncIterator[dict[str, Any]] = published_weights_of(store)._transfer_updates(UPDATE)
        return [update async for update in steps]
    finally:
        await store.close()


def test_parts_are_received_in_order_until_all_were_sent(redis_url: str) -> None:
    parts: list[dict[str, Any]] = [{"names": ["a"]}, {"names": ["b"]}]
    steps = [TransferStep(step="update", update_info=part) for part in parts]
    assert parts == asyncio.run(received(redis_url, [*map(encode, steps), encode(TransferStep(step="finish"))]))


@pytest.mark.parametrize(
    ("messages", "group", "reason"),
    [
        ([encode(TransferStep(step="abort", reason="it ends"))], GROUP, "has aborted the transfer: it ends"),
        ([b"?"], GROUP, "cannot be decoded"),
        ([encode(GROUP)], GROUP, "init_weight_transfer in place of a step"),
        ([], GROUP.model_copy(update={"group": "new"}), "the trainer has begun another transfer"),
        ([], GROUP, "the trainer does not continue the transfer"),
    ],
)
def test_a_transfer_ends_if_the_trainer_does_not_continue_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, messages: list[bytes], group: InitWeightTransfer, reason: str
) -> None:
    if reason.endswith("continue the transfer"):
        monkeypatch.setattr(published_weights, "TRANSFER_START_TIMEOUT_S", 0.1)
    with pytest.raises(EngineError, match=reason):
        asyncio.run(received(redis_url, messages, group=group))


class Computations:
    """Counts how often a checksum is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(job_record, "checksum", self)

    def __call__(self, directory: Path) -> str:
        self.count += 1
        return checksum(directory)


@pytest.fixture
def computations(monkeypatch: pytest.MonkeyPatch) -> Computations:
    return Computations(monkeypatch)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "b.safetensors").write_bytes(b"second")
    return tmp_path


def compute(url: str, directory: Path, expected: str, engines: int = 1) -> list[str]:
    """Return the checksums that several engines get at the same time."""

    async def run() -> list[str]:
        stores = [JobStore.connect(url, MessageKeys("checksums")) for _ in range(engines)]
        try:
            found = [store.weight_checksums(directory, expected) for store in stores]
            return list(await asyncio.gather(*found))
        finally:
            for store in stores:
                await store.close()

    return asyncio.run(run())


def test_one_of_several_engines_computes_the_checksum(
    redis_url: str, weights: Path, computations: Computations
) -> None:
    expected = checksum(weights)
    assert [expected] * 5 == compute(redis_url, weights, expected, engines=5)
    assert [expected] == compute(redis_url, weights, expected)
    assert 1 == computations.count


@pytest.mark.parametrize("kind", ["other bytes", "other time", "other file", "more files"])
def test_it_is_computed_again_for_other_files(
    redis_url: str, weights: Path, computations: Computations, kind: str
) -> None:
    compute(redis_url, weights, checksum(weights))
    path = weights / "a.safetensors"
    if kind == "other bytes":
        path.write_bytes(b"other, longer")
    elif kind == "other time":
        os.utime(path, ns=(1, 1))
    elif kind == "other file":
        stat, new = path.stat(), weights / "new"
        new.write_bytes(path.read_bytes())
        os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        new.replace(path)
    else:
        (weights / "c.safetensors").write_bytes(b"third")
    expected = checksum(weights)
    assert [expected] == compute(redis_url, weights, expected)
    assert 2 == computations.count


def test_a_checksum_that_is_not_the_expected_one_is_computed_here(
    redis_url: str, weights: Path, computations: Computations
) -> None:
    found = checksum(weights)
    assert [found] * 3 == compute(redis_url, weights, "0" * 64, engines=3)
    assert 3 == computations.count


def test_an_engine_that_fails_leaves_the_checksum_to_another_one(
    redis_url: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> str:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(job_record, "checksum", fail)
        with pytest.raises(OSError, match="stale file handle"):
            compute(redis_url, weights, "0" * 64)
    expected = checksum(weights)
    assert [expected] == compute(redis_url, weights, expected)
