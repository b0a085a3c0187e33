"""Reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any

_FIRST_TIMEOUT_S = 0.5


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome.

    If this coroutine is cancelled itself, it raises ``CancelledError`` only after the tasks have ended.

    One cancellation is not always enough. In Python 3.11, ``asyncio.wait_for`` loses a cancellation that arrives
    together with the result that it waits for (python/cpython#81839); redis-py uses it. redis-py 8.1 turns a
    cancellation that arrives while it connects into an ordinary error. The cancellation is therefore repeated. The
    pauses grow, so that a task's cleanup is not interrupted repeatedly.
    """
    timeout = _FIRST_TIMEOUT_S
    pending = {task for task in tasks if not task.done()}
    own_cancellation: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=timeout)
        except asyncio.CancelledError as error:
            own_cancellation = error
        pending = {task for task in pending if not task.done()}
        timeout *= 2
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, so that asyncio does not log it
    if own_cancellation is not None:
        raise own_cancellation
