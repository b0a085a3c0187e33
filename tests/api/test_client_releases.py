"""Release of results, and back-pressure from slow consumers, full jobs and a full Redis."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollout_api import AsyncRolloutClient, Cancel, Prompt, RolloutClient
from rollout_api.client import job_state
from tests.support.client_tests import PROMPTS, num_results, run
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for


def num_unread_bytes(job: FakeJob, client: str = "trainer") -> int:
    """Return how many bytes of its results a client has not read, as it has told the job."""
    written, read = (job.redis.hget(key, client) for key in (job.keys.results_written, job.keys.results_read))
    return int(written or 0) - int(read or 0)


def test_many_results_are_released(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        groups = client.generate([[i % 900 + 1, i // 900] for i in range(1200)], step=1, n=2)
    assert 2400 == sum(map(len, groups))
    assert 0 == num_results(job)


def test_results_stay_in_redis_until_they_are_taken(redis_url: str, job: FakeJob) -> None:
    count = 300

    async def trainer() -> None:
        async with (
            AsyncRolloutClient.connect(redis_url, job.name) as client,
            client.step(0, [Prompt([index + 1], sampling={"n": 1}) for index in range(count)]) as step,
        ):
            requests = await asyncio.to_thread(job.wait_for_requests, count)
            for request in requests:
                job.answer(request)
            written = int(job.redis.hget(job.keys.results_written, "trainer") or 0)
            await asyncio.to_thread(wait_for, lambda: num_unread_bytes(job) == written)
            [first] = await step.take(1) or []
            await asyncio.to_thread(wait_for, lambda: 0 < num_unread_bytes(job) < written)
            others = [rollout async for rollout in step]
            assert count == len({first.rollout_id, *(rollout.rollout_id for rollout in others)})
            await asyncio.to_thread(wait_for, lambda: num_unread_bytes(job) == 0)
            assert count == num_results(job)
        assert 0 == num_results(job)

    run(trainer())


def test_a_dead_client_does_not_read(redis_url: str, job: FakeJob) -> None:
    with RolloutClient.connect(redis_url, job.name) as client:
        client.step(1, PROMPTS).start()
        requests = job.wait_for_requests(3)
        job.answer(requests[0])
    before = num_unread_bytes(job)
    job.answer(requests[1])
    written = sum(len(value) for value in job.redis.hvals(job.keys.results(requests[1].request_id)))
    assert before + written == num_unread_bytes(job)
    with RolloutClient.connect(redis_url, job.name):
        wait_for(lambda: num_unread_bytes(job) == 0)  # what its steps do not request is not counted


def test_unread_step_does_not_block_another(redis_url: str, job: FakeJob) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            unread = await client.step(0, [Prompt([1], sampling={"n": 1000})]).start()
            async with client.step(1, [[2]]) as step:
                requests = await asyncio.to_thread(job.wait_for_requests, 2)
                await asyncio.to_thread(job.answer, requests[0])
                job.answer(requests[1])
                assert 2 == len([rollout async for rollout in step])
            assert 1000 == len({rollout.rollout_id async for rollout in unread})
            await unread.end()

    run(trainer())
    assert 0 == num_results(job)


def test_requests_wait_while_the_job_is_at_capacity(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_state, "_INTERVAL_S", 0.1)
    job = FakeJob(redis_url, max_rollouts=10)
    job.publish_status(waiting=10)
    with RolloutClient.connect(redis_url, job.name) as client:
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
    """Releasing results is what frees memory."""

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
                assert 0 == num_results(job)

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
            pass

    with job.out_of_memory():
        run(trainer())


def test_a_job_in_which_nothing_is_open_takes_one_request_that_is_too_large(redis_url: str) -> None:
    job = FakeJob(redis_url, max_rollouts=3)
    job.publish_status()
    with RolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
        [request] = job.wait_for_requests(1)
        job.answer(request)
        assert 2 == len([rollout for _, rollout in zip(range(2), step, strict=False)])
        job.publish_status()
        [request] = job.wait_for_requests(1)
        with job.serving():
            assert 4 == len(list(step))
