"""A queue of jobs to reconcile.

A key is processed by at most one worker at a time, however often it is added.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Hashable
from typing import Generic, TypeVar

_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 60.0

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Keys with due times, for one asyncio event loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        """When each key is due next. Entries of the heap with another time are outdated."""
        self._processing: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._sequence = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that are due now or later."""
        return len(self._due)

    def add(self, key: Key, after: float = 0.0) -> None:
        """Make *key* due after this many seconds, unless it is due sooner."""
        due = asyncio.get_running_loop().time() + after
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._changed.set()

    def discard(self, key: Key) -> None:
        """Remove *key* and the record of its failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """Wait for a key that is due and not being processed; pass it to :meth:`done` or :meth:`retry` afterwards."""
        while True:
            self._changed.clear()
            timeout = None
            now = asyncio.get_running_loop().time()
            processing = []
            found = None
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)
                elif due > now:
                    timeout = due - now
                    break
                elif key in self._processing:
                    processing.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)
                    found = key
                    break
            for entry in processing:
                heapq.heappush(self._heap, entry)
            if found is not None:
                del self._due[found]
                self._processing.add(found)
                return found
            waiter = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiter}, timeout=timeout)
            finally:
                waiter.cancel()

    def done(self, key: Key) -> None:
        """Record that *key* was processed successfully."""
        self._failures.pop(key, None)
        self._processing.discard(key)
        self._changed.set()

    def retry(self, key: Key) -> None:
        """Record that processing *key* failed, and make it due after a delay that doubles with each failure."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        self._processing.discard(key)
        delay = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** (count - 1))
        self.add(key, delay * random.uniform(0.8, 1.2))
        self._changed.set()
