"""Garbage collection in processes that hold many objects for long."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""Number of new objects that start a collection. Python's default is 700."""


def collect_rarely() -> None:
    """Leave all current objects out of garbage collections, and start them after more new objects.

    With Python's defaults, a process with thousands of open requests scans objects again and again that are still in
    use. Reference counting frees nearly all of those that are not.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
