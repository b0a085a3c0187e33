"""Tasks are ended, whatever becomes of one cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollout_api.asyncio_tasks import end


async def deaf(cancellations: int) -> None:
    """Goes on for ever after so many cancellations, as if each had come together with what it waited for."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancellations -= 1
            if cancellations < 0:
                raise


def test_a_task_that_loses_cancellations_is_ended() -> None:
    async def run() -> None:
        task = asyncio.ensure_future(deaf(2))
        await asyncio.sleep(0)
        await end(task)
        assert task.cancelled()

    asyncio.run(run())


def test_an_end_that_is_itself_cancelled_ends_its_tasks_first() -> None:
    async def run() -> None:
        inner = asyncio.ensure_future(deaf(3))

        async def outer() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await end(inner)

        task = asyncio.ensure_future(outer())
        await asyncio.sleep(0)
        await end(task)
        assert task.cancelled()
        assert inner.cancelled()

    asyncio.run(run())


def test_how_a_task_ended_is_nobodys_surprise(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        raise ValueError("in the end")

    async def run() -> None:
        task = asyncio.ensure_future(failing())
        await asyncio.sleep(0)
        await end(task)

    asyncio.run(run())
    assert "in the end" not in caplog.text
