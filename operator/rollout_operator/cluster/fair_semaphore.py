"""Limits how much is done at the same time, and shares it fairly between groups."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """A semaphore that no group can occupy as a whole, for one asyncio event loop.

    A free place goes to the waiting group that holds the fewest places; groups with equally many take turns. Within a
    group, the first to come is the first to be served.
    """

    def __init__(self, places: int, places_per_group: int) -> None:
        """Create a semaphore with a number of places, of which each group may hold only some at the same time."""
        self._free, self._places_per_group = places, places_per_group
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Whoever waits, by group. The group that was served last comes last."""

    @property
    def num_waiting(self) -> int:
        """Number of those that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def hold(self, group: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it for the duration of the context."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            # Whoever is cancelled while waiting may just have been granted a place.
            if not granted.cancelled():
                self._free += 1
                self._held[group] -= 1
                self._grant()

    def _grant(self) -> None:
        while self._free:
            eligible = [group for group in self._waiting if self._held[group] < self._places_per_group]
            if not eligible:
                return
            group = min(eligible, key=self._held.__getitem__)
            waiting = self._waiting.pop(group)
            granted = waiting.popleft()
            if waiting:
                self._waiting[group] = waiting
            if not granted.cancelled():
                self._free -= 1
                self._held[group] += 1
                granted.set_result(None)
