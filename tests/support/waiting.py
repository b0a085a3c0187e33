"""Waiting for a condition by polling it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

_MIN_INTERVAL_S = 0.01
_MAX_INTERVAL_S = 0.1


def wait_for(
    condition: Callable[[], Any],
    timeout_s: float = 15.0,
    message: str | Callable[[], str] = "",
    *,
    ignored: type[Exception] | tuple[type[Exception], ...] = (),
) -> Any:
    """Wait until a condition returns something true, and return that.

    Args:
        condition: called repeatedly, first in short and then in longer intervals.
        timeout_s: seconds after which to give up.
        message: text of the error, or a function that returns it and is called only when the wait fails.
        ignored: errors of the condition that mean that it is not met.

    Raises:
        TimeoutError: if the condition is not met in time.
    """
    started = time.monotonic()
    while True:
        try:
            if result := condition():
                return result
        except ignored:
            pass
        elapsed_s = time.monotonic() - started
        if elapsed_s > timeout_s:
            raise TimeoutError(_text(message, timeout_s))
        time.sleep(_interval(elapsed_s, _MAX_INTERVAL_S))


async def wait_for_async(
    condition: Callable[[], Any],
    timeout_s: float = 15.0,
    message: str | Callable[[], str] = "",
    *,
    max_interval_s: float = _MAX_INTERVAL_S,
) -> Any:
    """Wait until a condition returns something true, and return that.

    Args:
        condition: called repeatedly; what it returns may be awaitable.
        timeout_s: seconds after which to give up, even if an awaitable that the condition has returned is not done.
        message: text of the error, or a function that returns it and is called only when the wait fails.
        max_interval_s: longest time between two calls, in seconds.

    Raises:
        TimeoutError: if the condition is not met in time.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            while True:
                result = condition()
                if inspect.isawaitable(result):
                    result = await result
                if result:
                    return result
                await asyncio.sleep(_interval(time.monotonic() - started, max_interval_s))
    except TimeoutError:
        if timeout.expired():
            raise TimeoutError(_text(message, timeout_s)) from None
        raise


def _interval(elapsed_s: float, max_interval_s: float) -> float:
    """Return the seconds until the next call: a tenth of the time so far, within limits."""
    return min(max(elapsed_s / 10, _MIN_INTERVAL_S), max_interval_s)


def _text(message: str | Callable[[], str], timeout_s: float) -> str:
    text = message if isinstance(message, str) else message()
    return text or f"The condition was not met within {timeout_s:g} s."
