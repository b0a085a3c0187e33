"""A history that is slow, unresponsive, emptied or killed while a job decodes: no step waits, nothing is stored twice.

This is part of ``make test-chaos``, because it measures speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_api import AsyncRolloutClient, Prompt, Rollout
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect
from rollout_head.relay import Relay
from rollout_store.history.metadata import list_histories
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.engine import Engine
from tests.support.acceptance import accepted_per_step
from tests.support.history_contents import rollout_ids_in
from tests.support.in_process_job import LiveJob, manifest, start_engine
from tests.support.live_job_harness import ENDLESS
from tests.support.redis_servers import Server
from tests.support.reference_model import EOS, VOCABULARY, LoopThread, make_model
from tests.support.tcp_proxy import Proxy

KEYS = HistoryKeys("default", "live")
WINDOW = 16
TOKENS = 400
PROMPTS = 32
"""Twice as many as the engine runs at once: a run takes seconds, while the index reads new rollouts several times."""
DELAY_S = 0.3
"""Delay of each request to Redis and of each reply."""
PAIRS = 5
MAX_PAIRS = 12
"""On a busy machine five pairs may not suffice. More pairs do not help a decode loop that waits for Redis."""
MAX_SLOWDOWN = 1.15
"""Allowed slowdown of the median pair. Waiting for one reply every quarter of a second would make it threefold."""
MAX_GAP_S = DELAY_S / 2
"""Allowed time without a token in the median run; waiting for one reply takes twice DELAY_S."""
_steps = itertools.count(1)


@dataclass(frozen=True)
class DecodingSpeed:
    """Speed at which a fixed set of greedy rollouts was decoded while the engine's batch was full."""

    tokens: int
    seconds: float
    gap: float
    """The longest time without a token, in seconds."""
    accepted: float
    """Accepted draft tokens per step of a rollout."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return f"{self.tokens_per_second:.0f}/s ({1000 * self.gap:.0f} ms, {self.accepted:.2f})"


class SeparateHistoryJob(LiveJob):
    """A job whose history may be on a separate server, and whose relay runs in the background."""

    def __init__(self, url: str, history: str, model: Path) -> None:
        super().__init__(url, manifest(), model, VOCABULARY)
        self.store = HistoryStore(connect(history), KEYS, window=WINDOW)
        self.relay = Relay(connect(url), self.keys, self.store)


Scenario = Callable[[SeparateHistoryJob, AsyncRolloutClient], Coroutine[Any, Any, None]]


class FaultHarness:
    """One engine that reads the history through a proxy, and the history's Redis server."""

    def __init__(self, directory: Path, messages: str) -> None:
        self.messages = messages
        """URL of a Redis server for messages in which no fault is injected."""
        self.server = Server(directory / "redis", appendonly=True)
        self.proxy = Proxy(self.server.port)
        self.model = make_model(directory / "model")
        self.loop = LoopThread()
        self.engine: Engine = self.loop.run(start_engine(self.model, self.history, manifest()))

    @property
    def history(self) -> str:
        """URL at which the job reaches the history, through the proxy."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def restart_empty(self) -> None:
        """Kill the server and start it without its data."""
        self.server.kill()
        shutil.rmtree(self.server.directory / "appendonlydir")
        self.server.start()

    def run(self, scenario: Scenario, *, messages: str, seconds: float = 120) -> None:
        """Run *scenario* on a new job with an empty history."""
        self.server.client().flushall()
        self.loop.run(self._run(scenario, messages), timeout=seconds)

    async def _run(self, scenario: Scenario, messages: str) -> None:
        async with self._job(messages) as job, AsyncRolloutClient.connect(messages, uid=job.uid) as client:
            await job.until(lambda: len(job.redis.hgetall(job.keys.engines)) == 1)
            await scenario(job, client)

    @contextlib.asynccontextmanager
    async def _job(self, messages: str) -> AsyncIterator[SeparateHistoryJob]:
        job = SeparateHistoryJob(messages, self.history, self.model)
        await asyncio.to_thread(job.store.metadata.open, "tokenizer", "model", max_bytes=1 << 30)
        job.start_coordinator()
        job.start_worker("engine-0", self.engine)
        job.relay.start()
        try:
            yield job
            job.check()
        finally:
            for name in list(job.tasks):
                await job.kill(name)
            await asyncio.to_thread(job.relay.stop)

    async def stored(self) -> Counter[str]:
        """Return how often the history contains each rollout, read without the proxy."""
        return await asyncio.to_thread(rollout_ids_in, connect(self.server.url), KEYS)

    async def loaded(self) -> int:
        """Return the number of rollouts that the engine has read from histories so far."""
        stats = await self.engine.stats()
        return int(stats["history"]["rollouts"])

    def close(self) -> None:
        self.engine.close()
        self.loop.stop()
        self.proxy.drop()
        self.proxy.close()
        self.server.close()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, redis_server: str) -> Iterator[FaultHarness]:
    running = FaultHarness(tmp_path_factory.mktemp("history-faults"), redis_server)
    yield running
    running.close()


def prompts(name: str, count: int, *, n: int = 1, tokens: int = TOKENS, temperature: float = 0.0) -> list[Prompt]:
    """Prompts of different problems; each *name* gives other ones."""
    sampling = Sampling(n=n, max_tokens=tokens, temperature=temperature, allowed_token_ids=ENDLESS)
    words = random.Random(name)
    return [Prompt([words.randrange(EOS) for _ in range(8)], f"{name}-{index}", sampling) for index in range(count)]


async def gather(client: AsyncRolloutClient, asked: list[Prompt]) -> list[Rollout]:
    async with client.step(next(_steps), asked) as one:
        return [rollout async for rollout in one]


async def measure(engine: Engine, client: AsyncRolloutClient, asked: list[Prompt]) -> DecodingSpeed:
    """Sample *asked* and measure the speed of decoding."""
    counters, full = engine.counters, manifest().spec.engine.max_num_seqs
    moments: list[tuple[float, int, bool]] = []

    async def watch() -> None:
        while True:
            if not moments or counters.tokens != moments[-1][1]:
                moments.append((time.monotonic(), counters.tokens, counters.running == full))
            await asyncio.sleep(0.002)

    watching = asyncio.ensure_future(watch())
    try:
        rollouts = await gather(client, asked)
    finally:
        watching.cancel()
    assert [TOKENS] * len(asked) == [len(rollout.token_ids) for rollout in rollouts]
    steps = [
        (later[0] - earlier[0], later[1] - earlier[1])
        for earlier, later in itertools.pairwise(moments)
        if earlier[2] and later[2]
    ]
    seconds, tokens = (sum(of) for of in zip(*steps, strict=True))
    assert tokens > TOKENS * len(asked) / 4  # the batch was full for a good part of the run
    return DecodingSpeed(int(tokens), seconds, max(gap for gap, _ in steps), accepted_per_step(rollouts))


@pytest.mark.parametrize("fault", ["slow", "silent"])
def test_decoding_is_not_slowed_down_while_redis_is(harness: FaultHarness, fault: str) -> None:
    asked = prompts(fault, PROMPTS)

    def disturb() -> None:
        if fault == "slow":
            harness.proxy.delay(DELAY_S)
        else:
            harness.server.pause()

    def undo() -> None:
        harness.proxy.delay(0.0)
        harness.server.resume()

    async def scenario(job: SeparateHistoryJob, client: AsyncRolloutClient) -> None:
        async def one(*, disturbed: bool) -> DecodingSpeed:
            try:
                if disturbed:
                    disturb()
                return await measure(harness.engine, client, asked)
            finally:
                undo()

        for _ in range(2):  # fills the history and calibrates its drafts
            await one(disturbed=False)
        loaded = await harness.loaded()
        disturb()
        try:
            # check that the fault affects reads of the index
            began, wait = time.monotonic(), 10.0 if fault == "slow" else 1.0
            ready = await harness.engine.announce([prompt.problem_id for prompt in asked], 1, wanted=(), timeout_s=wait)
            assert ready == (fault == "slow")
            assert time.monotonic() - began >= 2 * DELAY_S
        finally:
            undo()
        undisturbed: list[DecodingSpeed] = []
        disturbed: list[DecodingSpeed] = []
        ratio = gap = float("inf")
        while len(undisturbed) < PAIRS or ((ratio > MAX_SLOWDOWN or gap > MAX_GAP_S) and len(undisturbed) < MAX_PAIRS):
            # the order alternates, because the load of the machine varies
            for on in (True, False) if len(undisturbed) % 2 else (False, True):
                (disturbed if on else undisturbed).append(await one(disturbed=on))
            ratio = statistics.median(
                calm.tokens_per_second / hit.tokens_per_second for calm, hit in zip(undisturbed, disturbed, strict=True)
            )
            gap = statistics.median(hit.gap for hit in disturbed)
        print(f"{fault}: {', '.join(map(str, disturbed))}\n  else: {', '.join(map(str, undisturbed))}")
        print(f"{fault}: takes {ratio:.3f} times as long; longest gap {1000 * gap:.0f} ms")
        assert ratio <= MAX_SLOWDOWN
        assert gap <= MAX_GAP_S
        # drafting continued, with drafts from the history
        assert all(hit.accepted > 0.9 * calm.accepted > 0 for calm, hit in zip(undisturbed, disturbed, strict=True))
        assert await harness.loaded() > loaded
        # nothing was lost
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert {1} == set((await harness.stored()).values())
        assert PROMPTS * (2 * len(undisturbed) + 2) == (await harness.stored()).total()

    harness.run(scenario, messages=harness.messages, seconds=300)


def test_redis_that_restarts_empty_during_an_epoch_loses_only_the_history(
    harness: FaultHarness,
) -> None:
    asked, greedy = prompts("emptied", 12, n=16, tokens=200, temperature=1.0), prompts("new history", 12)

    async def scenario(job: SeparateHistoryJob, client: AsyncRolloutClient) -> None:
        epoch = asyncio.ensure_future(gather(client, asked))
        await job.until(lambda: job.relay.num_appended >= 8)
        await asyncio.to_thread(harness.server.kill)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) >= 4)  # finished rollouts wait in the outbox
        lost = job.relay.num_appended
        await asyncio.to_thread(harness.restart_empty)
        assert not epoch.done()
        ids = [rollout.rollout_id for rollout in await epoch]
        assert 192 == len(set(ids)) == len(ids)

        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        found = await harness.stored()
        assert {1} == set(found.values())
        assert set(found) < set(ids)
        assert 192 - lost == len(found)
        about = await asyncio.to_thread(job.store.metadata.info)
        assert about is not None
        assert ("tokenizer", "model", WINDOW, 1 << 30) == (about.tokenizer, about.model, about.window, about.max_bytes)
        assert [KEYS] == await asyncio.to_thread(list_histories, connect(harness.server.url))

        # drafts come from the new history
        first = await gather(client, greedy)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert found + Counter(rollout.rollout_id for rollout in first) == await harness.stored()
        assert await harness.engine.announce([prompt.problem_id for prompt in greedy], 1, timeout_s=20)
        second = await gather(client, greedy)
        assert [rollout.token_ids for rollout in sorted_by_problem(first)] == [
            rollout.token_ids for rollout in sorted_by_problem(second)
        ]
        before, after = accepted_per_step(first), accepted_per_step(second)
        print(f"emptied: {lost} rollouts lost, accepted per step {before:.2f}, then {after:.2f}")
        assert after >= 1.2 * before

    harness.run(scenario, messages=harness.messages)


def sorted_by_problem(rollouts: list[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: rollout.problem_id)


def test_redis_killed_with_its_append_only_file_loses_and_duplicates_no_rollout(harness: FaultHarness) -> None:
    asked = prompts("killed", 24, n=8, tokens=200, temperature=1.0)

    async def scenario(job: SeparateHistoryJob, client: AsyncRolloutClient) -> None:
        epoch = asyncio.ensure_future(gather(client, asked))
        for appended in (8, 32, 56):
            await job.until(lambda appended=appended: job.relay.num_appended >= appended)
            await asyncio.to_thread(harness.server.kill)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(harness.server.start)
        assert not epoch.done()
        ids = [rollout.rollout_id for rollout in await epoch]
        assert 192 == len(set(ids)) == len(ids)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert Counter(ids) == await harness.stored()
        lengths = [await asyncio.to_thread(job.store.statistics.length_entries, prompt.problem_id) for prompt in asked]
        assert Counter(map(rollout_key, ids)) == Counter(entry.key for some in lengths for entry in some)
        assert {200} == {entry.length for some in lengths for entry in some}

    harness.run(scenario, messages=harness.history)
