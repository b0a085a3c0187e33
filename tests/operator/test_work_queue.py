"""Which jobs are looked at, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollout_operator.work_queue import WorkQueue


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


async def nothing(queue: WorkQueue[str], seconds: float) -> None:
    taking = asyncio.ensure_future(queue.take())
    done, _ = await asyncio.wait({taking}, timeout=seconds)
    assert not done
    taking.cancel()


def test_a_key_that_is_added_many_times_is_taken_once() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(5):
            queue.add("a")
        assert "a" == await queue.take()
        queue.done("a")
        await nothing(queue, 0.05)

    play(story())


def test_nobody_takes_a_key_that_somebody_has_and_it_is_not_lost() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        assert "a" == await queue.take()
        queue.add("a")
        queue.add("b")
        assert "b" == await queue.take()
        await nothing(queue, 0.05)
        queue.done("a")
        assert "a" == await queue.take()

    play(story())


def test_the_sooner_time_counts() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        began = loop.time()
        queue.add("a", 5.0)
        queue.add("a", 0.1)
        queue.add("a", 3.0)
        assert "a" == await queue.take()
        assert 0.1 <= loop.time() - began < 1.0
        queue.done("a")
        await nothing(queue, 0.05)

    play(story())


def test_what_fails_comes_back_after_a_pause_that_grows() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        queue.add("a")
        pauses = []
        for _ in range(3):
            assert "a" == await queue.take()
            began = loop.time()
            queue.failed("a")
            assert "a" == await queue.take()
            pauses.append(loop.time() - began)
            queue.failed("a")
        assert pauses[0] < pauses[1] < pauses[2]

    play(story())


def test_what_is_forgotten_does_not_come() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a", 0.05)
        queue.forget("a")
        await nothing(queue, 0.2)
        assert 0 == len(queue)

    play(story())
