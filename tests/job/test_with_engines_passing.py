"""Broadcast weights that an engine has missed and receives from another engine of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from rollout_api import AsyncRolloutClient, Rollout
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, RolloutRequest
from rollout_api.weights.in_memory import ModelInMemory
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.job_store import EngineReport
from tests.support.in_process_job import LiveJob, manifest, start_engine
from tests.support.live_job_harness import (
    ENDLESS,
    JobHarness,
    gather,
    lose,
    prompts,
    replace_engine,
    wait_for_status,
)
from tests.support.reference_model import LoopThread, make_adapter

GREEDY = Sampling(n=1, temperature=0, max_tokens=48, allowed_token_ids=ENDLESS, logprobs=True)
EXTENSION = "tests.support.passing_extension.PassingExtension"


async def greedy(engine: Engine, label: str) -> list[tuple[list[int], Sequence[float] | None]]:
    """Return the greedy responses of an engine to a few prompts, with their log-probabilities, one after the other."""
    responses = []
    for index, prompt in enumerate(prompts(4, length=9)):
        request = RolloutRequest(
            job_uid="greedy",
            request_id=f"{label}-{index}",
            prompt_token_ids=list(prompt.token_ids),
            sampling=GREEDY,
            draft_mode=DraftMode.OFF,
        )
        result = await engine.generate(request, 0)
        responses.append((list(result.token_ids), result.logprobs))
    return responses


def in_memory(job_harness: JobHarness, version: int) -> ModelInMemory:
    """Return one of the test's models in the memory of a trainer."""
    model: Any = AutoModelForCausalLM.from_pretrained(job_harness.models / str(version), dtype="float32")
    return ModelInMemory(model, host="127.0.0.1")


def versions(rollouts: list[Rollout]) -> set[int]:
    """Return all weight versions that sampled tokens of the rollouts."""
    return {span.weight_version for rollout in rollouts for span in rollout.weight_spans}


async def assert_all_serve(running: LiveJob, client: AsyncRolloutClient, step: int, version: int) -> None:
    """Check that all engines take rollouts that are pinned to a version."""
    sampling = Sampling(n=4, max_tokens=30, allowed_token_ids=ENDLESS)
    rollouts = await gather(client, step, prompts(12, sampling=sampling, weight_version=version))
    assert {worker.engine_id for worker in running.workers.values()} == {rollout.engine for rollout in rollouts}
    assert {version} == versions(rollouts)


def test_a_replaced_engine_receives_broadcast_weights_from_another_engine(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, in_memory(job_harness, 1))
        long = prompts(2, sampling=Sampling(n=8, max_tokens=400, allowed_token_ids=ENDLESS, logprobs=True))
        async with client.step(1, long) as step:  # the source continues to serve
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 4)
            joined = await replace_engine(running, job_harness, "engine-1")
            await running.until(lambda: joined.report.version == 1, 30)
            assert {1} == versions([rollout async for rollout in step])
        assert not joined.report.failed
        source, target = (job_harness.engines[name] for name in ("engine-0", "engine-1"))
        assert await greedy(source, "source") == await greedy(target, "target")
        await assert_all_serve(running, client, 2, 1)
        # The engine takes part in the next broadcast, and its history knows the version.
        assert 2 == len((await client.publish_weights(2, in_memory(job_harness, 2))).loaded)
        await assert_all_serve(running, client, 3, 2)

    job_harness.run(scenario)


def test_an_engine_without_its_weights_gets_no_work_and_a_later_coordinator_continues(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, in_memory(job_harness, 1))
        await running.kill("coordinator")
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: joined.report.missed == 1)
        running.start_coordinator()
        rollouts = await gather(client, 1, prompts(20, sampling=Sampling(n=4, max_tokens=60)))
        assert {1} == versions(rollouts)
        await running.until(lambda: joined.report.version == 1, 30)
        assert not joined.report.failed

    job_harness.run(scenario)


@pytest.fixture
def disturbed(loop: LoopThread, models: Path, redis_server: str) -> Iterator[Engine]:
    """An engine whose sending of weights can be disturbed."""
    engine = loop.run(start_engine(models / "0", redis_server, manifest(), worker_extension_cls=EXTENSION))
    yield engine
    engine.close()


async def report_full_version(running: LiveJob, worker: EngineWorker, version: int | None) -> None:
    """Let an engine report a version of its weights, and wait until the coordinator knows it."""
    worker.report.full_version = version

    def is_reported() -> bool:
        report = running.redis.hget(running.keys.engines, worker.engine_id)
        return report is not None and EngineReport.read(report).full_version == version

    await running.until(is_reported)
    await next_statuses(running)


async def next_statuses(running: LiveJob) -> None:
    """Wait for two statuses of the coordinator, of which the second was made from reports that exist now."""
    for _ in range(2):
        running.redis.delete(running.keys.status)
        await running.until(lambda: bool(running.redis.exists(running.keys.status)))


