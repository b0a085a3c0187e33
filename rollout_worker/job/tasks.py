"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.2


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    Once is not always enough: in Python 3.11 a cancellation that comes together with what a task waits for is lost in
    ``asyncio.wait_for`` (python/cpython#81839), which redis-py uses.
    """
    open_ = {task for task in tasks if not task.done()}
    while open_:
        for task in open_:
            task.cancel()
        _, open_ = await asyncio.wait(open_, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # so that asyncio does not complain that nobody asked
