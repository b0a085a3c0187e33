"""Waiting for a condition by polling it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_POLL_INTERVAL_S = 0.1


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0, message: str | Callable[[], str] = "") -> Any:
    """Wait until a condition returns something true, and return that.

    Args:
        condition: called repeatedly.
        timeout_s: seconds after which to give up.
        message: text of the error, or a function that returns it and is called only when the wait fails.

    Raises:
        TimeoutError: if the condition is not met in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if result := condition():
            return result
        if time.monotonic() > deadline:
            text = message if isinstance(message, str) else message()
            raise TimeoutError(text or f"The condition was not met within {timeout_s:g} s.")
        time.sleep(_POLL_INTERVAL_S)
