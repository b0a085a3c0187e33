"""Messages that cannot be decoded or processed."""

from __future__ import annotations

import logging

from rollout_store.job import Entry, JobStore, Stream

logger = logging.getLogger(__name__)


class DeadLetters:
    """Moves messages to the dead letters and counts them."""

    def __init__(self, job_store: JobStore) -> None:
        self.count = 0
        """Number of messages that this coordinator has moved."""
        self._job_store = job_store

    async def add(self, stream: Stream, entry: Entry, reason: str) -> None:
        """Move an entry of a stream to the dead letters."""
        logger.warning("Entry %s of the %s stream is moved to the dead letters: %s", entry.entry_id, stream, reason)
        self.count += 1
        await self._job_store.incoming.dead_letter(stream, entry, reason)
