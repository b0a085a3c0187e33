"""Clients that do not read their results."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.redis_client.retry import retry_async
from rollout_worker.job.coordinator.rollout_tracker import RolloutTracker
from rollout_worker.job.job_store import JobStore

logger = logging.getLogger(__name__)


class SlowClients:
    """Finds clients with too many unread results. None of their rollouts start until they have read some."""

    def __init__(self, job_store: JobStore, tracker: RolloutTracker, max_unread_bytes: int) -> None:
        self.names: frozenset[str] = frozenset()
        """Clients with too many unread results."""
        self.unread: dict[str, int] = {}
        """Number of unread results of each client with open requests."""
        self._job_store, self._tracker, self._max_unread_bytes = job_store, tracker, max_unread_bytes

    async def update(self) -> None:
        """Count the unread results of all clients with open requests."""
        clients = list(self._tracker.clients)
        counts = await asyncio.gather(*(retry_async(self._job_store.results.unread, client) for client in clients))
        unread = dict(zip(clients, counts, strict=True))
        slow = frozenset(client for client, results in unread.items() if results.size_bytes > self._max_unread_bytes)
        for client in slow - self.names:
            logger.warning(
                "Client %s has %d unread results (%d bytes, but spec.queue.maxUnreadResults is %d). None of its "
                "rollouts start until it has read some.",
                client,
                *unread[client],
                self._max_unread_bytes,
            )
        self.names = slow
        self.unread = {client: results.num_results for client, results in unread.items()}
