"""Requests whose rollouts are kept under their ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from rollout_api import (
    InvalidRequestError,
    JobEndedError,
    Prompt,
    RequestClient,
    RequestRefusedError,
    Rollout,
    RolloutClientError,
    RolloutRequest,
    encode,
)
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client import result_reader
from rollout_api.errors import JobFullError
from rollout_api.redis_client.pipelined import PipelinedRedis
from tests.support.client_tests import run
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for_async

PROMPT = Prompt([1, 2, 3])


@asynccontextmanager
async def connected(redis_url: str, job: FakeJob) -> AsyncIterator[RequestClient]:
    async with RequestClient.connect(redis_url, job.name, reconnect_timeout=10) as client:
        yield client


def ids(rollouts: list[Rollout]) -> list[str]:
    return [rollout.rollout_id for rollout in rollouts]


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_server_waits_for_its_job_and_says_so(
    redis_url: str, caplog: pytest.LogCaptureFixture, has_ended: bool
) -> None:
    if has_ended:
        FakeJob(redis_url).set_state("closed", "")
    waiting = asyncio.create_task(RequestClient.wait_for_job(redis_url, "default/math", log_interval=0.1))
    expected = "Waiting for the next job with this name" if has_ended else "default/math did not appear"
    await wait_for_async(lambda: caplog.text.count(expected) >= 2)
    assert not waiting.done()
    FakeJob(redis_url, uid="uid-2")
    client = await waiting
    assert "uid-2" == client.job.uid
    await client.close()


async def test_a_server_of_a_job_that_has_ended_ends_as_well(redis_url: str, job: FakeJob) -> None:
    job.set_state("closed", "")
    with pytest.raises(JobEndedError, match="is closed"):
        await RequestClient.wait_for_job(redis_url, uid=job.uid)


async def test_answered_requests_leave_room_before_the_next_status(redis_url: str) -> None:
    job = FakeJob(redis_url, max_rollouts=4)
    job.publish_status()

    with job.serving():
        async with connected(redis_url, job) as client:
            for number in range(20):
                prepared = client.prepare(PROMPT, request_id=f"r{number}")
                await client.receive(prepared, may_be_answered=False, may_wait=False)


@pytest.mark.parametrize("blocked_client", ["requests", "trainer"])
async def test_rollouts_that_cannot_start_leave_room_for_others(redis_url: str, blocked_client: str) -> None:
    """They wait for weights that nobody publishes, or belong to a client that reads no results."""
    job = FakeJob(redis_url, max_rollouts=4)
    async with connected(redis_url, job) as client:
        blocked = [client.prepare(PROMPT, request_id=f"blocked{number}") for number in range(2)]
        waiting = []
        if blocked_client == "requests":
            waiting = [
                asyncio.ensure_future(client.receive(one, may_be_answered=False, may_wait=False)) for one in blocked
            ]
            await wait_for_async(lambda: len(job.requests()) == 2)
        job.publish_status(waiting=4, blocked={})
        await wait_for_async(lambda: client.status.get("waiting") == 4)
        refused = client.prepare(PROMPT, request_id="refused")
        with pytest.raises(JobFullError):
            await client.receive(refused, may_be_answered=False, may_wait=False)
        job.publish_status(waiting=4, blocked={blocked_client: 4})
        await wait_for_async(lambda: client.status.get("blocked"))
        prepared = client.prepare(PROMPT, request_id="later")
        received = asyncio.ensure_future(client.receive(prepared, may_be_answered=False, may_wait=False))
        await wait_for_async(lambda: len(job.requests()) == len(waiting) + 1)
        await cancel_and_wait(received, *waiting)


async def test_the_rollouts_of_a_request_are_ordered_by_sample(redis_url: str, job: FakeJob) -> None:
    def answer_backwards(request: RolloutRequest) -> None:
        job.answer(request, [1])
        job.answer(request, [0])

    with job.serving(answer_backwards):
        async with connected(redis_url, job) as client:
            rollouts = await client.rollouts(PROMPT, request_id="a")
    assert [[1] * 3, [2] * 3] == [rollout.token_ids for rollout in rollouts]
    assert 0 < job.redis.ttl(job.keys.results(rollouts[0].rollout_id.split("/")[1])) <= 600


async def test_repeated_requests_get_the_same_rollouts_in_every_process(redis_url: str, job: FakeJob) -> None:
    with job.serving():
        async with connected(redis_url, job) as first, connected(redis_url, job) as second:
            at_once = await asyncio.gather(*(client.rollouts(PROMPT, request_id="a") for client in [first, second] * 3))
            found = [*at_once, await second.rollouts(PROMPT, request_id="a")]
    assert 2 == len(job.sampled)
    assert [sorted(job.sampled)] * 7 == [ids(rollouts) for rollouts in found]


async def test_other_prompts_and_calls_without_an_id_are_sampled_separately(redis_url: str, job: FakeJob) -> None:
    with job.serving():
        async with connected(redis_url, job) as client:
            found = [
                await client.rollouts(PROMPT, request_id="a"),
                await client.rollouts(Prompt([4]), request_id="a"),
                await client.rollouts(PROMPT),
                await client.rollouts(PROMPT),
            ]
    assert 8 == len(job.sampled) == len({name for rollouts in found for name in ids(rollouts)})


def test_a_process_that_ends_leaves_its_request_to_the_next_one(redis_url: str, job: FakeJob) -> None:
    async def give_up() -> None:
        async with connected(redis_url, job) as client:
            task = asyncio.ensure_future(client.rollouts(PROMPT, request_id="a"))
            await wait_for_async(lambda: bool(job.requests()))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert [] == job.control_messages()

    async def sample() -> list[Rollout]:
        async with connected(redis_url, job) as client:
            return await client.rollouts(PROMPT, request_id="a")

    run(give_up())
    job.answer(job.requests()[0])
    with job.serving():
        assert sorted(job.sampled) == ids(run(sample()))
    assert 2 == len(job.sampled)


async def test_a_request_without_an_id_is_cancelled_with_its_call(redis_url: str, job: FakeJob) -> None:
    async with connected(redis_url, job) as client:
        task = asyncio.ensure_future(client.rollouts(PROMPT))
        await wait_for_async(lambda: bool(job.requests()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_for_async(lambda: bool(job.control_messages()))
    [cancellation] = job.control_messages()
    assert [job.requests()[0].request_id] == getattr(cancellation, "request_ids", None)


def test_a_cancelled_call_does_not_cancel_another_one_for_the_same_request(redis_url: str, job: FakeJob) -> None:
    async def sample() -> list[Rollout]:
        async with connected(redis_url, job) as client:
            first, second = (asyncio.ensure_future(client.rollouts(PROMPT, request_id="a")) for _ in range(2))
            await wait_for_async(lambda: bool(job.requests()))
            first.cancel()
            await asyncio.sleep(0.1)
            job.answer(job.requests()[0])
            return await second

    assert 2 == len(run(sample()))


async def test_rollouts_that_are_no_longer_kept_are_an_error(redis_url: str, job: FakeJob) -> None:
    with job.serving():
        async with connected(redis_url, job) as client:
            [first, _] = await client.rollouts(PROMPT, request_id="a")
            job.redis.delete(job.keys.results(first.rollout_id.split("/")[1]))
            with pytest.raises(RequestRefusedError, match="it was answered before"):
                await client.rollouts(PROMPT, request_id="a")
    assert 2 == len(job.sampled)


def test_updates_that_were_trimmed_are_found_by_the_check(
    redis_url: str, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_reader, "_CHECK_INTERVAL_S", 0.5)

    def answer_silently(request: RolloutRequest) -> None:
        for sample in range(2):
            job.sampled.append(str(request.rollout_id(sample)))
            job.redis.hset(job.keys.results(request.request_id), str(sample), encode(job.make_rollout(request, sample)))
        job.delete_request(request)

    async def sample() -> list[Rollout]:
        async with connected(redis_url, job) as client:
            return await client.rollouts(PROMPT)

    with job.serving(answer_silently):
        assert 2 == len(run(sample()))


def test_requests_that_redis_lost_while_results_were_read_are_sent_again(
    redis_url: str, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = PipelinedRedis.execute_all
    broken: list[int] = []

    async def break_once(self: PipelinedRedis, commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        if any(args[0] == "HMGET" and args[1].startswith(job.keys.results("")) for args, _ in commands) and not broken:
            broken.append(1)
            job.redis.delete(job.keys.requests)
            raise redis.ConnectionError("the server was restarted")
        return await execute(self, commands)

    async def sample() -> list[Rollout]:
        async with connected(redis_url, job) as client:
            tasks = asyncio.gather(client.rollouts(PROMPT), client.rollouts(PROMPT))
            await wait_for_async(lambda: len(job.requests()) == 2)
            first, second = job.requests()
            job.answer(first)
            await wait_for_async(lambda: broken and second.request_id in [each.request_id for each in job.requests()])
            job.answer(second)
            return [rollout for rollouts in await tasks for rollout in rollouts]

    monkeypatch.setattr(PipelinedRedis, "execute_all", break_once)
    assert 4 == len(run(sample()))


def test_invalid_prompts_and_jobs_are_errors(redis_url: str, job: FakeJob) -> None:
    async def sample(prompt: Prompt) -> None:
        async with connected(redis_url, job) as client:
            await client.rollouts(prompt, request_id="a")

    with pytest.raises(InvalidRequestError, match="request a: no token ids"):
        run(sample(Prompt([])))
    with pytest.raises(RolloutClientError, match="not connected yet"):
        run(RequestClient.connect(redis_url, job.name).rollouts(PROMPT))
    with pytest.raises(InvalidRequestError, match="either the name of the job"):
        RequestClient.connect(redis_url)


async def test_closing_the_client_ends_calls_that_wait(redis_url: str, job: FakeJob) -> None:
    client = await RequestClient.connect(redis_url, job.name).open()
    waiting = asyncio.ensure_future(client.rollouts(PROMPT, request_id="a"))
    await wait_for_async(lambda: bool(job.requests()))
    await client.close()
    for call in (waiting, client.rollouts(PROMPT), client.open()):
        with pytest.raises(RolloutClientError, match="the client is closed; connect another one"):
            await call


async def test_an_update_that_cannot_be_read_does_not_end_the_receiver(redis_url: str, job: FakeJob) -> None:
    async with connected(redis_url, job) as client:
        call = asyncio.ensure_future(client.rollouts(PROMPT, request_id="a"))
        await wait_for_async(lambda: bool(job.requests()))
        job.redis.xadd(job.keys.result_updates("requests"), {"unknown": b""})
        with pytest.raises(RolloutClientError, match="receiving rollouts failed: KeyError"):
            await call
        job.answer(job.requests()[0])
        assert 2 == len(await client.rollouts(PROMPT, request_id="a"))
