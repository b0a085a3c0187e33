"""A trainer's connection through Sentinels: it outlives a failover, and takes over a client of theirs."""

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

from rollout_api.errors import InvalidRequestError, RedisAwayError
from rollout_api.redis_client.connection import RedisTarget, RetryPolicy, address, connection_to
from tests.support.redis_servers import Certificates, Sentinels, free_port


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with Sentinels(tmp_path, password="data", sentinel_password="watch") as running:
        yield running


async def written_over_a_failover(target: RedisTarget, running: Sentinels) -> list[bytes]:
    client: Any = connection_to(target)
    patience = RetryPolicy(address(client), 30)
    try:
        await patience.of(lambda: client.set("before", 1), what="write")
        assert 1 == await client.wait(1, 5000)
        dead = asyncio.create_task(asyncio.to_thread(running.fail_over))
        while not dead.done():
            await patience.of(lambda: client.set("during", 1), what="write")
            await asyncio.sleep(0.02)
        await dead
        await patience.of(lambda: client.set("after", 1), what="write")
        found: list[bytes] = await client.mget("before", "after")
        return found
    finally:
        await client.aclose()


def test_a_connection_by_url_outlives_a_failover(sentinels: Sentinels) -> None:
    assert [b"1", b"1"] == asyncio.run(written_over_a_failover(sentinels.url, sentinels))


@pytest.mark.parametrize("kind", [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel])
def test_a_client_of_sentinels_is_taken_over(sentinels: Sentinels, kind: type) -> None:
    theirs = kind(
        [("127.0.0.1", one.port) for one in sentinels.sentinels], sentinel_kwargs={"password": "watch"}, password="data"
    )
    client = theirs.master_for(sentinels.SERVICE, decode_responses=True, socket_timeout=0.1)
    assert [b"1", b"1"] == asyncio.run(written_over_a_failover(client, sentinels))


def test_a_client_of_replicas_is_refused() -> None:
    theirs = redis.sentinel.Sentinel([("127.0.0.1", free_port())])
    with pytest.raises(InvalidRequestError, match="master_for"):
        connection_to(theirs.slave_for("mymaster"))


def test_sentinels_that_are_silent_are_given_up_soon_and_named() -> None:
    ports = [free_port() for _ in range(3)]
    client = connection_to(f"redis+sentinel://:secret@{','.join(f'127.0.0.1:{port}' for port in ports)}/main")

    async def ask() -> None:
        await RetryPolicy(address(client), 1).of(client.ping, what="ask")

    began = time.monotonic()
    with pytest.raises(RedisAwayError, match=f"main, whose Sentinels are 127.0.0.1:{ports[0]},") as caught:
        asyncio.run(ask())
    assert time.monotonic() - began < 5
    assert "secret" not in str(caught.value)


def test_sentinels_are_found_in_tls(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "tls")

    async def write(url: str) -> Any:
        client = connection_to(url)
        try:
            return await client.set("key", 1)
        finally:
            await client.aclose()

    with Sentinels(tmp_path / "servers", sentinels=1, certificates=certificates) as running:
        assert asyncio.run(write(running.url))
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            asyncio.run(write(running.url.partition("?")[0]))


def test_a_cluster_is_no_place_for_messages() -> None:
    with pytest.raises(InvalidRequestError, match="messages are on one server"):
        connection_to("redis+cluster://:secret@a,b")
