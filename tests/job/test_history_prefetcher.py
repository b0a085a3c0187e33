"""Engines are told in time to read the histories of problems."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect
from rollout_store.history.metadata import HistoryMetadata
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.engine_worker.history_prefetcher import HistoryPrefetcher
from tests.support.recording_sink import RecordingSink
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.serial

KEYS = HistoryKeys("default", "math")


class FakeEngine:
    """Records announcements in place of an engine."""

    config = SimpleNamespace(drafting=True)

    def __init__(self) -> None:
        self.announced: list[tuple[set[str], int, set[str]]] = []

    async def announce(
        self, problems: Sequence[str], generation: int, *, wanted: Sequence[str], timeout_s: float = 0.0
    ) -> bool:
        self.announced.append((set(problems), generation, set(wanted)))
        return True


class RecordingMetadata(HistoryMetadata):
    """Counts the attempts to publish a version."""

    num_attempts = 0

    def publish(self, run_uid: str, weight_version: int) -> int:
        try:
            return super().publish(run_uid, weight_version)
        finally:
            self.num_attempts += 1

    async def wait_for_attempt(self) -> None:
        """Wait until an attempt that starts from now on has ended."""
        before = self.num_attempts
        await wait_for_async(lambda: self.num_attempts > before, 20)


def recording_store(url: str) -> tuple[HistoryStore, RecordingMetadata]:
    client = connect(url)
    store, recording = HistoryStore(client, KEYS, window=2), RecordingMetadata(client, KEYS, window=2)
    store.metadata = recording
    return store, recording


@asynccontextmanager
async def running_prefetcher(
    url: str, engine: Any, store: HistoryStore | None = None
) -> AsyncIterator[HistoryPrefetcher]:
    prefetcher = HistoryPrefetcher(engine, store or HistoryStore(connect(url), KEYS, window=2), "run")
    running = asyncio.ensure_future(prefetcher.run())
    try:
        yield prefetcher
    finally:
        running.cancel()


async def start_rollout(prefetcher: HistoryPrefetcher, problem: str) -> None:
    """Start and end a rollout."""
    with prefetcher.in_use(problem):
        await prefetcher.wait_ready(problem)


async def test_the_first_rollout_of_a_problem_requests_its_history(redis_url: str) -> None:
    engine = FakeEngine()

    async with running_prefetcher(redis_url, engine) as prefetcher:
        with prefetcher.in_use("p"):
            await prefetcher.wait_ready("p")
            await start_rollout(prefetcher, "p")  # joins a running rollout
            await start_rollout(prefetcher, "q")
            await prefetcher.advance(5)
            assert [({"p"}, 0, {"p"}), ({"p", "q"}, 0, {"q"}), ({"p", "q"}, 5, set())] == engine.announced
        started = time.monotonic()
        await start_rollout(prefetcher, "p")
        await start_rollout(prefetcher, "q")
        assert time.monotonic() - started < 0.5  # rollouts of known problems do not wait
        await wait_for_async(lambda: len(engine.announced) >= 4, 10)
        assert ({"p", "q"}, 5, {"p", "q"}) == engine.announced[3]


def test_versions_are_published_in_order_after_an_outage_of_the_history(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def scenario(server: Server) -> None:
        recorded_store, recording = recording_store(server.url)
        async with running_prefetcher(server.url, engine, recorded_store) as prefetcher:
            server.kill()
            for version in (1, 2, 3):
                prefetcher.publish(version)
                await recording.wait_for_attempt()
            server.start()
            store = HistoryStore(connect(server.url), KEYS, window=2)

            async def are_published() -> bool:
                return await asyncio.to_thread(store.metadata.generation) >= 3

            await wait_for_async(are_published, 20)
            assert [1, 2, 3] == [store.metadata.publish("run", version) for version in (1, 2, 3)]

    with Server(tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_history_that_accepts_no_writes_is_still_used_for_drafts(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def scenario(server: Server) -> None:
        HistoryStore(connect(server.url), KEYS, window=2).metadata.publish("run", 1)
        server.client().config_set("maxmemory", 1)
        store, recording = recording_store(server.url)
        async with running_prefetcher(server.url, engine, store) as prefetcher:
            prefetcher.publish(2)
            await recording.wait_for_attempt()
            async with asyncio.timeout(5):
                await start_rollout(prefetcher, "p")
            assert [({"p"}, 1, {"p"})] == engine.announced
            server.client().config_set("maxmemory", 0)
            await wait_for_async(lambda: ({"p"}, 2, set()) in engine.announced, 10)

    with Server(tmp_path) as server:
        asyncio.run(scenario(server))


class SyncingEngine(FakeEngine):
    """Passes announcements on to a history sync in place of an engine."""

    def __init__(self, sync: HistorySync) -> None:
        super().__init__()
        self._sync = sync

    async def announce(
        self, problems: Sequence[str], generation: int, *, wanted: Sequence[str], timeout_s: float = 0.0
    ) -> bool:
        self._sync.announce(problems, wanted)
        await asyncio.to_thread(self._sync.wait_ready, timeout_s)
        return await super().announce(problems, generation, wanted=wanted)


async def test_an_evicted_problem_is_read_again_for_its_next_rollout_only(redis_url: str) -> None:
    store = HistoryStore(connect(redis_url), KEYS, window=2)
    memory = RecordingSink(max_problems=1)
    sync = HistorySync(HistoryStore(connect(redis_url), KEYS, window=2), memory)
    engine = SyncingEngine(sync)
    for problem in ("p", "q", "r"):
        store.append(problem, HistoryRecord("a", "run", 1, 1, np.arange(3, dtype=np.uint32), "stop"), newest=1)

    sync.start()
    try:
        async with running_prefetcher(redis_url, engine) as prefetcher:
            for problem in ("p", "q", "r"):
                await start_rollout(prefetcher, problem)
                assert [problem] == list(memory.problems)
            await prefetcher.advance(2)
            assert (["r"], 3) == (list(memory.problems), sync.counters.rollouts)
            await start_rollout(prefetcher, "p")
            await wait_for_async(lambda: "p" in memory.problems, 10)
            assert (["p"], 4) == (list(memory.problems), sync.counters.rollouts)
    finally:
        sync.stop()
