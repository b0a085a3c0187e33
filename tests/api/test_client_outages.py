"""Lost replies, lost data, unreachable and full servers, and full jobs."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio

from rollout_api import (
    AsyncRolloutClient,
    Cancel,
    FinishReason,
    Prompt,
    RedisRefusedError,
    RedisUnreachableError,
    RolloutClient,
)
from rollout_api.client import job_state
from rollout_api.protocol.access_rules import access_rules
from rollout_api.redis_client import retry
from rollout_api.redis_client.pipelined import PipelinedRedis
from rollout_api.redis_client.server_functions import load
from tests.support.client_tests import PROMPTS, num_results
from tests.support.fake_job import FakeJob
from tests.support.redis_servers import Server, create_user
from tests.support.waiting import wait_for


def test_request_whose_reply_was_lost_is_sampled_once(
    client: RolloutClient, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after Redis has executed the command."""
    execute = PipelinedRedis.execute_all
    broken: list[int] = []

    async def break_once(self: PipelinedRedis, commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        replies = await execute(self, commands)
        if any(args[0] == "XADD" for args, _ in commands) and not broken:
            broken.append(1)
            raise redis.ConnectionError("the reply was lost")
        return replies

    monkeypatch.setattr(PipelinedRedis, "execute_all", break_once)
    with client.step(0, PROMPTS) as step:
        wait_for(lambda: len(job.requests()) == 6)
        with job.serving():
            assert 6 == len(list(step))
    assert 6 == len(job.sampled)


def test_updates_whose_reply_was_lost_are_made_up_for(
    client: RolloutClient, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = redis.asyncio.Redis.xread
    broken: list[int] = []

    async def break_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = await read(self, *args, **kwargs)
        if reply and not broken:
            broken.append(len(reply[0][1]))
            raise redis.ConnectionError("the reply was lost")
        return reply

    monkeypatch.setattr(redis.asyncio.Redis, "xread", break_once)
    with job.serving():
        assert [2, 2, 2] == [len(group) for group in client.generate(PROMPTS, step=0)]
    assert broken[0] > 0


def test_updates_that_were_trimmed_are_made_up_for(client: RolloutClient, job: FakeJob) -> None:
    with client.step(0, PROMPTS) as step:
        *others, last = job.wait_for_requests(3)
        for request in others:
            job.answer(request, announced=False)
        job.answer(last)
        assert 6 == len(list(step))


@pytest.fixture
def stoppable_redis(tmp_path: Path) -> Iterator[Server]:
    """A Redis server that the test may stop, and that keeps its data."""
    with Server(tmp_path, appendonly=True, password="secret") as server:
        yield server


@contextmanager
def http_server(url: str) -> Iterator[None]:
    """Run an HTTP server at the address of a Redis that is down, as a proxy for a service without servers does."""
    received: list[bytes] = []

    class BadRequestHandler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            received.append(self.rfile.readline())
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    class HttpServer(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    with HttpServer((urlsplit(url).hostname or "", urlsplit(url).port or 0), BadRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        wait_for(lambda: bool(received))
        server.shutdown()


@pytest.mark.parametrize("during_outage", [lambda _: nullcontext(), http_server])
def test_client_waits_for_a_restart_of_redis(
    stoppable_redis: Server,
    caplog: pytest.LogCaptureFixture,
    during_outage: Callable[[str], AbstractContextManager[None]],
) -> None:
    url = stoppable_redis.url
    job = FakeJob(url)
    with RolloutClient.connect(url, job.name, reconnect_timeout=20) as client, client.step(3, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        job.answer(requests[0])
        rollouts = [next(iter(step))]
        stoppable_redis.kill()
        with during_outage(url):
            wait_for(lambda: "does not answer" in caplog.text)
        stoppable_redis.start()
        with job.serving():
            rollouts += step
    assert 6 == len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    assert 6 == len(job.sampled)


def test_requests_that_redis_lost_are_sent_again(stoppable_redis: Server) -> None:
    """An append-only file that is synced once a second may lose the last requests."""
    url = stoppable_redis.url
    job = FakeJob(url)
    with RolloutClient.connect(url, job.name, reconnect_timeout=20) as client, client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(job.keys.requests)
        stoppable_redis.kill()
        stoppable_redis.start()
        with job.serving():
            assert 6 == len(list(step))


def test_lost_requests_are_sent_again_to_a_job_at_capacity(redis_url: str) -> None:
    job = FakeJob(redis_url, max_rollouts=6)
    with RolloutClient.connect(redis_url, job.name) as client, client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(job.keys.requests)
        job.break_connections()
        job.wait_for_requests(3)
        with job.serving():
            assert 6 == len(list(step))


def test_lost_requests_of_a_cancelled_step_are_sent_again(client: RolloutClient, job: FakeJob) -> None:
    """The job could not cancel requests that it does not know, and would never answer."""
    with client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        step.cancel()
        job.redis.delete(job.keys.requests, job.keys.control)
        job.break_connections()
        job.wait_for_requests(3)
        with job.serving(lambda request: None):
            assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in step}


def test_long_outage_is_an_error_and_the_step_can_be_opened_again(stoppable_redis: Server) -> None:
    url = stoppable_redis.url
    job = FakeJob(url)
    with RolloutClient.connect(url, job.name, reconnect_timeout=1.0) as client:
        with (
            pytest.raises(RedisUnreachableError, match=r"has been unreachable for .* Is it running"),
            client.step(3, PROMPTS) as step,
        ):
            job.wait_for_requests(3)
            stoppable_redis.kill()
            list(step)
        stoppable_redis.start()
        with job.serving():
            assert [2, 2, 2] == [len(group) for group in client.generate(PROMPTS, step=3)]


def num_unread_bytes(job: FakeJob, client: str = "trainer") -> int:
    """Return how many bytes of its results a client has not read, as it has told the job."""
    written, read = (job.redis.hget(key, client) for key in (job.keys.results_written, job.keys.results_read))
    return int(written or 0) - int(read or 0)


def test_many_results_are_released(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        groups = client.generate([[i % 900 + 1, i // 900] for i in range(1200)], step=1, n=2)
    assert 2400 == sum(map(len, groups))
    assert 0 == num_results(job)


async def test_results_stay_in_redis_until_they_are_taken(redis_url: str, job: FakeJob) -> None:
    count = 300

    async with (
        AsyncRolloutClient.connect(redis_url, job.name) as client,
        client.step(0, [Prompt([index + 1], sampling={"n": 1}) for index in range(count)]) as step,
    ):
        requests = await asyncio.to_thread(job.wait_for_requests, count)
        for request in requests:
            job.answer(request)
        written = int(job.redis.hget(job.keys.results_written, "trainer") or 0)
        await asyncio.to_thread(wait_for, lambda: num_unread_bytes(job) == written)
        noticed = job.keys.results_noticed
        await asyncio.to_thread(wait_for, lambda: written == int(job.redis.hget(noticed, "trainer") or 0))
        job.redis.delete(noticed)  # as if Redis had lost the report in a crash
        job.break_connections()
        await asyncio.to_thread(wait_for, lambda: written == int(job.redis.hget(noticed, "trainer") or 0))
        [first] = await step.take(1) or []
        await asyncio.to_thread(wait_for, lambda: 0 < num_unread_bytes(job) < written)
        others = [rollout async for rollout in step]
        assert count == len({first.rollout_id, *(rollout.rollout_id for rollout in others)})
        await asyncio.to_thread(wait_for, lambda: num_unread_bytes(job) == 0)
        assert count == num_results(job)
    assert 0 == num_results(job)


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


async def test_unread_step_does_not_block_another(redis_url: str, job: FakeJob) -> None:
    async with AsyncRolloutClient.connect(redis_url, job.name) as client:
        unread = await client.step(0, [Prompt([1], sampling={"n": 1000})]).start()
        async with client.step(1, [[2]]) as step:
            requests = await asyncio.to_thread(job.wait_for_requests, 2)
            await asyncio.to_thread(job.answer, requests[0])
            job.answer(requests[1])
            assert 2 == len([rollout async for rollout in step])
        assert 1000 == len({rollout.rollout_id async for rollout in unread})
        await unread.end()
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


def test_client_waits_for_functions_that_the_server_has_lost(
    redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = create_user(redis_url, access_rules("default", "math", job.uid, "math"))
    with RolloutClient.connect(url, job.name) as client, job.serving():
        loading = threading.Timer(1.0, load, [job.redis])
        with client.step(0, PROMPTS) as step:
            assert 6 == len(list(step))
            job.redis.function_flush()
            loading.start()
        assert "Function not found: rollout_release_" in caplog.text
        assert 0 == num_results(job)
        loading.join()

        monkeypatch.setattr(retry, "MAX_REFUSAL_S", 0.5)
        with (
            pytest.raises(RedisRefusedError, match=r"rollout_release_\w+\. rollout-redis-users .* loads it"),
            client.step(1, PROMPTS) as step,
        ):
            assert 6 == len(list(step))
            job.redis.function_flush()


async def test_step_can_end_while_redis_is_full(redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture) -> None:
    """Releasing results is what frees memory."""

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
    cancelled = [set(cancel.request_ids) for cancel in job.control_messages() if isinstance(cancel, Cancel)]
    assert [3, 2] == [len(ids) for ids in cancelled]
    assert cancelled[1] == {request.request_id for request in job.requests()}


async def test_step_can_be_cancelled_while_redis_is_full(redis_url: str, job: FakeJob) -> None:
    with job.out_of_memory():
        async with AsyncRolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
            await step.cancel()
            assert [] == [rollout async for rollout in step]
    assert [] == job.requests()


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
