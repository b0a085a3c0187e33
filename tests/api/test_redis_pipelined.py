"""Commands that are executed at the same time share a round trip and keep their own replies and errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio
import uvloop

from rollout_api.ports import free_port
from rollout_api.redis_client.connection import connect_async
from tests.support.redis_servers import Server
from tests.support.tcp_proxy import Proxy


async def num_connections(client: redis.asyncio.Redis) -> int:
    connections: Any = await client.client_list()
    return len(connections)


async def test_concurrent_commands_use_one_connection(redis_url: str) -> None:
    async with connect_async(redis_url) as client:
        before = await num_connections(client)
        await asyncio.gather(*(client.set(f"key-{number}", number) for number in range(1000)))
        values = await asyncio.gather(*(client.get(f"key-{number}") for number in range(1000)))
        assert [str(number).encode() for number in range(1000)] == values
        assert before == await num_connections(client)


async def test_error_of_a_command_concerns_no_other(redis_url: str) -> None:
    async with connect_async(redis_url) as client:
        await client.set("text", "x")
        first, second, third = await asyncio.gather(
            client.get("text"), client.incr("text"), client.strlen("text"), return_exceptions=True
        )
        assert (b"x", 1) == (first, third)
        assert isinstance(second, redis.ResponseError)


async def test_blocking_command_delays_no_other(redis_url: str) -> None:
    async with connect_async(redis_url, block=5) as client:
        reading = asyncio.ensure_future(client.xread({"stream": "0"}, block=5000))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(client.set("key", 1), 1)
        await asyncio.wait_for(client.xadd("stream", {"a": "b"}), 1)
        assert await asyncio.wait_for(reading, 1)


async def test_cancelled_command_that_waits_is_not_sent(redis_url: str) -> None:
    async with connect_async(redis_url) as client:
        sent = [asyncio.ensure_future(client.set("a", 1)), asyncio.ensure_future(client.set("b", 1))]
        await asyncio.sleep(0)
        sent[1].cancel()
        await sent[0]
        assert (b"1", None) == (await client.get("a"), await client.get("b"))


async def test_commands_succeed_after_a_restart(tmp_path: Any) -> None:
    with Server(tmp_path) as server:
        async with connect_async(f"redis://127.0.0.1:{server.port}") as client:
            await client.set("key", 1)
            server.kill()
            with pytest.raises(redis.ConnectionError):
                await client.get("key")
            server.start()
            assert [None, None] == await asyncio.gather(client.get("key"), client.get("key"))


async def test_each_command_of_a_batch_has_its_own_reply(redis_url: str) -> None:
    async with connect_async(redis_url) as client:
        batch = client.pipeline(transaction=False)
        batch.set("text", "x").incr("text").strlen("text")
        replies = await batch.execute(raise_on_error=False)
        assert (True, 1) == (replies[0], replies[2])
        assert isinstance(replies[1], redis.ResponseError)
        batch.incr("text")
        with pytest.raises(redis.ResponseError):
            await batch.execute()
        assert [] == await batch.execute()


async def test_cancelled_blocking_command_takes_no_reply_of_another(redis_url: str) -> None:
    async with connect_async(redis_url, block=5) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.xread({"first": "0"}, block=5000), 0.1)
        reading = asyncio.ensure_future(client.xread({"second": "0"}, block=5000))
        await asyncio.sleep(0.05)
        await client.xadd("first", {"a": "b"})
        await client.xadd("second", {"c": "d"})
        [[stream, [[_, fields]]]] = await reading
        assert (b"second", {b"c": b"d"}) == (stream, fields)


async def test_commands_wait_while_the_server_is_slow_to_read(redis_url: str) -> None:
    async with connect_async(redis_url) as client:
        values = [bytes([number]) * (1 << 20) for number in range(64)]
        await asyncio.gather(*(client.set(f"key-{number}", value) for number, value in enumerate(values)))
        assert values == await asyncio.gather(*(client.get(f"key-{number}") for number in range(64)))


async def test_server_that_stops_replying_is_given_up(tmp_path: Any) -> None:
    with Server(tmp_path) as server:
        async with connect_async(f"redis://127.0.0.1:{server.port}?socket_timeout=0.5") as client:
            await client.set("key", 1)
            server.pause()
            started = time.monotonic()
            with pytest.raises(redis.TimeoutError):
                await client.get("key")
            assert 0.5 < time.monotonic() - started < 5
            server.resume()
            assert b"1" == await client.get("key")


async def test_server_that_became_a_replica_is_left(tmp_path: Any) -> None:
    with Server(tmp_path) as server:
        async with connect_async(f"redis://127.0.0.1:{server.port}") as client:
            connection = await client.client_id()
            await client.replicaof("127.0.0.1", str(free_port()))
            with pytest.raises(redis.exceptions.ReadOnlyError):
                await client.set("key", 1)
            await client.replicaof("NO", "ONE")
            await client.set("key", 1)
            assert connection != await client.client_id()


async def test_replies_to_earlier_commands_are_awaited_when_the_server_became_a_replica() -> None:
    """A command that is sent in the same iteration of the event loop as the server's refusal arrives."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while chunk := await reader.read(1 << 16):
            received += chunk
            if received.count(b"CLIENT"):
                writer.write(b"+OK\r\n" * received.count(b"CLIENT"))
                received = b""
            if b"slow" in received:
                writer.write(b"-READONLY You can't write against a read only replica.\r\n")
                await asyncio.sleep(0.2)
                writer.write(b"+slow\r\n")
                received = b""

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connect_async(f"redis://127.0.0.1:{port}") as client:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        refused = asyncio.ensure_future(client.execute_command(b"REFUSED"))
        slow = asyncio.ensure_future(client.execute_command(b"slow"))
        with pytest.raises(redis.exceptions.ReadOnlyError):
            await refused
        connection = client._shared  # type: ignore[attr-defined]
        late = connection.send(b"late")
        with pytest.raises(redis.ConnectionError):
            await late
        assert b"slow" == await asyncio.wait_for(slow, 2)
        assert [] == errors


async def test_commands_fail_once_the_client_is_closed(redis_url: str) -> None:
    client = connect_async(redis_url)
    waiting = asyncio.ensure_future(client.get("key"))
    await asyncio.sleep(0)
    await client.aclose()
    for command in (waiting, client.get("key")):
        with pytest.raises(redis.ConnectionError):
            await command


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_that_are_cut_at_any_moment_raise_errors_of_redis(
    redis_url: str, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    proxy = Proxy(urlsplit(redis_url).port or 0)
    failures: list[Exception] = []

    async def use(client: redis.asyncio.Redis) -> None:
        for number in range(60):
            try:
                if number % 3:
                    await client.set("key", "x" * 10_000)
                else:
                    async with client.pipeline(transaction=True) as pipeline:
                        pipeline.set("key", "x")
                        await pipeline.execute()
            except Exception as error:
                failures.append(error)
            if number % 2:
                proxy.drop()

    async def use_concurrently() -> None:
        async with connect_async(f"redis://127.0.0.1:{proxy.port}") as client:
            await asyncio.gather(*(use(client) for _ in range(6)))

    try:
        run(use_concurrently())
    finally:
        proxy.close()
    assert proxy.dropped
    assert [] == [error for error in failures if not isinstance(error, redis.RedisError)]
