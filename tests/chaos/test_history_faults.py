"""A history that is slow, silent, lost or killed under a job that decodes: no step waits, nothing is there twice.

A part of ``make test-chaos``, since speeds are measured.
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
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.engine.host import Engine
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore, histories
from rollout_worker.job.relay import Relay
from tests.support.history_contents import ids_in
from tests.support.in_process_job import LiveJob, manifest, start_engine
from tests.support.redis_servers import Server
from tests.support.reference_model import EOS, VOCABULARY, LoopThread, make_model
from tests.support.tcp_proxy import Proxy

KEYS = HistoryKeys("default", "live")
WINDOW = 16
ENDLESS = list(range(EOS))
"""Tokens to allow so that a rollout goes on to max_tokens."""
TOKENS = 400
PROMPTS = 32
"""Two to a slot of the engine: a pass takes seconds, within which the index asks for what is new several times."""
DELAY_S = 0.3
"""Of each request to Redis, and of each reply."""
PAIRS = 5
MOST_PAIRS = 12
"""Beside others on the machine, five may not do; those of a decode loop that waits are never as fast."""
SLOWER = 1.15
"""By how much the median pair may differ. One wait for a reply every quarter of a second would make it three times."""
GAP_S = DELAY_S / 2
"""The longest that may pass without a token in the median pass; a wait for one reply takes twice DELAY_S."""
_steps = itertools.count(1)


@dataclass(frozen=True)
class Pass:
    """How fast a fixed set of greedy rollouts was decoded, while the engine had as many as it takes."""

    tokens: int
    seconds: float
    gap: float
    """The longest time without a token, in seconds."""
    accepted: float
    """Draft tokens a step of a rollout."""

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return f"{self.speed:.0f}/s ({1000 * self.gap:.0f} ms, {self.accepted:.2f})"


class ApartJob(LiveJob):
    """A job whose history may be on another server than its messages, and whose relay runs by itself."""

    def __init__(self, url: str, history: str, model: Path) -> None:
        super().__init__(url, manifest(), model, VOCABULARY)
        self.store = HistoryStore(connect(history), KEYS, window=WINDOW)
        self.relay = Relay(connect(url), self.keys, self.store)


Story = Callable[[ApartJob, AsyncRolloutClient], Coroutine[Any, Any, None]]


class Stage:
    """One engine, which reads the history through a proxy, and the server of that."""

    def __init__(self, directory: Path, messages: str) -> None:
        self.messages = messages
        """URL of a server for messages that nothing happens to."""
        self.server = Server(directory / "redis", appendonly=True)
        self.proxy = Proxy(self.server.port)
        self.model = make_model(directory / "model")
        self.loop = LoopThread()
        self.engine: Engine = self.loop.run(start_engine(self.model, self.history, manifest()))

    @property
    def history(self) -> str:
        """URL of the history, as the job sees it."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def empty(self) -> None:
        """Kill the server and start it with nothing in it, as one that keeps nothing."""
        self.server.kill()
        shutil.rmtree(self.server.directory / "appendonlydir")
        self.server.start()

    def play(self, story: Story, *, messages: str, seconds: float = 120) -> None:
        """Tell *story* of a job that has nothing yet."""
        self.server.client().flushall()
        self.loop.run(self._play(story, messages), timeout=seconds)

    async def _play(self, story: Story, messages: str) -> None:
        async with self._job(messages) as job, AsyncRolloutClient.connect(messages, uid=job.uid) as client:
            await job.until(lambda: len(job.redis.hgetall(job.keys.engines)) == 1)
            await story(job, client)

    @contextlib.asynccontextmanager
    async def _job(self, messages: str) -> AsyncIterator[ApartJob]:
        job = ApartJob(messages, self.history, self.model)
        await asyncio.to_thread(job.store.open, "tokenizer", "model", max_bytes=1 << 30)
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

    async def read(self) -> Counter[str]:
        """How often each rollout is in the history, past the proxy."""
        return await asyncio.to_thread(ids_in, connect(self.server.url), KEYS)

    async def loaded(self) -> int:
        """Rollouts that the engine has read of histories so far."""
        stats = await self.engine.stats()
        return int(stats["history"]["rollouts"])

    def close(self) -> None:
        self.engine.close()
        self.loop.stop()
        self.proxy.drop()
        self.proxy.close()
        self.server.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, redis_server: str) -> Iterator[Stage]:
    running = Stage(tmp_path_factory.mktemp("history-faults"), redis_server)
    yield running
    running.close()


def prompts(name: str, count: int, *, n: int = 1, tokens: int = TOKENS, temperature: float = 0.0) -> list[Prompt]:
    """Of a problem each, all of them other ones for each name."""
    sampling = Sampling(n=n, max_tokens=tokens, temperature=temperature, allowed_token_ids=ENDLESS)
    words = random.Random(name)
    return [Prompt([words.randrange(EOS) for _ in range(8)], f"{name}-{index}", sampling) for index in range(count)]


async def gather(client: AsyncRolloutClient, asked: list[Prompt]) -> list[Rollout]:
    async with client.step(next(_steps), asked) as one:
        return [rollout async for rollout in one]


async def measure(engine: Engine, client: AsyncRolloutClient, asked: list[Prompt]) -> Pass:
    """Have *asked* rolled out and watch the tokens come."""
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
    assert tokens > TOKENS * len(asked) / 4  # a good part of the pass was with a full batch
    accepted = sum(rollout.accepted for rollout in rollouts) / sum(rollout.steps for rollout in rollouts)
    return Pass(int(tokens), seconds, max(gap for gap, _ in steps), accepted)


