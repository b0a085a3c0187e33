"""How an engine follows a trainer that sends weights from its memory, without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_api import WeightUpdate, encode
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import InitWeightTransfer, TransferStep, WeightTransfer
from rollout_store.job import EngineReport, JobStore
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
        await store.job.set_weights(UPDATE)
        await store.job.set_transfer_group(group)
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
