"""The weights that the engines should serve."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from rollout_api.protocol.messages import InitWeightTransfer, WeightUpdate
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_store.job import EngineReport, JobStore, Order


class WeightAnnouncer:
    """Records published weights and orders the engines to load them."""

    def __init__(self, job_store: JobStore, orders: FencedOrders) -> None:
        self._job_store, self._orders = job_store, orders
        self._updates: list[WeightUpdate] = []
        self._group: InitWeightTransfer | None = None

    @property
    def desired_version(self) -> int | None:
        """Weight version that the engines should serve; None if none was published."""
        return self._updates[-1].weight_version if self._updates else None

    @property
    def newest_version(self) -> int:
        """Newest published weight version; 0 is the model that the job started with."""
        return self.desired_version or 0

    async def restore(self) -> None:
        """Read the published weights and the trainer's group from Redis."""
        self._updates = await self._job_store.job.weights()
        self._group = await self._job_store.job.transfer_group()

    async def publish(self, update: WeightUpdate, engines: Iterable[str]) -> None:
        """Record an update and order *engines* to load it."""
        await self._job_store.job.set_weights(update)
        await self.restore()
        for engine in engines:
            await self._orders.send(engine, [Order.update_weights()])

    async def init_transfer(self, group: InitWeightTransfer, engines: Container[str]) -> None:
        """Record a trainer's group, and order its members among *engines* to join it."""
        await self._job_store.job.set_transfer_group(group)
        self._group = group
        for engine in group.engines:
            if engine in engines:
                await self._orders.send(engine, [Order.init_transfer()])

    async def notify_new_engine(self, engine: str, report: EngineReport) -> None:
        """Order an engine that has just been discovered to do what it has not done yet.

        It joins the trainer's group if it is a member, and loads the weights if it neither serves nor loads them.
        """
        group, desired = self._group, self.desired_version
        if group is not None and engine in group.engines and report.transfer_group != group.group:
            await self._orders.send(engine, [Order.init_transfer()])
        if desired is not None and report.upcoming_version != desired and desired not in report.failed:
            await self._orders.send(engine, [Order.update_weights()])


def find_waiting_engines(engines: Mapping[str, EngineReport]) -> set[str]:
    """Return the engines that get no rollouts because they have missed weights that another engine serves.

    If no engine serves them, they serve the weights that they have.
    """
    return {
        engine
        for engine, report in engines.items()
        if report.missed is not None and any(other.has_full_weights(report.missed) for other in engines.values())
    }
