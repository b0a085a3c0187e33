"""Reading the status of heads, even if some do not answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from typing import Any

import aiohttp
import pytest
import yarl
from rollout_operator.cluster import head_status
from rollout_operator.cluster.head_status import HeadStatusReader
from rollout_operator.objects import names
from rollout_operator.objects.observed import EngineStatus, HeadStatus, PodView

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.status import BRIEF_ENGINE_FIELDS, EngineEntry, ServedStatus
from rollout_head.coordinator.status_server import StatusServer
from rollout_store.job import EngineReport
from rollout_store.runtime.engine_metrics import ENGINE_METRICS
from tests.support.job_status import job_status

_NETWORK = f"127.{1 + secrets.randbelow(254)}.{1 + secrets.randbelow(254)}"
"""A network of this machine. It is random, because the port of heads is fixed, and other test runs may use it."""
HEALTHY, SILENT = f"{_NETWORK}.1", f"{_NETWORK}.2"
"""Addresses of a head that answers at once, and of one that accepts connections but never answers."""


def head(ip: str, uid: str) -> PodView:
    return PodView.from_pod(
        {
            "metadata": {"name": uid, "uid": uid, "labels": {names.COMPONENT_LABEL: names.HEAD}},
            "spec": {"nodeName": "node"},
            "status": {"phase": "Running", "podIP": ip},
        }
    )


@asynccontextmanager
async def serving(ip: str, delay_s: float = 0.0, body: bytes = b'{"done": 7}', code: int = 200) -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(delay_s)
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (code, len(body)))
        with suppress(ConnectionError):  # the reader may have seen enough
            for start in range(0, len(body), 1 << 16):
                writer.write(body[start : start + (1 << 16)])
                await writer.drain()
                await asyncio.sleep(0)  # the reader, in the same event loop, reads what has arrived until here
        writer.close()

    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_server(accept, ip, names.HTTP_PORT)
    try:
        yield
    finally:
        server.close()
        await cancel_and_wait(*connections)


def ignore() -> None:
    pass


@pytest.mark.slow
async def test_heads_that_do_not_answer_hardly_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each were waited for until its request times out, this would take 48 s in each of the two rounds."""
    reader = HeadStatusReader()
    async with serving(HEALTHY, 0), serving(SILENT, 60):
        slots = asyncio.Semaphore(16)  # as many jobs as the operator reconciles at the same time

        async def read(pod: PodView) -> Any:
            async with slots:
                return await reader.read(pod, ignore)

        for number in range(2):
            async with asyncio.timeout(36):
                statuses = await asyncio.gather(*(read(head(SILENT, f"silent-{uid}")) for uid in range(256)))
                assert {None} == set(statuses)
                while (status := await read(head(HEALTHY, f"healthy-{number}"))) is None:
                    await asyncio.sleep(0.1)
            assert 7 == status.done
            await asyncio.gather(*reader._reads.values())
            # Those that did not answer are not waited for at all the next time.
            monkeypatch.setattr(head_status, "_MAX_WAIT_S", 60.0)
        await reader.close()


async def test_an_answer_that_arrives_late_is_announced_and_then_returned() -> None:
    reader, announced = HeadStatusReader(), asyncio.Event()
    async with serving(HEALTHY, 1):
        pod = head(HEALTHY, "slow")
        assert await reader.read(pod, announced.set) is None
        await asyncio.wait_for(announced.wait(), 20)
        status = await reader.read(pod, ignore)
        assert status is not None
        assert 7 == status.done
        await reader.close()


async def test_a_head_that_stops_answering_loses_its_status() -> None:
    reader, pod = HeadStatusReader(lifetime_s=0.0), head(HEALTHY, "head")
    async with serving(HEALTHY, 0):
        assert await reader.read(pod, ignore) is not None
    assert await reader.read(pod, ignore) is None
    await reader.close()


