"""A trainer publishes weights as differences to a job with real engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_api import AsyncRolloutClient, DeltaWeights, ModelInMemory, WeightsError
from rollout_api.manifest.spec import Sampling
from tests.job.test_with_engines_weights import assert_distribution, versions
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import ENDLESS, JobHarness, gather, prompts, wait_for_status
from tests.support.reference_model import ReferenceDistribution

SAMPLING = Sampling(n=2, max_tokens=60, allowed_token_ids=ENDLESS, logprobs=True)


def take_step(model: torch.nn.Module, seed: int) -> None:
    """Change some weights by so much that the distribution of the next token changes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape, generator=generator) < 0.02
            parameter[changed] += 0.05 * torch.randn(int(changed.sum()), generator=generator)


def test_engines_serve_exactly_what_the_trainer_has(job_harness: JobHarness, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(job_harness.models / "1", dtype="float32")
    weights = DeltaWeights(ModelInMemory(model), tmp_path / "deltas", keyframe_interval=4)

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async def publish(version: int) -> int:
            take_step(model, version)
            return len((await client.publish_weights(version, weights)).loaded)

        async def check(version: int) -> None:
            """Compare what the engines sample with the trainer's current model."""
            saved = tmp_path / f"version-{version}"
            shutil.copytree(job_harness.models / "1", saved)
            model.save_pretrained(saved)
            rollouts = await gather(client, version, prompts(6, sampling=SAMPLING))
            assert {version} == versions(rollouts)
            assert {worker.engine_id for worker in running.workers.values()} == {one.engine for one in rollouts}
            assert_distribution(ReferenceDistribution(saved), rollouts, SAMPLING)

        def files(kind: str) -> int:
            return len(list((tmp_path / "deltas").glob(kind)))

        for version in (1, 2, 3):
            assert 2 == await publish(version)
        assert (1, 2) == (files("keyframe-*"), files("*/*.delta"))
        await check(3)

        # A rollout that runs during an update continues with the new weights.
        long = prompts(4, sampling=SAMPLING.model_copy(update={"n": 4, "max_tokens": 480}))
        async with client.step(40, long) as step:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 8)
            assert 2 == await publish(4)
            across = [rollout async for rollout in step]
        assert any([3, 4] == [span.weight_version for span in rollout.weight_spans] for rollout in across)

        # An engine that was killed joins again with other weights in memory, and has missed a version.
        await running.kill("engine-1")
        await running.until(lambda: running.redis.hlen(running.keys.engines) == 1)
        assert 1 == await publish(5)  # a keyframe
        assert 1 == await publish(6)
        assert (2, 4) == (files("keyframe-*"), files("*/*.delta"))
        await job_harness.engines["engine-1"].load_weights(job_harness.models / "2", 0)
        joined = running.start_worker("engine-1", job_harness.engines["engine-1"])
        await running.until(lambda: joined.report.version == 6)
        # The last status may still name the engine that was killed.
        served = {("engine-0", 6), ("engine-1", 6)}
        await wait_for_status(
            client, lambda status: served == {(one["name"], one["version"]) for one in status["engines"]}
        )
        await check(6)

        # With a damaged difference, all engines keep their weights until the next keyframe.
        before = set((tmp_path / "deltas").glob("*/*.delta"))
        take_step(model, 7)
        written = weights.write

        def write_damaged(version: int, **options: bool) -> object:
            files = written(version, **options)
            [new] = set((tmp_path / "deltas").glob("*/*.delta")) - before
            new.write_bytes(b"damaged")
            return files

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "write", write_damaged)
            with pytest.raises(WeightsError, match="no engine could load weight version 7") as failure:
                await client.publish_weights(7, weights)
        assert all("was published with" in reason for reason in failure.value.failed.values())
        with pytest.raises(WeightsError, match="no engine could load weight version 8"):
            await publish(8)
        assert {6} == versions(await gather(client, 41, prompts(2)))
        assert 2 == await publish(9)
        await check(9)

    job_harness.run(scenario, seconds=240)
