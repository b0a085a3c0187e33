"""Failures of parts of a job with two real engines: no rollout is lost, duplicated or sampled from the beginning."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_api import AsyncRolloutClient, FinishReason, Rollout
from rollout_api.manifest.spec import Sampling
from rollout_store.job import StaleCoordinatorError
from rollout_worker.policy.governor import SpeculationCutoff
from tests.support.in_process_job import CHECKPOINT_TOKENS, LiveJob, manifest
from tests.support.live_job_harness import (
    ENDLESS,
    JobHarness,
    assert_delivered_once,
    gather,
    prompt_index,
    prompts,
    wait_for_status,
)
from tests.support.redis_servers import Server
from tests.support.reference_model import ReferenceDistribution


@pytest.mark.slow
def test_rollouts_of_a_lost_engine_continue_from_their_checkpoints(job_harness: JobHarness) -> None:
    """Log-probabilities and kept tokens are the model's own across the point where another engine continues."""
    length = 400

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        reference = ReferenceDistribution(job_harness.models / "0")
        sampled_before = sum(engine.counters.tokens for engine in job_harness.engines.values())
        wanted = {"logprobs": True, "prompt_logprobs": True, "kept_tokens": True}
        sampling = Sampling(n=4, max_tokens=length, top_k=8, allowed_token_ids=ENDLESS, **wanted)
        asked = prompts(8, length=24, sampling=sampling)
        task = asyncio.ensure_future(gather(client, 1, asked))
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 12)
        num_lost = len(running.workers["engine-0"].running)
        assert num_lost
        await running.kill("engine-0")
        rollouts = await task
        assert_delivered_once(running, rollouts, 32)
        assert all(len(rollout.token_ids) == length for rollout in rollouts)
        for rollout in rollouts:
            assert rollout.logprobs is not None
            prompt = list(asked[prompt_index(rollout)].token_ids)
            assert reference.max_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3
            assert rollout.prompt_logprobs is not None
            exact = reference.prompt_logprobs(prompt)[range(len(prompt) - 1), prompt[1:]]
            assert abs(exact - rollout.prompt_logprobs).max() < 1e-3
            assert rollout.kept_token_ids is not None
            kept = reference.logprobs(prompt, rollout.token_ids, sampling) > -np.inf
            unfiltered = reference.logprobs(prompt, rollout.token_ids, sampling.model_copy(update={"top_k": 0}))
            for row, all_logprobs, tokens in zip(kept, unfiltered, rollout.kept_token_ids, strict=True):
                # The rounding of the engine decides between tokens that are equally likely at the limit of top_k.
                different = sorted(set(np.flatnonzero(row)) ^ set(tokens))
                assert len(tokens) == np.count_nonzero(row)
                assert not different or np.ptp(all_logprobs[different]) < 1e-4
        sampled = sum(engine.counters.tokens for engine in job_harness.engines.values()) - sampled_before
        # Each rollout lost at most the tokens since its checkpoint and one verification step.
        assert 0 <= sampled - 32 * length <= num_lost * (CHECKPOINT_TOKENS + 5)

    job_harness.run(scenario)


