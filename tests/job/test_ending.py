"""A job that its head does not end is ended in Redis: nothing finished is lost, clients are told, its keys go."""

from __future__ import annotations

import asyncio

import pytest
import redis

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.errors import JobEndedError
from rollout_api.protocol.keys import named
from rollout_api.protocol.messages import encode
from rollout_worker.history.connection import connect
from rollout_worker.history.store import START, HistoryStore
from rollout_worker.job.ending import End, end_job
from rollout_worker.job.job_store import KEPT_S
from tests.job.test_job_store import HISTORY, JOB, request, rollout

NAME = "default/math"


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    """A job with a finished rollout that no relay has carried, and somebody else's keys."""
    client = connect(redis_url)
    store(client).open("tokenizer")
    sampling = '{"n": 1, "max_tokens": 4}'
    about = {"version": 1, "model": "m", "vocabulary": 9, "sampling": sampling, "max_model_len": 9}
    client.hset(JOB.job, mapping=about | {"max_request_bytes": 9999, "max_rollouts": 9, "state": "running"})
    client.set(named(NAME), JOB.uid)
    asked = request()
    client.xadd(JOB.outbox, {"d": encode(rollout(asked, 0))})
    for number in range(1200):
        client.set(JOB.ledger(f"r{number}"), "x")
    client.set("rollout:{other}:job", "theirs")
    return client


def store(server: redis.Redis) -> HistoryStore:
    return HistoryStore(server, HISTORY, window=16)


@pytest.mark.parametrize("state", ["failed", "deleted"])
def test_what_was_finished_comes_into_the_history_and_clients_are_told(
    server: redis.Redis, redis_url: str, state: End
) -> None:
    assert 1 == end_job(server, JOB, store(server), NAME, state=state, reason="no luck")
    records = store(server).read({"p": START}, count=10)["p"].records
    assert 1 == len(records)

    async def ask() -> None:
        async with (
            AsyncRolloutClient.connect(redis_url, uid=JOB.uid, name="late") as client,
            client.step(1, [[1]]) as step,
        ):
            assert not [one async for one in step]

    with pytest.raises(JobEndedError, match="no luck"):
        asyncio.run(ask())


def test_nothing_comes_into_a_history_that_was_deleted(server: redis.Redis) -> None:
    """Whoever opens one of its name next, perhaps with another tokenizer, begins with nothing."""
    store(server).delete()
    assert 0 == end_job(server, JOB, store(server), NAME, state="deleted", reason="no luck")
    assert [] == server.keys("history:*")


def test_a_failed_jobs_messages_go_after_a_day(server: redis.Redis) -> None:
    end_job(server, JOB, store(server), NAME, state="failed", reason="no luck")
    keys = list(server.scan_iter(JOB.every()))
    assert len(keys) > 1200
    assert all(0 < server.ttl(key) <= KEPT_S for key in keys)
    assert -1 == server.ttl("rollout:{other}:job")
    assert JOB.uid.encode() == server.get(named(NAME))


def test_a_deleted_jobs_messages_go_at_once_and_its_name_is_free(server: redis.Redis) -> None:
    end_job(server, JOB, store(server), NAME, state="deleted", reason="deleted")
    assert [JOB.job.encode()] == list(server.scan_iter(JOB.every()))
    assert server.ttl(JOB.job) > 0
    assert server.get(named(NAME)) is None
    assert b"theirs" == server.get("rollout:{other}:job")
    assert list(server.scan_iter("history:*"))  # it outlives jobs


def test_the_name_of_a_job_that_came_after_it_stays(server: redis.Redis) -> None:
    server.set(named(NAME), "the-next")
    end_job(server, JOB, store(server), NAME, state="deleted", reason="deleted")
    assert b"the-next" == server.get(named(NAME))


def test_it_may_be_repeated_and_the_job_may_never_have_been_there(server: redis.Redis, redis_url: str) -> None:
    for _ in range(2):
        end_job(server, JOB, store(server), NAME, state="deleted", reason="deleted")
    server.flushall()
    assert 0 == end_job(server, JOB, store(server), NAME, state="failed", reason="never began")
    assert [] == list(server.scan_iter("*"))
