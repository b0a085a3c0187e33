"""Which problems an engine is told to fetch the history of, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.history.connection import connect
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.sync import HistorySync
from rollout_worker.job.engine_worker import _Announcer
from tests.support.recording_sink import Memory
from tests.support.redis_servers import Server

KEYS = HistoryKeys("default", "math")


class Told:
    """In place of an engine: what it was told."""

    config = SimpleNamespace(drafting=True)

    def __init__(self) -> None:
        self.announced: list[tuple[set[str], int, set[str]]] = []

    async def announce(
        self, problems: Sequence[str], generation: int, *, wanted: Sequence[str], wait: float = 0.0
    ) -> bool:
        self.announced.append((set(problems), generation, set(wanted)))
        return True


@asynccontextmanager
async def announcing(url: str, engine: Any) -> AsyncIterator[_Announcer]:
    announcer = _Announcer(engine, HistoryStore(connect(url), KEYS, window=2), "run")
    running = asyncio.ensure_future(announcer.run())
    try:
        yield announcer
    finally:
        running.cancel()


async def begin(announcer: _Announcer, problem: str) -> None:
    """Make a rollout whose problem has no other."""
    with announcer.using(problem):
        await announcer.ready(problem)


def test_a_problem_is_wanted_by_the_first_of_its_rollouts(redis_url: str) -> None:
    engine = Told()

    async def story() -> None:
        async with announcing(redis_url, engine) as announcer:
            with announcer.using("p"):
                await announcer.ready("p")
                await begin(announcer, "p")  # joins
                await begin(announcer, "q")
                await announcer.advance(5)
                assert [({"p"}, 0, {"p"}), ({"p", "q"}, 0, {"q"}), ({"p", "q"}, 5, set())] == engine.announced
            began = time.monotonic()
            await begin(announcer, "p")
            await begin(announcer, "q")
            assert time.monotonic() - began < 0.5  # what is known keeps no rollout waiting
            async with asyncio.timeout(10):
                while len(engine.announced) < 4:
                    await asyncio.sleep(0.02)
            assert ({"p", "q"}, 5, {"p", "q"}) == engine.announced[3]

    asyncio.run(story())


def test_versions_are_published_in_their_order_though_the_history_was_away(tmp_path: Path) -> None:
    engine = Told()

    async def story(server: Server) -> None:
        async with announcing(server.url, engine) as announcer:
            server.kill()
            for version in (1, 2, 3):
                announcer.publish(version)
                await asyncio.sleep(0.5)
            server.start()
            store = HistoryStore(connect(server.url), KEYS, window=2)
            async with asyncio.timeout(20):
                while await asyncio.to_thread(store.generation) < 3:
                    await asyncio.sleep(0.1)
            assert [1, 2, 3] == [store.publish("run", version) for version in (1, 2, 3)]

    with Server(tmp_path) as server:
        asyncio.run(story(server))


def test_a_history_that_takes_no_writes_is_still_drafted_from(tmp_path: Path) -> None:
    engine = Told()

    async def story(server: Server) -> None:
        HistoryStore(connect(server.url), KEYS, window=2).publish("run", 1)
        server.client().config_set("maxmemory", 1)
        async with announcing(server.url, engine) as announcer:
            announcer.publish(2)
            await asyncio.sleep(0.2)
            async with asyncio.timeout(5):
                await begin(announcer, "p")
            assert [({"p"}, 1, {"p"})] == engine.announced
            server.client().config_set("maxmemory", 0)
            async with asyncio.timeout(10):
                while ({"p"}, 2, set()) not in engine.announced:
                    await asyncio.sleep(0.1)

    with Server(tmp_path) as server:
        asyncio.run(story(server))


class Fetching(Told):
    """In place of an engine: only its way from what it is told to an index."""

    def __init__(self, sync: HistorySync) -> None:
        super().__init__()
        self._sync = sync

    async def announce(
        self, problems: Sequence[str], generation: int, *, wanted: Sequence[str], wait: float = 0.0
    ) -> bool:
        self._sync.announce(problems, generation, wanted)
        await asyncio.to_thread(self._sync.wait_ready, wait)
        return await super().announce(problems, generation, wanted=wanted)


def test_what_an_index_has_thrown_out_is_read_again_for_the_next_rollout_and_for_nothing_else(redis_url: str) -> None:
    store = HistoryStore(connect(redis_url), KEYS, window=2)
    memory = Memory(most=1)
    sync = HistorySync(HistoryStore(connect(redis_url), KEYS, window=2), memory)
    engine = Fetching(sync)
    for problem in ("p", "q", "r"):
        store.append(problem, HistoryRecord("a", "run", 1, 1, np.arange(3, dtype=np.uint32), "stop"), newest=1)

    async def story() -> None:
        async with announcing(redis_url, engine) as announcer:
            for problem in ("p", "q", "r"):
                await begin(announcer, problem)
                assert [problem] == list(memory.problems)
            await announcer.advance(2)
            assert (["r"], 3) == (list(memory.problems), sync.counters.rollouts)
            await begin(announcer, "p")
            async with asyncio.timeout(10):
                while "p" not in memory.problems:
                    await asyncio.sleep(0.02)
            assert (["p"], 4) == (list(memory.problems), sync.counters.rollouts)

    sync.start()
    try:
        asyncio.run(story())
    finally:
        sync.stop()
