"""Weight updates of a job with real engines, from directories, as adapters and from memory."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_api import (
    AsyncRolloutClient,
    FinishReason,
    InvalidRequestError,
    ModelInMemory,
    Partial,
    Prompt,
    Rollout,
    TensorsInMemory,
    UpdateMode,
    WeightsError,
)
from rollout_api.manifest.spec import Sampling
from rollout_store.job.engines import EngineError
from tests.support.in_process_job import LiveJob, manifest, start_engine
from tests.support.live_job_harness import (
    ENDLESS,
    JobHarness,
    gather,
    lose,
    prompt_index,
    prompts,
    replace_engine,
    wait_for_status,
)
from tests.support.reference_model import (
    LoopThread,
    ReferenceDistribution,
    make_adapter,
    make_model,
    merged_distribution,
)
from tests.support.results_in_redis import num_kept

pytestmark = pytest.mark.slow


def versions(rollouts: list[Rollout]) -> set[int]:
    """Return all weight versions that sampled tokens of the rollouts."""
    return {span.weight_version for rollout in rollouts for span in rollout.weight_spans}


def assert_distribution(reference: ReferenceDistribution, rollouts: list[Rollout], sampling: Sampling) -> None:
    """Check the rollouts' log-probabilities against the reference model."""
    for rollout in rollouts:
        prompt = list(prompts(prompt_index(rollout) + 1)[-1].token_ids)
        assert rollout.logprobs is not None
        assert reference.max_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3


def test_all_engines_serve_new_weights_and_pinned_rollouts_keep_their_version(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=2, max_tokens=120, allowed_token_ids=ENDLESS, logprobs=True)
        # An update waits for pinned rollouts, so the others must be longer.
        longer = sampling.model_copy(update={"n": 4, "max_tokens": 480})
        async with (
            client.step(1, prompts(2, sampling=sampling, weight_version=0)) as pinned,
            client.step(2, prompts(5, sampling=longer)) as free,
        ):
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 16)
            loaded = await client.publish_weights(1, job_harness.models / "1")
            assert 2 == len(loaded.loaded)
            assert not loaded.failed
            old = [rollout async for rollout in pinned]
            across = [rollout async for rollout in free]
        assert {0} == versions(old)
        assert any(len(rollout.weight_spans) == 2 for rollout in across)
        new = await gather(client, 3, prompts(4, sampling=sampling, weight_version=1))
        assert_distribution(ReferenceDistribution(job_harness.models / "0"), old, sampling)
        assert_distribution(ReferenceDistribution(job_harness.models / "1"), new, sampling)
        # A request for a version that no engine serves any more fails at once.
        gone = await gather(client, 4, prompts(1, weight_version=0))
        assert [FinishReason.FAILED] * 4 == [rollout.finish_reason for rollout in gone]
        assert "no engine serves weight version 0 any more" in gone[0].detail

    job_harness.run(scenario)


def test_tokens_that_are_too_stale_are_sampled_again_when_another_engine_takes_over(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=480, allowed_token_ids=ENDLESS, logprobs=True)
        asked = prompts(6, sampling=sampling, max_staleness=0)
        task = asyncio.ensure_future(gather(client, 1, asked))
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 24)
        await client.publish_weights(1, job_harness.models / "1")
        assert len(running.workers["engine-0"].running)
        await running.kill("engine-0")
        rollouts = await task
        assert {480} == {len(rollout.token_ids) for rollout in rollouts}
        # What was running continues with the new weights; what starts again does so without tokens of the old ones.
        assert {(0, 1), (1,)} == {tuple(span.weight_version for span in one.weight_spans) for one in rollouts}
        anew = [rollout for rollout in rollouts if rollout.oldest_weight_version == 1]
        assert_distribution(ReferenceDistribution(job_harness.models / "1"), anew, sampling)

        old = next(rollout for rollout in rollouts if rollout.oldest_weight_version == 0)
        cut = Partial(token_ids=old.token_ids[:9], logprobs=(old.logprobs or [])[:9], weight_spans=old.weight_spans[:1])
        prefixed = Prompt(asked[0].token_ids, sampling={"n": 1, "max_tokens": 20}, prefix=cut, max_staleness=0)
        [failed] = await gather(client, 2, [prefixed])
        assert FinishReason.FAILED == failed.finish_reason
        assert "its prefix was sampled with weight version 0, but max_staleness requires version 1" in failed.detail

    job_harness.run(scenario)


def test_groups_in_flight_continue_across_a_weight_update(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=480, allowed_token_ids=ENDLESS)
        asked = prompts(8, sampling=sampling)
        async with client.group_queue(asked, max_in_flight=6, max_staleness=1, order="in_order") as queue:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 24)
            await client.publish_weights(1, job_harness.models / "1")
            first = await queue.take(6)
            assert [(index, 1, 1) for index in range(6)] == [
                (group.number, group.newest_version, group.staleness) for group in first
            ]
            assert all([0, 1] == sorted(versions(group.rollouts)) for group in first)
            later = await queue.take(2)
            assert [(6, 0), (7, 0)] == [(group.number, group.staleness) for group in later]
        assert 0 == queue.num_stale

    job_harness.run(scenario)


