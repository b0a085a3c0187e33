"""Checkpoints of unfinished rollouts in Redis."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.protocol.messages import Partial, RolloutRequest
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.job_store.assignments import RolloutKey

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the newest partial of each running rollout to Redis, without making the rollouts wait."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._pending: dict[RolloutKey, tuple[RolloutRequest, Partial]] = {}
        self._added = asyncio.Event()

    def add(self, key: RolloutKey, request: RolloutRequest, partial: Partial) -> None:
        """Schedule a partial to be written; it replaces an older one that is not written yet."""
        self._pending[key] = (request, partial)
        self._added.set()

    def discard(self, key: RolloutKey) -> None:
        """Forget the unwritten partial of a rollout that has ended."""
        self._pending.pop(key, None)

    def clear(self) -> None:
        """Forget all unwritten partials."""
        self._pending.clear()

    async def run(self) -> None:
        """Write partials until cancelled. A failed write is not repeated: a later partial supersedes it."""
        failing = False
        while True:
            await self._added.wait()
            self._added.clear()
            pending, self._pending = self._pending, {}
            writes = (
                self._job_store.once.rollouts.checkpoint(request, key[1], partial)
                for key, (request, partial) in pending.items()
            )
            outcomes = await asyncio.gather(*writes, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if failures and not failing:
                logger.warning(
                    "Cannot write checkpoints of running rollouts: %s. Later checkpoints will be tried.", failures[0]
                )
            failing = bool(failures)
