"""Whether the job is paused."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_api.protocol.messages import PauseMode
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_store.job import EngineReport, JobStore, Order


class PauseAnnouncer:
    """Records whether the job is paused, and orders the engines to follow."""

    def __init__(self, job_store: JobStore, orders: FencedOrders) -> None:
        self.mode: PauseMode | None = None
        """How the job is paused; None if it is not."""
        self._job_store, self._orders = job_store, orders

    async def restore(self) -> None:
        """Read from Redis whether the job is paused."""
        self.mode = await self._job_store.job.pause()

    async def publish(self, mode: PauseMode | None, engines: Iterable[str]) -> None:
        """Record how the job is paused, None for not at all, and order *engines* to follow."""
        await self._job_store.job.set_pause(mode)
        self.mode = mode
        for engine in engines:
            await self._orders.send(engine, [Order.update_pause()])

    async def notify_new_engine(self, engine: str, report: EngineReport) -> None:
        """Order an engine that has just been discovered to follow, if it does not."""
        if report.paused != (self.mode or ""):
            await self._orders.send(engine, [Order.update_pause()])
