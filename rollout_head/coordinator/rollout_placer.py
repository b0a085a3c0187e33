"""Placement of rollouts on engines."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.scheduler import EngineLoad
from rollout_head.coordinator.version_bounds import VersionBounds
from rollout_head.coordinator.weights import WeightAnnouncer, find_waiting_engines
from rollout_store.job import Assignment, Order


class RolloutPlacer:
    """Assigns waiting rollouts to engines."""

    def __init__(
        self,
        orders: FencedOrders,
        tracker: RolloutTracker,
        queue: RolloutQueue,
        engines: EngineTracker,
        weights: WeightAnnouncer,
    ) -> None:
        self._orders, self._tracker, self._queue, self._engines = orders, tracker, queue, engines
        self._weights = weights

    async def assign_waiting(self, slow_clients: frozenset[str]) -> None:
        """Assign the waiting rollouts that can start now, except those of slow clients."""
        if not self._queue.num_waiting:
            return
        waiting_for_weights = find_waiting_engines(self._engines.engines)
        siblings = self._siblings_of_waiting()
        loads = [
            EngineLoad(
                engine,
                report.max_running,
                len(self._tracker.assigned[engine]),
                report.upcoming_version,
                report.non_speculative,
                siblings[engine],
            )
            for engine, report in self._engines.engines.items()
            if not report.draining and engine not in waiting_for_weights
        ]
        if not loads:
            return
        by_engine: defaultdict[str, list[Order]] = defaultdict(list)
        newest = self._weights.newest_version
        for placed in self._queue.place(loads, slow_clients, self._tracker.requests, newest):
            request = self._tracker.requests[placed.request_id]
            assignment = Assignment(
                placed.request_id,
                placed.sample,
                request.entry_id,
                resumed=self._queue.may_have_partial(request.rollout_id(placed.sample)),
                oldest_version=VersionBounds.of(request.request).oldest(newest),
                is_first=request.is_first(placed.sample),
            )
            order = Order.sample(assignment, with_request=placed.engine not in request.informed)
            request.informed.add(placed.engine)
            request.started.add(placed.sample)
            by_engine[placed.engine].append(order)
        replies = await asyncio.gather(*(self._orders.send(engine, orders) for engine, orders in by_engine.items()))
        for (engine, orders), sent in zip(by_engine.items(), replies, strict=True):
            for assignment in (order.assignment for order in orders if order.assignment is not None):
                if sent:
                    self._tracker.assign(assignment.key, engine)
                else:
                    self._tracker.queue(self._tracker.requests[assignment.request_id], [assignment.sample])
            if not sent:
                self._engines.remove(engine)

    def _siblings_of_waiting(self) -> defaultdict[str, Counter[str]]:
        """Return for each engine how many siblings of waiting samples are assigned to it, by the name of the group."""
        siblings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for group in self._queue.probed_groups():
            for engine, count in self._tracker.groups.named(group).assigned.items():
                siblings[engine][group] = count
        return siblings
