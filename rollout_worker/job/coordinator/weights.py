"""The weights that the engines should serve."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rollout_api.protocol.messages import JoinGroup, WeightUpdate
from rollout_worker.job.coordinator.fenced_orders import FencedOrders
from rollout_worker.job.job_store import EngineReport, JobStore, Order


class WeightAnnouncer:
    """Records published weights and orders the engines to load them."""

    def __init__(self, job_store: JobStore, orders: FencedOrders) -> None:
        self._job_store, self._orders = job_store, orders
        self._updates: list[WeightUpdate] = []
        self._group: JoinGroup | None = None

    @property
    def broadcast_version(self) -> int | None:
        """Version of the full weights that the engines should have, if they are in no directory; None otherwise."""
        return next((update.weight_version for update in self._updates if update.broadcast is not None), None)

    @property
    def desired_version(self) -> int | None:
        """Weight version that the engines should serve; None if none was published."""
        return self._updates[-1].weight_version if self._updates else None

    @property
    def newest_version(self) -> int:
        """Newest published weight version; 0 is the model that the job started with."""
        return self.desired_version or 0

    async def restore(self) -> None:
        """Read the published weights and the transfer group from Redis."""
        self._updates = await self._job_store.job.weights()
        self._group = await self._job_store.job.transfer_group()

    async def publish(self, update: WeightUpdate, engines: Iterable[str]) -> None:
        """Record an update and order *engines* to load it."""
        await self._job_store.job.set_weights(update)
        await self.restore()
        for engine in engines:
            await self._orders.send(engine, [Order.update_weights()])

    async def form_group(self, group: JoinGroup, engines: Container[str]) -> None:
        """Record a transfer group, and order its members among *engines* to join it."""
        await self._job_store.job.set_transfer_group(group)
        self._group = group
        for engine in group.members:
            if engine in engines:
                await self._orders.send(engine, [Order.join_group()])

    async def notify_new_engine(self, engine: str, report: EngineReport) -> None:
        """Order an engine that has just been discovered to do what it has not done yet.

        It joins the transfer group if it is a member, and loads the weights if it neither serves nor loads them.
        """
        group, desired = self._group, self.desired_version
        if group is not None and engine in group.members and report.group != group.group:
            await self._orders.send(engine, [Order.join_group()])
        if desired is not None and report.upcoming_version != desired and desired not in report.failed:
            await self._orders.send(engine, [Order.update_weights()])