def test_weights_that_cannot_be_loaded_are_reported_and_the_old_ones_are_served(
    job_harness: JobHarness, tmp_path: Path
) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        broken = make_model(tmp_path / "broken", seed=8)
        (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
        with pytest.raises(WeightsError, match="engine-0"):
            await client.publish_weights(1, broken, mode=UpdateMode.DRAIN)
        with pytest.raises(WeightsError, match="checksum"):
            await client.publish_weights(2, job_harness.models / "1", sha256="0" * 64)
        with pytest.raises(WeightsError, match="does not exist"):
            await client.publish_weights(3, "/nowhere/at/all", sha256=None)
        invalid = make_model(tmp_path / "invalid", seed=9)
        (invalid / "config.json").write_text('{"architectures": [')
        with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
            await client.publish_weights(4, invalid)
        (invalid / "config.json").write_bytes((broken / "config.json").read_bytes())
        (invalid / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": [1]}}')
        with pytest.raises(WeightsError, match="to the name of a file in this directory"):
            await client.publish_weights(5, invalid)
        tensors = load_file(job_harness.models / "1" / "model.safetensors")
        tensors["model.norm.weight"] *= math.nan
        save_file(tensors, broken / "model.safetensors")
        with pytest.raises(WeightsError, match=r"model\.norm\.weight in model\.safetensors has values that are NaN"):
            await client.publish_weights(6, broken)
        assert {0} == versions(await gather(client, 1, prompts(2)))
        pinned = await gather(client, 2, prompts(1, weight_version=6))
        assert "no engine can load weight version 6" in pinned[0].detail
        with pytest.raises(InvalidRequestError, match="0 is the model that the job started with"):
            await client.publish_weights(0, job_harness.models / "2")
        loaded = await client.publish_weights(7, job_harness.models / "2")
        # Publishing the same weights again, as a restarted trainer does, succeeds. Other weights are rejected.
        assert 2 == len((await client.publish_weights(7, job_harness.models / "2")).loaded)
        with pytest.raises(InvalidRequestError, match="7 is already served with other weights; publish these as 8"):
            await client.publish_weights(7, job_harness.models / "1")
        assert 2 == len(loaded.loaded)

    job_harness.run(scenario)


def test_an_update_does_not_wait_for_a_pinned_rollout_that_waits_for_the_update(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        for job_store in running.job_stores.values():  # Redis is slow when an engine reads the published weights
            read_weights = job_store.job.weights

            async def read_slowly(read: Any = read_weights) -> Any:
                await asyncio.sleep(0.5)
                return await read()

            job_store.job.weights = read_slowly
        sampling = Sampling(n=4, max_tokens=20, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(60, sampling=sampling, weight_version=0)) as pinned:
            await running.until(lambda: num_kept(running.redis, running.keys) > 20)
            loaded = await client.publish_weights(1, job_harness.models / "1", timeout=40)
            assert 2 == len(loaded.loaded)
            old = [rollout async for rollout in pinned]
        assert 240 == len(old)
        assert {0} == versions(old)

    job_harness.run(scenario)


def test_pinned_rollouts_keep_their_version_during_an_update_that_drains(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=8, max_tokens=100, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(20, sampling=sampling, weight_version=0)) as pinned:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 8)
            await client.publish_weights(1, job_harness.models / "1", mode=UpdateMode.DRAIN)
            old = [rollout async for rollout in pinned]
        assert 160 == len(old)
        assert {0} == versions(old)
        late = [rollout for rollout in old if not rollout.finish_reason.complete]
        assert late
        assert all("no engine serves weight version 0 any more" in rollout.detail for rollout in late)

    job_harness.run(scenario)


def test_weights_are_sent_from_a_trainers_memory(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=2, max_tokens=60, logprobs=True)
        model = AutoModelForCausalLM.from_pretrained(job_harness.models / "1", dtype="float32")
        weights = ModelInMemory(model, host="127.0.0.1")
        long = prompts(4, sampling=Sampling(n=16, max_tokens=400, allowed_token_ids=ENDLESS))
        async with client.step(1, long) as step:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 4)
            assert 2 == len((await client.publish_weights(1, weights)).loaded)
            across = [rollout async for rollout in step]
        assert any([0, 1] == [span.weight_version for span in rollout.weight_spans] for rollout in across)
        group = weights.group
        for version in (1, 2):  # the second version uses the existing group
            if version == 2:
                model.load_state_dict(AutoModelForCausalLM.from_pretrained(job_harness.models / "2").state_dict())
                assert 2 == len((await client.publish_weights(2, weights, mode="drain")).loaded)
            rollouts = await gather(client, 1 + version, prompts(6, sampling=sampling, weight_version=version))
            assert_distribution(ReferenceDistribution(job_harness.models / str(version)), rollouts, sampling)
        assert group == weights.group

        # Another set of engines needs a new group.
        await lose(running, "engine-1")
        assert 1 == len((await client.publish_weights(3, weights)).loaded)
        assert group != weights.group

        # An engine that joins later waits for the next version, and the status says so.
        joined = await replace_engine(running, job_harness, "engine-1", lost=False)
        await running.until(lambda: 3 in joined.report.failed)
        assert "before this engine joined. It waits for the next version" in joined.report.failed[3]
        await wait_for_status(client, lambda status: any("3" in engine["failed"] for engine in status["engines"]))
        rollouts = await gather(client, 4, prompts(6))
        assert {running.workers["engine-0"].engine_id} == {rollout.engine for rollout in rollouts}
        assert {3} == versions(rollouts)
        tensors = TensorsInMemory(list(model.named_parameters()), host="127.0.0.1")
        assert 2 == len((await client.publish_weights(4, tensors)).loaded)
        assert joined.report.missed is None

        # Weights with other shapes are rejected before they are sent.
        config = AutoConfig.from_pretrained(job_harness.models / "1", intermediate_size=8)
        with pytest.raises(WeightsError, match="not received by all engines") as rejected:
            await client.publish_weights(5, ModelInMemory(AutoModelForCausalLM.from_config(config), host="127.0.0.1"))
        assert 2 == len(rejected.value.failed)
        assert all("has shape" in reason for reason in rejected.value.failed.values())
        assert {4} == versions(await gather(client, 9, prompts(2)))

        # An engine that dies delays the others only until its lease expires. A version that is sent to a group with it
        # is lost, and the group is formed again for the next one.
        await running.kill("engine-1")
        with suppress(WeightsError):
            await client.publish_weights(6, weights)
        assert 1 == len((await client.publish_weights(7, weights)).loaded)
        assert {7} == versions(await gather(client, 10, prompts(2)))

        # A trainer that stops waiting leaves no control message behind.
        await running.kill("coordinator")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.publish_weights(8, weights), 1)
        await running.until(lambda: running.redis.xlen(running.keys.control) == 0)

    job_harness.run(scenario)