async def read_answer(monkeypatch: pytest.MonkeyPatch, body: bytes, code: int = 200) -> tuple[HeadStatus | None, str]:
    """Return the status of a head that answers so, and why it cannot be used."""
    monkeypatch.setattr(head_status, "_MAX_WAIT_S", 60.0)
    reader, pod = HeadStatusReader(), head(HEALTHY, "head")
    async with serving(HEALTHY, body=body, code=code):
        status = await reader.read(pod, ignore)
    await reader.close()
    return status, reader.problem(pod)


async def test_the_status_of_1024_engines_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [{"worker": f"math-worker-{number}", "counters": {"x" * 2000: 1.0}} for number in range(1024)]
    status, problem = await read_answer(monkeypatch, json.dumps({"done": 7, "engines": engines}).encode())
    assert "" == problem
    assert status is not None
    assert (7, [engine["worker"] for engine in engines]) == (status.done, [engine.worker for engine in status.engines])


@pytest.mark.parametrize(
    ("body", "code", "problem"),
    [
        (b'{"done": 7}' + b" " * (4 << 20), 200, "it is larger than 4 MiB"),
        (b"{", 200, "EOF while parsing"),
        (b"[]", 200, "should be an object"),
        (b"no", 401, "HTTP status 401"),
        (b'{"done": 1e999}', 200, "done: "),
        (b'{"done": 1%s}' % (b"0" * 30), 200, "done: "),
        (b'{"done": 1%s}' % (b"0" * 9000), 200, "number out of range"),
        (b'{"waiting": -1}', 200, "waiting: "),
        (b'{"tokens_per_second": NaN}', 200, "tokens_per_second: "),
        (b'{"remaining_seconds": 1e300}', 200, "remaining_seconds: "),
        (b'{"saved": "-inf"}', 200, "saved: "),
        (b'{"engines": [{"max_running": -1}]}', 200, "engines.0.max_running: "),
        (b'{"engines": [%s{}]}' % (b"{}," * 1_000_000), 200, "engines: "),
        (b'{"redis_error": "\\ud800"}', 200, ""),
        (b'{"environment_errors": {"%s": {}}}' % (b"x" * 1_000_000), 200, "environment_errors.xxx"),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else None,
)
async def test_a_status_that_cannot_be_used_is_dropped_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, body: bytes, code: int, problem: str
) -> None:
    status, said = await read_answer(monkeypatch, body, code)
    assert status is None
    assert problem in said
    assert 0 < len(said) <= 300


async def test_a_head_that_is_starting_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (None, "") == await read_answer(monkeypatch, b'{"error": "the coordinator is still reading"}', 503)


def test_every_field_is_in_the_coordinators_status() -> None:
    assert set() == HeadStatus.model_fields.keys() - ServedStatus.__required_keys__
    assert BRIEF_ENGINE_FIELDS == tuple(field.name for field in fields(EngineStatus))
    assert set() == set(BRIEF_ENGINE_FIELDS) - EngineEntry.__required_keys__


async def test_a_head_sends_the_operator_only_what_it_uses_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = dict.fromkeys(ENGINE_METRICS, 123456.789)
    reports = {f"id-{i}": EngineReport(f"w-{i}/engine-0", f"math-worker-{i}/0", counters=counters) for i in range(1024)}
    server = StatusServer(job_status(reports))
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}/status"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as response:
                assert counters == (await response.json())["engines"][0]["counters"]
            async with session.get(f"{url}?engines=brief") as response:
                body = await response.read()
        monkeypatch.setattr(names, "HTTP_PORT", yarl.URL(url).port)
        monkeypatch.setattr(head_status, "_MAX_WAIT_S", 60.0)
        reader = HeadStatusReader()
        status = await reader.read(head("127.0.0.1", "head"), ignore)
        await reader.close()
    finally:
        await server.stop()
    assert HeadStatus.model_validate_json(body) == status
    assert {f"math-worker-{i}" for i in range(1024)} == {engine.worker for engine in status.engines}
    assert len(body) < 120 * 1024
