"""A trainer's connection through Sentinels, by URL and from an existing client, during a failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from rollout_api.errors import InvalidRequestError, RedisUnreachableError
from rollout_api.ports import free_port
from rollout_api.redis_client.client_connection import RedisTarget, open_client, server_name
from rollout_api.redis_client.retry import ClientRetryPolicy
from tests.support.redis_servers import Certificates, Sentinels


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with Sentinels(tmp_path, password="data", sentinel_password="watch") as running:
        yield running


async def write_during_a_failover(target: RedisTarget, running: Sentinels) -> list[bytes]:
    """Write before, during and after a failover, and return what was written before and after it."""
    client: Any = open_client(target)
    policy = ClientRetryPolicy(server_name(client), 30)
    try:
        await policy.run(lambda: client.set("before", 1), action="write")
        assert 1 == await client.wait(1, 5000)
        failover = asyncio.create_task(asyncio.to_thread(running.fail_over))
        while not failover.done():
            await policy.run(lambda: client.set("during", 1), action="write")
            await asyncio.sleep(0.02)
        await failover
        await policy.run(lambda: client.set("after", 1), action="write")
        found: list[bytes] = await client.mget("before", "after")
        return found
    finally:
        await client.aclose()


def test_connection_by_url_survives_a_failover(sentinels: Sentinels) -> None:
    assert [b"1", b"1"] == asyncio.run(write_during_a_failover(sentinels.url, sentinels))


@pytest.mark.parametrize("kind", [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel])
def test_settings_of_a_sentinel_client_are_copied(sentinels: Sentinels, kind: type) -> None:
    manager = kind(
        [("127.0.0.1", sentinel.port) for sentinel in sentinels.sentinels],
        sentinel_kwargs={"password": "watch"},
        password="data",
    )
    client = manager.master_for(sentinels.SERVICE, decode_responses=True, socket_timeout=0.1)
    assert [b"1", b"1"] == asyncio.run(write_during_a_failover(client, sentinels))


def test_unreachable_sentinels_are_named_in_the_error() -> None:
    ports = [free_port() for _ in range(3)]
    client = open_client(f"redis+sentinel://:secret@{','.join(f'127.0.0.1:{port}' for port in ports)}/main")

    async def ping() -> None:
        await ClientRetryPolicy(server_name(client), 1).run(client.ping, action="ping")

    started = time.monotonic()
    with pytest.raises(RedisUnreachableError, match=f"main, whose Sentinels are 127.0.0.1:{ports[0]},") as caught:
        asyncio.run(ping())
    assert time.monotonic() - started < 5
    assert "secret" not in str(caught.value)


def test_sentinels_are_reached_with_tls(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "tls")

    async def write(url: str) -> Any:
        client = open_client(url)
        try:
            return await client.set("key", 1)
        finally:
            await client.aclose()

    with Sentinels(tmp_path / "servers", sentinels=1, certificates=certificates) as running:
        assert asyncio.run(write(running.url))
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            asyncio.run(write(running.url.partition("?")[0]))


def test_cluster_is_rejected_for_messages() -> None:
    with pytest.raises(InvalidRequestError, match="messages are on one server"):
        open_client("redis+cluster://:secret@a,b")
