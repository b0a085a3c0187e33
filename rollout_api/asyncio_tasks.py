"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_FIRST_PAUSE_S = 0.5


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they end; if this is itself cancelled, after that.

    Once is not always enough: in Python 3.11 a cancellation that comes together with what a task waits for is lost in
    ``asyncio.wait_for`` (python/cpython#81839), which redis-py uses, and redis-py 8.1 makes an ordinary error of one
    that meets it while it connects. The pause before the next time grows, lest what a task does about its end be cut
    short, too.
    """
    pause = _FIRST_PAUSE_S
    open_ = {task for task in tasks if not task.done()}
    cancelled: asyncio.CancelledError | None = None
    while open_:
        for task in open_:
            task.cancel()
        try:
            await asyncio.wait(open_, timeout=pause)
        except asyncio.CancelledError as error:
            cancelled = error
        open_ = {task for task in open_ if not task.done()}
        pause *= 2
    for task in tasks:
        if not task.cancelled():
            task.exception()  # so that asyncio does not complain that nobody asked
    if cancelled is not None:
        raise cancelled
