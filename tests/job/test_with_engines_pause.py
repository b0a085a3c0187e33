"""Pauses of a job with two real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from rollout_api import AsyncRolloutClient, AsyncStep, FinishReason, PauseError, PauseMode, Rollout, WeightsError
from rollout_api.manifest.spec import Sampling
from rollout_worker.engine.engine import Engine
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import (
    ENDLESS,
    JobHarness,
    assert_delivered_once,
    gather,
    prompts,
    wait_for_status,
)

pytestmark = pytest.mark.slow

LONG = Sampling(n=4, max_tokens=480, allowed_token_ids=ENDLESS, logprobs=True)


async def assert_nothing_is_sampled(engines: Mapping[str, Engine]) -> None:
    before = [engine.counters.tokens for engine in engines.values()]
    await asyncio.sleep(1.5)  # engines would sample hundreds of tokens
    assert before == [engine.counters.tokens for engine in engines.values()]


@asynccontextmanager
async def sampling(running: LiveJob, client: AsyncRolloutClient, num_prompts: int) -> AsyncIterator[AsyncStep]:
    """Request long rollouts, and wait until some are being sampled."""
    async with client.step(1, prompts(num_prompts, sampling=LONG)) as step:
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 4)
        yield step


@pytest.mark.parametrize("level", [1, 2])
def test_engines_sleep_and_continue_with_their_weights_after_they_wake(job_harness: JobHarness, level: int) -> None:
    """On CPUs, engines keep their memory, but read their weights again after level 2."""

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.publish_weights(1, job_harness.models / "1")
        async with sampling(running, client, 5) as step:
            await client.sleep(level)
            await assert_nothing_is_sampled(job_harness.engines)
            await client.sleep(level)  # has no effect
            with pytest.raises(WeightsError, match="the engines sleep"):
                await client.publish_weights(2, job_harness.models / "2")
            await client.pause()  # engines wake
            await client.publish_weights(2, job_harness.models / "2")
            await client.sleep(level)
            await client.wake()
            rollouts = [rollout async for rollout in step]
        assert_delivered_once(running, rollouts, 20)
        assert {480} == {rollout.num_tokens for rollout in rollouts}
        assert {1, 2} == {span.weight_version for rollout in rollouts for span in rollout.weight_spans}

    job_harness.run(scenario)


@pytest.mark.parametrize("with_new_weights", [False, True])
def test_running_rollouts_stop_and_continue_after_the_pause(job_harness: JobHarness, *, with_new_weights: bool) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with sampling(running, client, 5) as step:
            await client.pause()
            await assert_nothing_is_sampled(job_harness.engines)
            status = await wait_for_status(client, lambda status: status["state"] == "paused")
            assert 20 == status["waiting"] + status["assigned"]
            if with_new_weights:
                await client.publish_weights(1, job_harness.models / "1")
                await assert_nothing_is_sampled(job_harness.engines)
            await client.resume()
            rollouts = [rollout async for rollout in step]
        assert_delivered_once(running, rollouts, 20)
        assert {480} == {rollout.num_tokens for rollout in rollouts}
        versions = {span.weight_version for rollout in rollouts for span in rollout.weight_spans}
        assert ({0, 1} if with_new_weights else {0}) == versions

    job_harness.run(scenario)


def test_running_rollouts_finish_first_where_it_is_asked_for(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with sampling(running, client, 10) as step:
            await client.pause(PauseMode.WAIT)
            assert 0 == running.redis.hlen(running.keys.partials)
            await assert_nothing_is_sampled(job_harness.engines)
            await client.resume()
            rollouts = [rollout async for rollout in step]
        assert_delivered_once(running, rollouts, 40)

    job_harness.run(scenario)


def test_resuming_ends_the_wait_for_running_rollouts(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with sampling(running, client, 10) as step:
            with pytest.raises(PauseError, match=r"not paused after 0 s: 2 engines have not followed: engine-0-"):
                await client.pause("wait", timeout=0.3)
            await client.resume()
            rollouts = [rollout async for rollout in step]
        assert_delivered_once(running, rollouts, 40)

    job_harness.run(scenario)


def test_rollouts_can_be_cancelled_and_requested_while_the_job_is_paused(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with sampling(running, client, 2) as step:
            await client.pause()
            requested = asyncio.ensure_future(gather(client, 2, prompts(1)))
            await step.cancel()
            cancelled = [rollout async for rollout in step]
        assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in cancelled}
        assert not requested.done()
        await client.resume()
        await client.resume()  # has no effect
        assert_delivered_once(running, cancelled + await requested, 12)

    job_harness.run(scenario)


def test_engines_that_join_and_coordinators_that_take_over_find_the_job_paused(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.pause()
        await running.kill("engine-0")
        await running.kill("coordinator")
        running.start_coordinator()
        worker = running.start_worker("engine-0", job_harness.engines["engine-0"])
        await running.until(lambda: worker.report.paused == "keep")
        requested: asyncio.Future[list[Rollout]] = asyncio.ensure_future(gather(client, 1, prompts(3)))
        await assert_nothing_is_sampled(job_harness.engines)
        assert not requested.done()
        await client.resume()
        assert_delivered_once(running, await requested, 12)

    job_harness.run(scenario)


def test_closing_a_job_resumes_it(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await client.pause()
        requested = asyncio.ensure_future(gather(client, 1, prompts(1)))
        await running.until(lambda: running.redis.xlen(running.keys.requests) == 1)
        await client.close_job()
        assert 4 == len(await requested)

    job_harness.run(scenario)