def test_a_coordinator_can_be_killed_at_any_time(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        rollouts: list[Rollout] = []
        steps = kills = 0
        while kills < 5:  # how many kills happen during one step depends on the machine's speed
            steps += 1
            asked = prompts(100, sampling=Sampling(n=4, max_tokens=60))
            task = asyncio.ensure_future(gather(client, steps, asked))
            while not task.done():
                await asyncio.sleep(0.05 + 0.03 * kills)
                await running.kill("coordinator")
                running.start_coordinator()
                kills += 1
            rollouts += await task
        assert_delivered_once(running, rollouts, 400 * steps)
        # An answered step shows that the last coordinator has taken over.
        assert 16 == len(await gather(client, steps + 1, prompts(4)))
        # When a second coordinator takes over, the first one ends.
        first = running.tasks.pop("coordinator")
        running.start_coordinator()
        assert 16 == len(await gather(client, steps + 2, prompts(4)))
        with pytest.raises(StaleCoordinatorError):
            await asyncio.wait_for(first, 20)

    job_harness.run(scenario)


def test_engines_finish_and_deliver_their_rollouts_without_a_coordinator(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        def num_ended() -> int:
            return int(running.redis.hget(running.keys.totals, "rollouts") or 0)

        def num_assigned_or_ended() -> int:
            ended = num_ended()
            return ended + sum(map(running.redis.xlen, running.redis.keys(running.keys.inbox("*"))))

        sampling = Sampling(n=4, max_tokens=480, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(8, sampling=sampling)) as step:
            await running.until(lambda: num_assigned_or_ended() >= 32)
            await running.kill("coordinator")
            assert num_ended() < 32
            received = [rollout async for rollout in step]
        assert 32 == len(received)

    job_harness.run(scenario)


def test_an_engine_that_was_wrongly_considered_lost_registers_again(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        def registered() -> set[bytes]:
            return set(running.redis.hkeys(running.keys.engines))

        sampling = Sampling(n=16, max_tokens=400, allowed_token_ids=ENDLESS)
        task = asyncio.ensure_future(gather(client, 1, prompts(8, sampling=sampling)))
        for _ in range(2):
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 2)
            considered_lost = registered()
            for engine in considered_lost:
                running.redis.delete(running.keys.lease(engine.decode()))
            await running.until(lambda lost=considered_lost: len(registered() - lost) == 2)
        assert not task.done()
        assert_delivered_once(running, await task, 128)

    job_harness.run(scenario)


def test_redis_may_lose_its_last_writes(job_harness: JobHarness, tmp_path: Path) -> None:
    """After a crash or a failover, the last requests, results and assignments may be lost."""
    server = Server(tmp_path)  # without an append-only file: after a restart, it has the data of its last snapshot

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        def num_events() -> int:
            return int(running.redis.xlen(running.keys.events))

        sampling = Sampling(n=4, max_tokens=200, allowed_token_ids=ENDLESS)
        first = asyncio.ensure_future(gather(client, 1, prompts(12, sampling=sampling)))
        await running.until(lambda: num_events() >= 6)
        await asyncio.to_thread(server.client().save)
        saved = num_events()
        second = asyncio.ensure_future(gather(client, 2, prompts(6, sampling=sampling)))
        await running.until(lambda: num_events() >= saved + 8)
        [(last_event, _)] = running.redis.xrevrange(running.keys.events, count=1)
        await asyncio.to_thread(server.restart)
        assert [] == running.redis.xrange(running.keys.events, last_event, last_event)
        assert 48 == len(await first)
        assert 24 == len(await second)
        await running.until(lambda: running.redis.xlen(running.keys.requests) == 0, 20)
        await running.until_nothing_is_open()
        await wait_for_status(client, lambda status: status["assigned"] == 0)
        assert 0 == running.redis.hlen(running.keys.partials)

    with server:
        job_harness.with_redis(server.url).run(scenario)


def test_weights_that_redis_has_lost_are_published_again(job_harness: JobHarness, tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        await asyncio.to_thread(server.client().save)
        await running.kill("coordinator")
        publishing = asyncio.ensure_future(client.publish_weights(1, job_harness.models / "1", timeout=40))
        await running.until(lambda: running.redis.xlen(running.keys.control) == 1)
        await asyncio.to_thread(server.restart)
        assert 0 == running.redis.xlen(running.keys.control)
        running.start_coordinator()
        assert 2 == len((await publishing).loaded)

    with server:
        job_harness.with_redis(server.url).run(scenario)


def test_a_rollout_with_which_several_engines_are_lost_fails_and_others_do_not(job_harness: JobHarness) -> None:
    engine = manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"checkpointTokens": 1000}

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        def engine_of_first_step() -> str | None:
            """Return the engine that produces the rollout of step 1, which is never checkpointed."""
            for name, worker in running.workers.items():
                if any(request_id.split(":")[1] == "1" for request_id, _ in worker.running):
                    return name
            return None

        deadly = prompts(1, sampling=Sampling(n=1, max_tokens=480, allowed_token_ids=ENDLESS))
        async with client.step(1, deadly) as first, client.step(2, prompts(8)) as second:
            for _ in range(6):
                async with asyncio.timeout(60):
                    # Polled within the event loop, so that the rollout cannot end between the check and the kill.
                    while (name := engine_of_first_step()) is None:
                        running.check()
                        await asyncio.sleep(0.01)
                engine_id = running.workers[name].engine_id
                await running.kill(name)
                running.redis.delete(running.keys.lease(engine_id))
                running.start_worker(name, job_harness.engines[name])
            (failed,) = [rollout async for rollout in first]
            others = [rollout async for rollout in second]
        assert failed.finish_reason is FinishReason.FAILED
        assert "6 engines were lost with it" in failed.detail
        assert 32 == len(others)
        assert all(rollout.finish_reason.complete for rollout in others)

    job_harness.run(scenario, job=manifest(engine=engine))


def test_a_worker_that_is_told_to_leave_hands_over_its_rollouts(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=450, allowed_token_ids=ENDLESS)
        task = asyncio.ensure_future(gather(client, 1, prompts(20, sampling=sampling)))
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 10)
        worker, ended = running.workers.pop("engine-0"), running.tasks.pop("engine-0")
        started = time.monotonic()
        await worker.drain(0.2)
        await ended
        assert time.monotonic() - started < 3
        assert_delivered_once(running, await task, 80)
        assert {} == running.redis.hgetall(running.keys.attempts)  # the loss is not attributed to any rollout
        # A worker that joins receives work.
        running.start_worker("engine-2", job_harness.engines["engine-0"])
        both = {"engine-1", "engine-2"}
        await wait_for_status(client, lambda status: both == {engine["name"] for engine in status["engines"]})
        assert 2 == len({rollout.engine for rollout in await gather(client, 2, prompts(8))})

    job_harness.run(scenario)


def test_an_engine_on_which_drafting_does_not_pay_is_replaced_between_two_steps(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=200, allowed_token_ids=ENDLESS)
        await running.drain("engine-0")
        never_pays = SpeculationCutoff(min_decoding_s=0.01, min_disabled_share=0.0)
        worker = running.start_worker("engine-0", job_harness.engines["engine-0"], speculation_cutoff=never_pays)
        task = running.tasks.pop("engine-0")
        assert_delivered_once(running, await gather(client, 1, prompts(8, sampling=sampling)), 32)
        await asyncio.wait_for(task, 20)
        assert worker.speculation_cut_off
        assert not running.workers["engine-1"].speculation_cut_off
        # An engine without speculation takes its place and serves all requests.
        del running.workers["engine-0"]
        running.start_worker("engine-0", job_harness.engines["engine-0"], speculation_disabled=True)
        expected = {"engine-0": True, "engine-1": False}
        await wait_for_status(
            client,
            lambda status: expected == {each["name"]: each["speculation_disabled"] for each in status["engines"]},
        )
        rollouts = await gather(client, 2, prompts(8, sampling=sampling))
        assert {"engine-0", "engine-1"} == {rollout.engine.rpartition("-")[0] for rollout in rollouts}

    job_harness.run(scenario)
