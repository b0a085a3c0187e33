"""The engines of a job: which ones are alive, and what becomes of the rollouts of those that are lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from rollout_head.coordinator.answers import Answers
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.limits import CoordinatorLimits
from rollout_store.job import EngineReport, JobStore, RolloutEvent
from rollout_store.job.assignments import RolloutKey

logger = logging.getLogger(__name__)


class EngineTracker:
    """Tracks the live engines and requeues the rollouts of engines that were lost, have left or returned them."""

    def __init__(
        self,
        job_store: JobStore,
        orders: FencedOrders,
        tracker: RolloutTracker,
        queue: RolloutQueue,
        answers: Answers,
        limits: CoordinatorLimits,
    ) -> None:
        self.engines: dict[str, EngineReport] = {}
        """Last reports of the engines with a valid lease, by engine id."""
        self.num_lost = 0
        """Number of engines that this coordinator has lost."""
        self._job_store, self._orders, self._limits = job_store, orders, limits
        self._tracker, self._queue, self._answers = tracker, queue, answers

    async def update(self) -> list[str]:
        """Read the engines' leases and reports, and reclaim the rollouts of lost engines.

        Returns:
            Ids of the engines that were discovered.
        """
        registered = await self._job_store.engines.engines()
        alive = {engine: report for engine, (report, alive) in registered.items() if alive}
        discovered = [engine for engine in alive if engine not in self.engines]
        for engine in discovered:
            logger.info("Engine %s has joined.", engine)
        self.engines = alive
        await self.reclaim({engine: report for engine, (report, alive) in registered.items() if not alive})
        return discovered

    def remove(self, engine: str) -> None:
        """Forget an engine whose lease has expired, until the next update."""
        self.engines.pop(engine, None)

    def clear(self) -> None:
        """Forget all engines, until the next update."""
        self.engines.clear()

    async def reclaim(self, lost: Mapping[str, EngineReport]) -> None:
        """Requeue the rollouts of engines whose lease has expired."""
        for engine, report in lost.items():
            orders = await self._orders.reclaim(engine)
            self.remove(engine)
            if orders is None:
                continue
            keys = self._tracker.assigned.pop(engine, set())
            keys |= {order.assignment.key for order in orders if order.assignment is not None}
            if report.draining:
                logger.info("Engine %s has left; %d rollouts continue on other engines.", engine, len(keys))
            else:
                logger.warning("Engine %s was lost; %d rollouts continue on other engines.", engine, len(keys))
                self.num_lost += 1
            await self._requeue(keys, lost=not report.draining)

    async def _requeue(self, keys: Iterable[RolloutKey], *, lost: bool) -> None:
        """Queue rollouts again, except those that have ended, were cancelled, or have failed too often.

        Args:
            keys: the rollouts.
            lost: whether their engine was lost, which may be the fault of one of them.
        """
        self._queue.add_partials(await self._job_store.rollouts.partial_ids())
        unfinished: list[tuple[OpenRequest, int]] = []
        for request_id, sample in sorted(keys):
            self._tracker.unassign((request_id, sample))
            request = self._tracker.requests.get(request_id)
            if request is not None and sample not in request.done:
                unfinished.append((request, sample))
        # A rollout that has just ended is in the ledger, but its event may not have arrived yet.
        progress = await self._job_store.requests.progress([request.request_id for request, _ in unfinished])
        open_samples = []
        for (request, sample), (done, _) in zip(unfinished, progress, strict=True):
            if sample in done:
                self._tracker.record_end(RolloutEvent(request.request_id, sample))
            else:
                open_samples.append((request, sample))
        if lost:
            ids = [request.rollout_id(sample) for request, sample in open_samples]
            counts = await self._job_store.assignments.count_losses(ids)
            self._queue.set_loss_counts(dict(zip(ids, counts, strict=True)))
        for request, sample in open_samples:
            losses = self._queue.loss_count(request.rollout_id(sample))
            if losses >= self._limits.max_losses:
                self._answers.fail(request, sample, f"{losses} engines were lost with it before it made any progress")
            elif request.cancelled:
                self._answers.cancel(request, sample)
            else:
                self._tracker.queue(request, [sample])

    def apply_event(self, event: RolloutEvent) -> None:
        """Record that a rollout has ended, or queue it again if its engine has returned it."""
        if event.returned_by is None:
            self._tracker.record_end(event)
            return
        request = self._tracker.requests.get(event.request_id)
        if request is not None and request.assigned.get(event.sample) == event.returned_by:
            self.requeue_returned(request, event.sample)

    def requeue_returned(self, request: OpenRequest, sample: int) -> None:
        """Queue a rollout again that its engine has returned."""
        self._tracker.unassign((request.request_id, sample))
        if sample in request.done:
            return
        self._queue.add_partials({request.rollout_id(sample)})
        if request.cancelled:
            self._answers.cancel(request, sample)
        else:
            self._tracker.queue(request, [sample])
