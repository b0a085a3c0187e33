"""Orders to engines about weights, pauses and cancellations, and the state that they make engines follow."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rollout_api.protocol.messages import FinishReason, InitWeightTransfer, PauseMode, WeightUpdate
from rollout_head.coordinator.open_requests import OpenRequest
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.job import JobStore, Order, StaleCoordinatorError


class EngineOrders:
    """Sends orders to engines for as long as this coordinator is the newest.

    Its methods raise :class:`StaleCoordinatorError` if another coordinator has taken over.
    """

    def __init__(self, state: CoordinatorState, job_store: JobStore) -> None:
        self._state, self._job_store = state, job_store

    async def take_over(self) -> None:
        """Become the job's coordinator, and read from Redis what the engines should follow."""
        self._state.coordinator = await self._job_store.assignments.take_over()
        self._state.weights = await self._job_store.job.weights()
        self._state.transfer_group = await self._job_store.job.transfer_group()
        self._state.pause_mode = await self._job_store.job.pause()

    async def check_current(self) -> None:
        """Check that no other coordinator has taken over."""
        if await self._job_store.assignments.current_coordinator() > self._state.coordinator:
            raise StaleCoordinatorError("another coordinator has taken over")

    async def send(self, orders: Mapping[str, Sequence[Order]]) -> list[str]:
        """Send each engine its orders, and return the engines that get none because their lease has expired."""
        replies = await asyncio.gather(
            *(
                self._job_store.assignments.send(self._state.coordinator, engine, orders_of_engine)
                for engine, orders_of_engine in orders.items()
            )
        )
        return [engine for engine, sent in zip(orders, replies, strict=True) if not sent]

    async def reclaim(self, engine: str) -> list[Order] | None:
        """Remove an engine whose lease has expired; return its orders, or None if it has a lease again."""
        return await self._job_store.assignments.reclaim(self._state.coordinator, engine)

    async def publish_weights(self, update: WeightUpdate) -> None:
        """Record an update, and order the engines to load it."""
        await self._job_store.job.set_weights(self._state.coordinator, update)
        self._state.weights = await self._job_store.job.weights()
        await self._send_all(self._state.engines, Order.update_weights())

    async def init_transfer(self, group: InitWeightTransfer) -> None:
        """Record a trainer's group, and order the engines that are its members to join it."""
        await self._job_store.job.set_transfer_group(self._state.coordinator, group)
        self._state.transfer_group = group
        members = [engine for engine in group.engines if engine in self._state.engines]
        await self._send_all(members, Order.init_transfer())

    async def pause(self, mode: PauseMode | None) -> None:
        """Record how the job is paused, None for not at all, and order the engines to follow."""
        await self._job_store.job.set_pause(self._state.coordinator, mode)
        self._state.pause_mode = mode
        await self._send_all(self._state.engines, Order.update_pause())

    async def cancel(self, requests: Iterable[OpenRequest]) -> None:
        """End the rollouts of requests that are recorded as cancelled; the engines return what they have of them."""
        orders: defaultdict[str, list[Order]] = defaultdict(list)
        for request in requests:
            request.cancelled = True
            self._state.end_waiting(request, FinishReason.CANCELLED)
            for engine in set(request.assigned.values()):
                orders[engine].append(Order.cancel(request.request_id))
        await self.send(orders)

    async def inform_new_engine(self, engine: str) -> None:
        """Order an engine that has just been discovered to do what it has not done yet.

        It joins the trainer's group if it is a member, loads the weights if it neither serves nor loads them, and
        pauses or resumes.
        """
        state, report, orders = self._state, self._state.engines[engine], []
        group, desired = state.transfer_group, state.desired_version
        if group is not None and engine in group.engines and report.transfer_group != group.group:
            orders.append(Order.init_transfer())
        if desired is not None and report.upcoming_version != desired and desired not in report.failed:
            orders.append(Order.update_weights())
        if report.paused != (state.pause_mode or ""):
            orders.append(Order.update_pause())
        if orders:
            await self.send({engine: orders})

    async def _send_all(self, engines: Iterable[str], order: Order) -> None:
        await self.send({engine: [order] for engine in engines})
