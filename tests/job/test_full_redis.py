"""A job whose Redis server is full for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_head.dataset.problems import EnvironmentResults
from rollout_store.job.launcher import LauncherStore
from rollout_tools.launch.local import _check_redis
from tests.support.waiting import wait_for_async


@contextmanager
def full(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


@pytest.fixture
def job_store(client: redis.Redis) -> LauncherStore:
    return LauncherStore(client, MessageKeys("uid"))


async def test_a_run_waits_while_its_server_is_full(
    redis_url: str, client: redis.Redis, job_store: LauncherStore
) -> None:
    told: list[str] = []
    checking = asyncio.create_task(_check_redis(job_store, redis_url, told.append))
    try:
        with full(client):
            await wait_for_async(lambda: told)
            await asyncio.sleep(1)
            assert not checking.done()
        await wait_for_async(lambda: len(told) > 1)
    finally:
        checking.cancel()
    waits, continues = told
    assert "The job waits" in waits
    assert "raise maxmemory" in waits
    assert "continues" in continues


async def test_a_run_also_waits_if_its_server_is_full_when_a_transaction_is_executed(
    redis_url: str, client: redis.Redis
) -> None:
    class StoreInTransaction(LauncherStore):
        def check_writable(self) -> None:
            raise redis.exceptions.ExecAbortError("Transaction discarded because of: OOM command not allowed")

    told: list[str] = []
    checking = asyncio.create_task(_check_redis(StoreInTransaction(client, MessageKeys("uid")), redis_url, told.append))
    await wait_for_async(lambda: told)
    checking.cancel()
    assert "The job waits" in told[0]


async def test_results_of_an_environment_are_stored_once_there_is_memory(
    client: redis.Redis, job_store: LauncherStore
) -> None:
    with full(client):
        storing = asyncio.create_task(EnvironmentResults(job_store).record_trajectories({"a": {"reward": 1.0}}, {}))
        await asyncio.sleep(0.5)
        assert not storing.done()
    await storing
    assert {"a": {"reward": 1.0}} == job_store.environment_results()
