"""Lost replies, lost data and unreachable servers."""

from __future__ import annotations

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
    FinishReason,
    RedisUnreachableError,
    RolloutClient,
)
from rollout_api.redis_client.pipelined import PipelinedRedis
from tests.support.client_tests import PROMPTS
from tests.support.fake_job import FakeJob
from tests.support.redis_servers import Server
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
