"""Tasks are cancelled reliably, even if a single cancellation is lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollout_api.asyncio_tasks import cancel_and_wait


async def lose_cancellations(count: int) -> None:
    """Run forever and lose the first *count* cancellations."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            count -= 1
            if count < 0:
                raise


async def test_task_that_loses_cancellations_is_ended() -> None:
    task = asyncio.ensure_future(lose_cancellations(1))
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()


async def test_cancelled_wait_ends_its_tasks_first() -> None:
    inner = asyncio.ensure_future(lose_cancellations(2))

    async def outer() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await cancel_and_wait(inner)

    task = asyncio.ensure_future(outer())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()
    assert inner.cancelled()


async def test_exceptions_of_cancelled_tasks_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        raise ValueError("failed during cleanup")

    task = asyncio.ensure_future(failing())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert "failed during cleanup" not in caplog.text