@pytest.mark.parametrize("fault", ["slow", "silent"])
def test_decoding_is_as_fast_while_redis_is(stage: Stage, fault: str) -> None:
    asked = prompts(fault, PROMPTS)

    def disturb() -> None:
        if fault == "slow":
            stage.proxy.hold(DELAY_S)
        else:
            stage.server.pause()

    def undo() -> None:
        stage.proxy.hold(0.0)
        stage.server.resume()

    async def story(job: ApartJob, client: AsyncRolloutClient) -> None:
        async def one(*, disturbed: bool) -> Pass:
            try:
                if disturbed:
                    disturb()
                return await measure(stage.engine, client, asked)
            finally:
                undo()

        for _ in range(2):  # from now on there is a history to draft from, and how good it is is known
            await one(disturbed=False)
        loaded = await stage.loaded()
        disturb()
        try:
            # that is what the index meets with when it reads
            began, wait = time.monotonic(), 10.0 if fault == "slow" else 1.0
            ready = await stage.engine.announce([prompt.problem_id for prompt in asked], 1, wanted=(), wait=wait)
            assert ready == (fault == "slow")
            assert time.monotonic() - began >= 2 * DELAY_S
        finally:
            undo()
        plain: list[Pass] = []
        disturbed: list[Pass] = []
        ratio = gap = float("inf")
        while len(plain) < PAIRS or ((ratio > SLOWER or gap > GAP_S) and len(plain) < MOST_PAIRS):
            # now the one first, now the other: what else the machine does comes and goes
            for on in (True, False) if len(plain) % 2 else (False, True):
                (disturbed if on else plain).append(await one(disturbed=on))
            ratio = statistics.median(calm.speed / hit.speed for calm, hit in zip(plain, disturbed, strict=True))
            gap = statistics.median(hit.gap for hit in disturbed)
        print(f"{fault}: {', '.join(map(str, disturbed))}\n  else: {', '.join(map(str, plain))}")
        print(f"{fault}: takes {ratio:.3f} times as long; longest gap {1000 * gap:.0f} ms")
        assert ratio <= SLOWER
        assert gap <= GAP_S
        # drafts went on, and came from the history
        assert all(hit.accepted > 0.9 * calm.accepted > 0 for calm, hit in zip(plain, disturbed, strict=True))
        assert await stage.loaded() > loaded
        # and nothing was lost over it
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert {1} == set((await stage.read()).values())
        assert PROMPTS * (2 * len(plain) + 2) == (await stage.read()).total()

    stage.play(story, messages=stage.messages, seconds=300)


def test_redis_that_comes_back_empty_in_the_middle_of_an_epoch_costs_the_history_and_nothing_else(
    stage: Stage,
) -> None:
    asked, greedy = prompts("emptied", 12, n=4, tokens=200, temperature=1.0), prompts("anew", 12)

    async def story(job: ApartJob, client: AsyncRolloutClient) -> None:
        epoch = asyncio.ensure_future(gather(client, asked))
        await job.until(lambda: job.relay.appended >= 8)
        await asyncio.to_thread(stage.server.kill)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) >= 4)  # what ends waits meanwhile
        lost = job.relay.appended
        await asyncio.to_thread(stage.empty)
        assert not epoch.done()
        ids = [rollout.rollout_id for rollout in await epoch]
        assert 48 == len(set(ids)) == len(ids)

        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        found = await stage.read()
        assert {1} == set(found.values())
        assert set(found) < set(ids)
        assert 48 - lost == len(found)
        about = await asyncio.to_thread(job.store.about)
        assert about is not None
        assert ("tokenizer", "model", WINDOW, 1 << 30) == (about.tokenizer, about.model, about.window, about.max_bytes)
        assert [KEYS] == await asyncio.to_thread(histories, connect(stage.server.url))

        # the history that began anew is drafted from
        first = await gather(client, greedy)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert found + Counter(rollout.rollout_id for rollout in first) == await stage.read()
        assert await stage.engine.announce([prompt.problem_id for prompt in greedy], 1, wait=20)
        second = await gather(client, greedy)
        assert [rollout.token_ids for rollout in in_order(first)] == [rollout.token_ids for rollout in in_order(second)]
        print(f"emptied: {lost} rollouts lost, accepted a step {a_step(first):.2f}, then {a_step(second):.2f}")
        assert a_step(second) >= 1.2 * a_step(first)

    stage.play(story, messages=stage.messages)


def in_order(rollouts: list[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: rollout.problem_id)


def a_step(rollouts: list[Rollout]) -> float:
    """Draft tokens accepted in a step of a rollout."""
    return sum(rollout.accepted for rollout in rollouts) / sum(rollout.steps for rollout in rollouts)


def test_redis_killed_with_its_append_only_file_loses_no_rollout_and_keeps_none_twice(stage: Stage) -> None:
    asked = prompts("killed", 24, n=4, tokens=200, temperature=1.0)

    async def story(job: ApartJob, client: AsyncRolloutClient) -> None:
        epoch = asyncio.ensure_future(gather(client, asked))
        for carried in (8, 32, 56):
            await job.until(lambda carried=carried: job.relay.appended >= carried)  # type: ignore[misc]
            await asyncio.to_thread(stage.server.kill)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(stage.server.start)
        assert not epoch.done()
        ids = [rollout.rollout_id for rollout in await epoch]
        assert 96 == len(set(ids)) == len(ids)
        await job.until(lambda: job.redis.xlen(job.keys.outbox) == 0)
        assert Counter(ids) == await stage.read()
        lengths = [await asyncio.to_thread(job.store.lengths, prompt.problem_id) for prompt in asked]
        assert Counter(map(rollout_key, ids)) == Counter(entry.key for some in lengths for entry in some)
        assert {200} == {entry.length for some in lengths for entry in some}

    stage.play(story, messages=stage.history)
