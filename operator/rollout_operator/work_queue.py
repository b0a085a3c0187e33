"""Which jobs are to be looked at, and when. Each at most once at a time, however often that is asked for."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Hashable
from typing import Generic, TypeVar

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 60.0

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """For one asyncio loop."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Key]] = []
        self._when: dict[Key, float] = {}
        """When each is due next; entries of the heap that differ are out of date."""
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._count = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due or will be."""
        return len(self._when)

    def add(self, key: Key, after: float = 0.0) -> None:
        """Have *key* looked at in so many seconds, unless that happens sooner anyway."""
        when = asyncio.get_running_loop().time() + after
        if when >= self._when.get(key, float("inf")):
            return
        self._when[key] = when
        self._count += 1
        heapq.heappush(self._due, (when, self._count, key))
        self._changed.set()

    def forget(self, key: Key) -> None:
        """Nothing is to be done about *key* any more."""
        self._when.pop(key, None)
        self._failures.pop(key, None)

    async def take(self) -> Key:
        """The next key that is due and that nobody has; to be handed back by :meth:`done` or :meth:`failed`."""
        while True:
            self._changed.clear()
            wait = None
            now = asyncio.get_running_loop().time()
            held = []
            found = None
            while self._due:
                when, _, key = self._due[0]
                if self._when.get(key) != when:
                    heapq.heappop(self._due)
                elif when > now:
                    wait = when - now
                    break
                elif key in self._busy:
                    held.append(heapq.heappop(self._due))
                else:
                    heapq.heappop(self._due)
                    found = key
                    break
            for entry in held:
                heapq.heappush(self._due, entry)
            if found is not None:
                del self._when[found]
                self._busy.add(found)
                return found
            waiter = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiter}, timeout=wait)
            finally:
                waiter.cancel()

    def done(self, key: Key) -> None:
        """It was looked at."""
        self._failures.pop(key, None)
        self._busy.discard(key)
        self._changed.set()

    def failed(self, key: Key) -> None:
        """It could not be looked at: again after a pause that doubles each time."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        self._busy.discard(key)
        pause = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (count - 1))
        self.add(key, pause * random.uniform(0.8, 1.2))
        self._changed.set()
