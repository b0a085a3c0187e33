"""Clients that do not read their results."""

from __future__ import annotations

import logging

from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_store.job import JobStore

logger = logging.getLogger(__name__)


class SlowClients:
    """Finds clients with too many unread results. None of their rollouts start until they have read some."""

    def __init__(self, job_store: JobStore, tracker: RolloutTracker, max_unread_bytes: int) -> None:
        self.names: frozenset[str] = frozenset()
        """Clients with too many unread results."""
        self.unread_bytes: dict[str, int] = {}
        """Bytes of the unread results of each client with open requests."""
        self._job_store, self._tracker, self._max_unread_bytes = job_store, tracker, max_unread_bytes

    async def update(self) -> None:
        """Measure the unread results of all clients with open requests."""
        clients = list(self._tracker.clients)
        sizes = await self._job_store.results.unread_bytes(clients)
        self.unread_bytes = dict(zip(clients, sizes, strict=True))
        slow = frozenset(client for client, size in self.unread_bytes.items() if size > self._max_unread_bytes)
        for client in slow - self.names:
            logger.warning(
                "Client %s has not read %d bytes of its results, but spec.queue.maxUnreadResults is %d. None of its "
                "rollouts start until it has read some.",
                client,
                self.unread_bytes[client],
                self._max_unread_bytes,
            )
        self.names = slow
