"""Ending a job whose head does not do so: finished rollouts are kept, clients are told, and messages are removed."""

from __future__ import annotations

import asyncio

import pytest
import redis

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.errors import JobEndedError
from rollout_api.protocol.keys import job_uid_key
from rollout_api.protocol.messages import encode
from rollout_api.redis_client.connection import connect
from rollout_head.ending import EndState, end_job
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_store.job.part import JOB_RETENTION_S
from tests.support.job_messages import HISTORY, JOB, request, rollout

NAME = "default/math"


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    """A server with a job that has a finished rollout in its outbox, and with a key of another job."""
    client = connect(redis_url)
    history(client).metadata.open("tokenizer")
    sampling = '{"n": 1, "max_tokens": 4}'
    description = {
        "version": 1,
        "model": "m",
        "vocabulary": 9,
        "sampling": sampling,
        "max_model_len": 9,
        "history": "h",
    }
    client.hset(JOB.job, mapping=description | {"max_request_bytes": 9999, "max_rollouts": 9, "state": "running"})
    client.set(job_uid_key(NAME), JOB.uid)
    client.xadd(JOB.outbox, {"d": encode(rollout(request(), 0))})
    for number in range(1200):
        client.set(JOB.ledger(f"r{number}"), "x")
    client.set("rollout:{other}:job", "theirs")
    return client


def history(server: redis.Redis) -> HistoryStore:
    return HistoryStore(server, HISTORY, window=16)


def end(server: redis.Redis, state: EndState, reason: str = "deleted") -> int:
    return end_job(server, JOB, history(server), NAME, state=state, reason=reason)


@pytest.mark.parametrize("state", ["failed", "deleted"])
def test_finished_rollouts_reach_the_history_and_clients_are_told_the_reason(
    server: redis.Redis, redis_url: str, state: EndState
) -> None:
    assert 1 == end(server, state, "out of quota")
    assert 1 == len(history(server).read({"p": START}, count=10)["p"].records)

    async def ask() -> None:
        async with (
            AsyncRolloutClient.connect(redis_url, uid=JOB.uid, name="late") as client,
            client.step(1, [[1]]) as step,
        ):
            assert not [rollout async for rollout in step]

    with pytest.raises(JobEndedError, match="out of quota"):
        asyncio.run(ask())


def test_a_deleted_history_is_not_created_again(server: redis.Redis) -> None:
    """A history that is created later with this name may belong to another tokenizer."""
    MaintenanceOperations(history(server)).delete_history()
    assert 0 == end(server, "deleted")
    assert [] == server.keys("history:*")


def test_messages_of_a_failed_job_expire_after_a_day(server: redis.Redis) -> None:
    end(server, "failed")
    keys = list(server.scan_iter(JOB.pattern()))
    assert len(keys) > 1200
    assert all(0 < server.ttl(key) <= JOB_RETENTION_S for key in keys)
    assert -1 == server.ttl("rollout:{other}:job")
    assert JOB.uid.encode() == server.get(job_uid_key(NAME))


def test_messages_of_a_deleted_job_are_deleted_at_once_and_its_name_is_released(server: redis.Redis) -> None:
    end(server, "deleted")
    assert [JOB.job.encode()] == list(server.scan_iter(JOB.pattern()))
    assert server.ttl(JOB.job) > 0
    assert server.get(job_uid_key(NAME)) is None
    assert b"theirs" == server.get("rollout:{other}:job")
    assert list(server.scan_iter("history:*"))  # a history outlives its jobs


def test_the_name_is_not_released_if_another_job_has_taken_it(server: redis.Redis) -> None:
    server.set(job_uid_key(NAME), "the-next")
    end(server, "deleted")
    assert b"the-next" == server.get(job_uid_key(NAME))


def test_ending_a_job_again_or_one_that_never_ran_has_no_effect(server: redis.Redis) -> None:
    for _ in range(2):
        end(server, "deleted")
    server.flushall()
    assert 0 == end(server, "failed")
    assert [] == list(server.scan_iter("*"))