def test_another_source_takes_over_from_a_killed_one(job_harness: JobHarness, disturbed: Engine) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, in_memory(job_harness, 1))
        await disturbed.collective_rpc("test_block_senders", 5)
        other = running.workers["engine-0"]
        version = other.report.full_version
        await report_full_version(running, other, -1)  # so that the disturbed engine is the only source
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: joined.report.loading == 1)
        # A killed coordinator does not matter; the next one does not disturb what is in progress.
        await running.kill("coordinator")
        running.start_coordinator()
        await next_statuses(running)
        assert joined.report.loading == 1
        await report_full_version(running, other, version)
        [core] = disturbed._client.llm.engine_core.resources.engine_manager.processes
        psutil.Process(core.pid).kill()
        with pytest.raises(EngineError):
            await running.tasks.pop("disturbed")
        del running.workers["disturbed"]
        await running.until(lambda: joined.report.version == 1, 20)
        assert not joined.report.failed
        assert await greedy(job_harness.engines["engine-0"], "source") == await greedy(
            job_harness.engines["engine-1"], "target"
        )
        await assert_all_serve(running, client, 1, 1)

    job_harness.with_engines({**job_harness.engines, "disturbed": disturbed}).run(scenario)


def test_without_a_source_the_next_version_is_awaited(job_harness: JobHarness, disturbed: Engine) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, in_memory(job_harness, 1))
        # An engine that refuses is asked a few times; the other one then takes work with the weights that it has.
        await disturbed.collective_rpc("test_quantize")
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: 1 in joined.report.failed, 20)
        assert "the weights cannot be passed on: the weights are quantized" in joined.report.failed[1]
        await lose(running, "disturbed")
        await running.until(lambda: len(running.workers) == 1)
        assert {0} == versions(await gather(client, 1, prompts(2)))
        # All engines that had the weights are gone.
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: 1 in joined.report.failed, 20)
        reason = "no other engine of the job has it; the engine loads the next version"
        await wait_for_status(
            client, lambda status: [reason in one["failed"].get("1", "") for one in status["engines"]] == [True]
        )
        pinned = await gather(client, 2, prompts(1, weight_version=1))
        assert "no engine can load weight version 1" in pinned[0].detail
        assert {0} == versions(await gather(client, 3, prompts(2)))
        assert 1 == len((await client.publish_weights(2, in_memory(job_harness, 2))).loaded)
        await assert_all_serve(running, client, 4, 2)

    engines = {"engine-1": job_harness.engines["engine-1"], "disturbed": disturbed}
    job_harness.with_engines(engines).run(scenario)


def test_an_update_during_the_passing_reaches_all_engines(job_harness: JobHarness, disturbed: Engine) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        weights = in_memory(job_harness, 1)
        await client.publish_weights(1, weights)
        await disturbed.collective_rpc("test_block_senders", 5)
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: joined.report.loading == 1)
        while not all(await disturbed.collective_rpc("test_has_receiver")):
            await asyncio.sleep(0.05)
        published = await client.publish_weights(2, in_memory(job_harness, 2), timeout=60)
        assert 2 == len(published.loaded)
        assert joined.report.missed is None
        assert await greedy(disturbed, "source") == await greedy(job_harness.engines["engine-1"], "target")
        await assert_all_serve(running, client, 1, 2)

    engines = {"engine-1": job_harness.engines["engine-1"], "disturbed": disturbed}
    job_harness.with_engines(engines).run(scenario)


def test_an_adapter_follows_the_full_weights_that_were_passed_on(
    job_harness: JobHarness, loop: LoopThread, tmp_path: Path
) -> None:
    spec = manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"maxLoraRank": 5}
    job: RolloutJob = manifest(engine=spec)
    adapter = make_adapter(tmp_path / "adapter", job_harness.models / "1", 1)
    config = EngineConfig(model=job_harness.models / "0", spec=job.spec.engine, cpu=True)

    async def start() -> dict[str, Engine]:
        return dict(
            zip(("engine-0", "engine-1"), await asyncio.gather(*(Engine.start(config) for _ in "ab")), strict=True)
        )

    engines = loop.run(start())
    harness = job_harness.with_engines(engines)

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, in_memory(job_harness, 1))
        await client.publish_weights(2, adapter, kind="lora")
        joined = await replace_engine(running, harness, "engine-1")
        await running.until(lambda: joined.report.version == 2, 30)
        assert (1, {}) == (joined.report.full_version, joined.report.failed)
        await assert_all_serve(running, client, 1, 2)
        assert await greedy(engines["engine-0"], "source") == await greedy(engines["engine-1"], "target")

    try:
        harness.run(scenario, job=job)
    finally:
        for engine in engines.values():
            engine.close()
