"""The engines of a job: which ones are alive, and what becomes of the rollouts of those that are lost."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from rollout_head.coordinator.open_requests import OpenRequest
from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.job import EngineReport, JobStore, RolloutEvent
from rollout_store.job.assignments import RolloutKey

logger = logging.getLogger(__name__)

_REQUESTS_PER_STEP = 250
"""Number of requests whose progress is read in one step of a reconciliation."""


class Engines:
    """Tracks the live engines and requeues the rollouts of engines that were lost, have left or returned them."""

    def __init__(self, state: CoordinatorState, job_store: JobStore, orders: EngineOrders) -> None:
        self._state, self._job_store, self._orders = state, job_store, orders

    async def update(self) -> None:
        """Read the engines' leases and reports, inform new engines, and reclaim the rollouts of lost ones."""
        registered = await self._job_store.engines.engines()
        alive = {engine: report for engine, (report, alive) in registered.items() if alive}
        discovered = [engine for engine in alive if engine not in self._state.engines]
        for engine in discovered:
            logger.info("Engine %s has joined.", engine)
        self._state.engines = alive
        await self.reclaim({engine: report for engine, (report, alive) in registered.items() if not alive})
        for engine in discovered:
            await self._orders.inform_new_engine(engine)

    async def reclaim(self, lost: Mapping[str, EngineReport]) -> None:
        """Requeue the rollouts of engines whose lease has expired."""
        for engine, report in lost.items():
            orders = await self._orders.reclaim(engine)
            self._state.engines.pop(engine, None)
            if orders is None:
                continue
            keys = self._state.assigned.pop(engine, set())
            keys |= {order.assignment.key for order in orders if order.assignment is not None}
            if report.draining:
                logger.info("Engine %s has left; %d rollouts continue on other engines.", engine, len(keys))
            else:
                logger.warning("Engine %s was lost; %d rollouts continue on other engines.", engine, len(keys))
                self._state.num_lost_engines += 1
            await self._requeue(keys, lost=not report.draining)

    async def _requeue(self, keys: Iterable[RolloutKey], *, lost: bool) -> None:
        """Queue rollouts again, except those that have ended, were cancelled, or have failed too often.

        Args:
            keys: the rollouts.
            lost: whether their engine was lost, which may be the fault of one of them.
        """
        state = self._state
        state.queue.add_partials(await self._job_store.rollouts.partial_ids())
        unfinished: list[tuple[OpenRequest, int]] = []
        for request_id, sample in sorted(keys):
            state.unassign((request_id, sample))
            request = state.requests.get(request_id)
            if request is not None and sample not in request.done:
                unfinished.append((request, sample))
        # A rollout that has just ended is in the ledger, but its event may not have arrived yet.
        progress = await self._job_store.requests.progress([request.request_id for request, _ in unfinished])
        open_samples = []
        for (request, sample), (done, _) in zip(unfinished, progress, strict=True):
            if sample in done:
                state.record_end(RolloutEvent(request.request_id, sample))
            else:
                open_samples.append((request, sample))
        if lost:
            ids = [request.rollout_id(sample) for request, sample in open_samples]
            counts = await self._job_store.assignments.count_losses(ids)
            state.queue.set_loss_counts(dict(zip(ids, counts, strict=True)))
        for request, sample in open_samples:
            state.requeue(request, sample)

    def apply_event(self, event: RolloutEvent) -> None:
        """Record that a rollout has ended; if its engine has returned it, queue it again or end it as failed."""
        if event.returned_by is None:
            self._state.record_end(event)
            return
        request = self._state.requests.get(event.request_id)
        if request is not None and request.assigned.get(event.sample) == event.returned_by:
            self._state.return_rollout(request, event.sample, event.failure)


class Reconciliation:
    """Finds the ends and returns of rollouts whose events were trimmed before the coordinator has read them.

    Rollouts that have ended are in the ledger. Rollouts that were returned are neither there nor in their engine's
    inbox. An assignment must be missing in two consecutive rounds, as it may just be on its way.

    A round consists of small steps, so that those of a job with many rollouts do not delay messages.
    """

    def __init__(self, state: CoordinatorState, job_store: JobStore) -> None:
        self._state, self._job_store = state, job_store
        self._unread_engines: deque[str] = deque()
        self._unread_requests: deque[str] = deque()
        self._missing: defaultdict[str, set[RolloutKey]] = defaultdict(set)
        """Engine id → assignments that were missing from its inbox in the last round."""

    def begin_round(self) -> None:
        """Begin a round, unless the last one has not ended yet."""
        if self._unread_engines or self._unread_requests:
            return
        self._unread_engines.extend(engine for engine, keys in self._state.assigned.items() if keys)
        self._unread_requests.extend(
            request_id for request_id, request in self._state.requests.items() if request.assigned
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
        missing = self._state.assigned.get(engine, set()) - in_inbox
        twice, self._missing[engine] = missing & self._missing[engine], missing
        if not twice:
            return
        # One that has ended is missing as well, and may be so twice before its event arrives.
        await self._compare_progress(sorted({request_id for request_id, _ in twice}))
        for request_id, sample in sorted(twice):
            found = self._state.requests.get(request_id)
            if found is not None and found.assigned.get(sample) == engine:
                logger.warning(
                    "Engine %s has returned rollout %s, and the event was missed.", engine, found.rollout_id(sample)
                )
                self._state.return_rollout(found, sample)

    async def _compare_progress(self, request_ids: list[str]) -> None:
        progress = await self._job_store.requests.progress(request_ids)
        for request_id, (done, _) in zip(request_ids, progress, strict=True):
            for sample in done:
                self._state.record_end(RolloutEvent(request_id, sample))