def test_an_adapter_is_loaded_only_on_its_own_full_weights(
    job_harness: JobHarness, loop: LoopThread, redis_server: str, tmp_path: Path
) -> None:
    spec = manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"maxLoraRank": 5}
    job = manifest(engine=spec, workers={"gpusPerWorker": 0, "replicas": 1})
    models = job_harness.models
    adapters = [make_adapter(tmp_path / f"adapter-{seed}", models / "1", seed) for seed in range(2)]
    before = set(psutil.Process().children(recursive=True))
    engine = loop.run(start_engine(models / "0", redis_server, job))
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    cores = [process for process in started if "EngineCore" in process.name()]
    loaded: list[Path] = []
    load_weights = engine.load_weights

    async def load_and_record(directory: Path, *more: Any) -> float:
        loaded.append(directory)
        return await load_weights(directory, *more)

    engine.load_weights = load_and_record

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=2, max_tokens=40, logprobs=True)
        await client.publish_weights(1, models / "1")
        for version, adapter in enumerate(adapters, 2):
            await client.publish_weights(version, adapter, kind="lora")
            reference = merged_distribution(models / "1", adapter, tmp_path / f"merged-{version}")
            rollouts = await gather(client, version, prompts(3, sampling=sampling, weight_version=version))
            assert_distribution(reference, rollouts, sampling)
        assert [models / "1"] == loaded  # loading an adapter does not load its base weights again

        # An engine that cannot load the base weights does not use the adapter with other weights.
        await client.publish_weights(9, models / "2")
        await client.publish_weights(10, adapters[0], kind="lora")
        await running.kill("engine-0")
        await engine.load_weights(models / "0", 0)
        (models / "2").rename(models / "gone")
        try:
            worker = running.start_worker("engine-0", engine)
            await running.until(lambda: 10 in worker.report.failed)
            assert "the adapter needs the full weights of version 9" in worker.report.failed[10]
            assert {0} == versions(await gather(client, 11, prompts(2)))
        finally:
            (models / "gone").rename(models / "2")

        # An engine that has lost its weights takes no work and ends, so that it is restarted.
        await running.kill("engine-0")
        for core in cores:
            core.kill()
        registered = running.redis.hkeys(running.keys.engines)
        running.start_worker("engine-0", engine)
        with pytest.raises(EngineError):
            await running.tasks.pop("engine-0")
        assert set(registered) >= set(running.redis.hkeys(running.keys.engines))

    try:
        job_harness.with_engines({"engine-0": engine}).run(scenario, job=job)
    finally:
        engine.close()
