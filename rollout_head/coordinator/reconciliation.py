"""Compares the assignments in memory with Redis."""

from __future__ import annotations

import logging
from collections import defaultdict, deque

from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_store.job import JobStore, RolloutEvent
from rollout_store.job.assignments import RolloutKey

logger = logging.getLogger(__name__)

_REQUESTS_PER_STEP = 250
"""Number of requests whose progress is read in one step."""


class Reconciliation:
    """Finds the ends and returns of rollouts whose events were trimmed before the coordinator has read them.

    Rollouts that have ended are in the ledger. Rollouts that were returned are neither there nor in their engine's
    inbox. An assignment must be missing in two consecutive rounds, as it may just be on its way.

    A round consists of small steps, so that those of a job with many rollouts do not delay messages.
    """

    def __init__(self, job_store: JobStore, tracker: RolloutTracker, engines: EngineTracker) -> None:
        self._job_store, self._tracker, self._engines = job_store, tracker, engines
        self._unread_engines: deque[str] = deque()
        self._unread_requests: deque[str] = deque()
        self._missing: defaultdict[str, set[RolloutKey]] = defaultdict(set)
        """Engine id → assignments that were missing from its inbox in the last round."""

    def begin_round(self) -> None:
        """Begin a round, unless the last one has not ended yet."""
        if self._unread_engines or self._unread_requests:
            return
        self._unread_engines.extend(engine for engine, keys in self._tracker.assigned.items() if keys)
        self._unread_requests.extend(
            request_id for request_id, request in self._tracker.requests.items() if request.assigned
        )
        for engine in self._missing.keys() - set(self._unread_engines):
            del self._missing[engine]

    async def step(self) -> None:
        """Compare a part of what the round has not compared yet."""
        if self._unread_engines:
            await self._compare_inbox(self._unread_engines.popleft())
        elif self._unread_requests:
            number = min(_REQUESTS_PER_STEP, len(self._unread_requests))
            await self._compare_progress([self._unread_requests.popleft() for _ in range(number)])

    async def _compare_inbox(self, engine: str) -> None:
        orders = await self._job_store.assignments.inbox(engine)
        in_inbox = {order.assignment.key for order in orders if order.assignment is not None}
        missing = self._tracker.assigned.get(engine, set()) - in_inbox
        twice, self._missing[engine] = missing & self._missing[engine], missing
        if not twice:
            return
        # One that has ended is missing as well, and may be so twice before its event arrives.
        await self._compare_progress(sorted({request_id for request_id, _ in twice}))
        for request_id, sample in sorted(twice):
            found = self._tracker.requests.get(request_id)
            if found is not None and found.assigned.get(sample) == engine:
                logger.warning(
                    "Engine %s has returned rollout %s, and the event was missed.", engine, found.rollout_id(sample)
                )
                self._engines.requeue_returned(found, sample)

    async def _compare_progress(self, request_ids: list[str]) -> None:
        progress = await self._job_store.requests.progress(request_ids)
        for request_id, (done, _) in zip(request_ids, progress, strict=True):
            for sample in done:
                self._tracker.record_end(RolloutEvent(request_id, sample))
