"""Reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

_FIRST_TIMEOUT_S = 0.5
_Result = TypeVar("_Result")


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


async def run_in_daemon_thread(function: Callable[[], _Result]) -> _Result:
    """Return the result of *function*, which runs in a thread.

    Unlike with ``asyncio.to_thread``, neither a cancellation nor the end of the process waits for the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def set_outcome(result: _Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("_Result", result))

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_outcome, result, failure)

    threading.Thread(target=run, name=getattr(function, "__name__", "worker"), daemon=True).start()
    return await future
