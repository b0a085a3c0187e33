"""Acknowledgement of results, and back-pressure from slow consumers, full jobs and a full Redis."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.commands.core import AsyncScript

from rollout_api import (
    AsyncRolloutClient,
    Cancel,
    ClientLimits,
    Prompt,
    RedisUnreachableError,
    RolloutClient,
)
from tests.support.client_tests import LIMITS, PROMPTS, num_pending, receive_without_acknowledging, result_entries, run
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for


def test_acknowledgement_trims_up_to_the_slowest_consumer_group(client: RolloutClient, job: FakeJob) -> None:
    stream = job.keys.results("trainer")
    job.redis.xgroup_create(stream, "auditor", id="0")
    with job.serving():
        client.generate(PROMPTS, step=1)
    assert 6 == len(result_entries(job))
    [(_, entries)] = job.redis.xreadgroup("auditor", "a", {stream: ">"}, count=4)
    job.redis.xack(stream, "auditor", *[entry for entry, _ in entries[:3]])
    with job.serving():
        client.generate(PROMPTS, step=2)
    left = result_entries(job)
    assert entries[3][0] == left[0]
    assert 3 + 6 == len(left)


def test_many_results_are_acknowledged(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        groups = client.generate([[i % 900 + 1, i // 900] for i in range(1200)], step=1, n=2)
    assert 2400 == sum(map(len, groups))
    assert [] == result_entries(job)
    assert 0 == num_pending(job)


def test_acknowledged_results_behind_held_ones_are_deleted(redis_url: str, job: FakeJob) -> None:
    """A trainer that returned to an earlier step holds the results of later steps for long."""
    stream = job.keys.results("trainer")
    receive_without_acknowledging(redis_url, job, 9)
    held = result_entries(job)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=1)
        assert held == result_entries(job)
        job.redis.xgroup_create(stream, "auditor", id="0")
        with client.step(2, PROMPTS) as step:
            assert 6 == len(list(step))
            later = result_entries(job)[6:]
            job.redis.xreadgroup("auditor", "a", {stream: ">"}, count=10)
            job.redis.xack(stream, "auditor", *held[1:], later[0], later[2])
        # later[1] and later[3] are pending in the other group, and later[4] and later[5] are not delivered to it yet.
        assert [*held, later[1], *later[3:]] == result_entries(job)


def test_failed_acknowledgement_splits_no_request(
    redis_url: str, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ClientLimits(acknowledge_batch=3)
    call = AsyncScript.__call__
    calls: list[int] = []

    async def fail_after_the_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["keys"] == [job.keys.results("trainer")]:
            calls.append(1)
            if len(calls) > 1:
                raise redis.ConnectionError("unreachable")
        return await call(self, *args, **kwargs)

    with job.serving(), RolloutClient.connect(redis_url, job.name, reconnect_timeout=0.5, limits=limits) as client:
        monkeypatch.setattr(AsyncScript, "__call__", fail_after_the_first)
        with pytest.raises(RedisUnreachableError, match="acknowledge results"), client.step(1, PROMPTS) as step:
            first = list(step)
        monkeypatch.setattr(AsyncScript, "__call__", call)
        assert 4 == num_pending(job)
        left = {entry.decode() for entry in result_entries(job)}
        assert 4 == len(left)
        again = client.generate(PROMPTS, step=1)
    both = {rollout.rollout_id for rollout in first} & {rollout.rollout_id for group in again for rollout in group}
    assert 4 == len(both)
    assert [2, 2, 2] == [len(group) for group in again]
    assert [] == result_entries(job)


def test_reader_waits_for_a_slow_consumer(redis_url: str, job: FakeJob) -> None:
    count = 2 * LIMITS.max_unread

    async def trainer() -> None:
        async with (
            AsyncRolloutClient.connect(redis_url, job.name) as client,
            client.step(0, [Prompt([1], sampling={"n": count})]) as step,
        ):
            [request] = await asyncio.to_thread(job.wait_for_requests, 1)
            await asyncio.to_thread(job.answer, request)
            async with asyncio.timeout(10):
                while step.num_unread < LIMITS.max_unread:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # time in which it could read more
            assert LIMITS.max_unread <= step.num_unread <= LIMITS.max_unread + LIMITS.read_batch
            assert num_pending(job) <= LIMITS.max_unread + LIMITS.read_batch
            assert set(range(count)) == {int(r.rollout_id.split("/")[2]) async for r in step}

    run(trainer())


def test_unread_step_does_not_block_another(redis_url: str, job: FakeJob) -> None:
    count = LIMITS.max_unread + 200

    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            unread = await client.step(0, [Prompt([1], sampling={"n": count})]).start()
            async with client.step(1, [[2]]) as step:
                requests = await asyncio.to_thread(job.wait_for_requests, 2)
                await asyncio.to_thread(job.answer, requests[0])
                job.answer(requests[1])
                assert 2 == len([rollout async for rollout in step])
            assert unread.num_unread <= LIMITS.max_unread + LIMITS.read_batch
            assert count == len({rollout.rollout_id async for rollout in unread})
            await unread.end()

    run(trainer())
    assert [] == result_entries(job)


def test_requests_wait_while_the_job_is_at_capacity(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    job = FakeJob(redis_url, max_rollouts=10)
    job.publish_status(waiting=10)
    limits = ClientLimits(monitor_interval_s=0.1)
    with RolloutClient.connect(redis_url, job.name, limits=limits) as client:
        wait_for(lambda: client.status.get("waiting") == 10)
        with client.step(0, [[i] for i in range(1, 21)]) as step:
            wait_for(lambda: "reached its limit of 10 open rollouts" in caplog.text)
            assert [] == job.requests()  # by its own count, the client would send five
            with job.serving():
                assert 40 == len(list(step))


def test_client_waits_while_redis_is_full(
    client: RolloutClient, job: FakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as full:
        full.enter_context(job.out_of_memory())
        with client.step(0, PROMPTS) as step:
            wait_for(lambda: "out of memory" in caplog.text)
            assert 0 == len(job.requests())
            full.close()
            with job.serving():
                assert 6 == len(list(step))


def test_step_can_end_while_redis_is_full(redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture) -> None:
    """Acknowledging results is what frees memory."""

    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            answered = await client.step(0, PROMPTS).start()
            requests = await asyncio.to_thread(job.wait_for_requests, 3)
            job.answer(requests[0])
            await anext(aiter(answered))
            with job.out_of_memory():
                async with client.step(1, PROMPTS):
                    # The client waits for memory to send the requests.
                    await asyncio.to_thread(wait_for, lambda: "out of memory" in caplog.text)
                await answered.end()
                assert [] == result_entries(job)
                assert 0 == num_pending(job)

    run(trainer())
    cancelled = [set(cancel.request_ids) for cancel in job.control_messages() if isinstance(cancel, Cancel)]
    assert [3, 2] == [len(ids) for ids in cancelled]
    assert cancelled[1] == {request.request_id for request in job.requests()}


def test_step_can_be_cancelled_while_redis_is_full(redis_url: str, job: FakeJob) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
            await step.cancel()
            assert [] == [rollout async for rollout in step]

    with job.out_of_memory():
        run(trainer())
    assert [] == job.requests()


def test_client_can_connect_while_redis_is_full(redis_url: str, job: FakeJob) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name):
            job.redis.delete(job.keys.client("trainer"))
            await asyncio.to_thread(wait_for, lambda: job.redis.exists(job.keys.client("trainer")))

    with job.out_of_memory():
        run(trainer())
        run(trainer())
