"""Clients that send parts of requests, or more than a request may have, before anything can look for a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from rollout_server import http_protocol
from rollout_server.http_protocol import LimitedProtocol

LIMIT = 20
"""Number of connections of the server."""
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


KEEP_ALIVE_S = 1
"""Seconds after which the server closes idle connections."""

started: list[None] = []
"""One element for each request for /blocked."""
released = asyncio.Event()
"""Set when these requests may be answered."""


async def read_and_answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request after its body, at once if its path is /early, or once :data:`released` if it is /blocked."""
    assert scope["type"] == "http"
    if scope["path"] == "/blocked":
        started.append(None)
        await released.wait()
    while scope["path"] != "/early" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def running() -> AsyncIterator[int]:
    """Run a server, and return its port."""
    config = uvicorn.Config(
        read_and_answer,
        port=0,
        http=LimitedProtocol.with_limit(LIMIT),
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="off",
        log_level="error",
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    await task


async def is_answered(port: int) -> bool:
    async with httpx.AsyncClient(timeout=5) as client:
        return (await client.post(f"http://127.0.0.1:{port}/", content=b"x" * 2**20)).text == "ok"


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the server has closed a connection, possibly after an answer."""
    try:
        await asyncio.wait_for(reader.read(), 0.5)
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (HEAD + b"X: ", b"a" * 1024),
        (HEAD, b"X: a\r\n" * 100),
        (b"GET /", b"a" * 1024),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ", b"a" * 1024),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 1024),
    ],
    ids=["one header", "many headers", "path", "trailer", "chunk extension"],
)
async def test_endless_headers_end_the_connection(start: bytes, part: bytes) -> None:
    async with running() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        sent = 0
        try:
            while not reader.at_eof() and sent < 2**22:
                writer.write(part)
                sent += len(part)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert sent < 2**20
        assert await is_answered(port)


async def test_unfinished_headers_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.3)
    async with running() as port:
        slow, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        complete, second = await asyncio.open_connection("127.0.0.1", port)
        second.write(HEAD + b"Content-Length: 4\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(slow.readexactly(1), 5)
        second.write(b"body")  # a body may take longer
        assert b"200 OK" in await asyncio.wait_for(complete.readline(), 5)
        second.write(HEAD)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(complete.readexactly(10_000), 5)


async def test_a_connection_may_be_made_before_there_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.1)
    async with running() as port:
        early, writer = await asyncio.open_connection("127.0.0.1", port)
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.3)
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(early.readline(), 5)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(silent.readexactly(1), 5)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        HEAD,
        HEAD + b"Content-Length: 9\r\n\r\n",
        HEAD + b"Content-Length: 0\r\n\r\n",
        HEAD.replace(b"/", b"/early", 1) + b"Content-Length: 9\r\n\r\na",
    ],
    ids=["silent", "headers", "body", "idle", "refused"],
)
async def test_waiting_connections_make_room(start: bytes) -> None:
    async with running() as port:
        connections = []
        for _ in range(3 * LIMIT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            connections.append((reader, writer))
        await asyncio.sleep(0.2)
        assert await is_answered(port)
        closed = sum(await asyncio.gather(*(is_closed(reader) for reader, _ in connections)))
        assert 2 * LIMIT <= closed <= 2 * LIMIT + 1


async def test_requests_in_progress_are_not_closed(caplog: pytest.LogCaptureFixture) -> None:
    started.clear()
    released.clear()
    limits = httpx.Limits(max_connections=None)
    async with running() as port, httpx.AsyncClient(timeout=10, limits=limits) as client:
        requests = [asyncio.create_task(client.post(f"http://127.0.0.1:{port}/blocked")) for _ in range(LIMIT)]
        while len(started) < LIMIT:
            await asyncio.sleep(0.01)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * LIMIT)]
        for reader, _ in silent:
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in answer
        refused = await client.post(f"http://127.0.0.1:{port}/", content=b"x" * 2**20)
        assert 503 == refused.status_code
        released.set()
        assert ["ok"] * LIMIT == [reply.text for reply in await asyncio.gather(*requests)]
    assert 1 == sum("requests in progress" in record.message for record in caplog.records)
