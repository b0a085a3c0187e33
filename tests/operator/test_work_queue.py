"""The keys that the work queue returns, and their delays."""

from __future__ import annotations

import asyncio

from rollout_operator.cluster.informer import WorkQueue


async def assert_nothing_due(queue: WorkQueue[str], seconds: float) -> None:
    getting = asyncio.ensure_future(queue.get())
    done, _ = await asyncio.wait({getting}, timeout=seconds)
    assert not done
    getting.cancel()


async def test_a_key_that_is_added_many_times_is_handed_out_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert "a" == await queue.get()
    queue.done("a")
    await assert_nothing_due(queue, 0.05)


async def test_a_key_that_is_added_while_it_is_processed_is_handed_out_again_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert "a" == await queue.get()
    queue.add("a")
    queue.add("b")
    assert "b" == await queue.get()
    await assert_nothing_due(queue, 0.05)
    queue.done("a")
    assert "a" == await queue.get()


async def test_the_earliest_due_time_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    started = loop.time()
    queue.add("a", 5.0)
    queue.add("a", 0.1)
    queue.add("a", 3.0)
    assert "a" == await queue.get()
    assert 0.1 <= loop.time() - started < 1.0
    queue.done("a")
    await assert_nothing_due(queue, 0.05)


async def test_a_failed_key_is_retried_with_growing_delays() -> None:
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    queue.add("a")
    delays = []
    for _ in range(3):
        assert "a" == await queue.get()
        started = loop.time()
        queue.retry("a")
        assert "a" == await queue.get()
        delays.append(loop.time() - started)
        queue.retry("a")
    assert delays[0] < delays[1] < delays[2]


async def test_a_discarded_key_is_not_handed_out() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 0.05)
    queue.discard("a")
    await assert_nothing_due(queue, 0.2)
    assert 0 == len(queue)
