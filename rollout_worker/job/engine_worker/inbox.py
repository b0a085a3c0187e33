"""The engine's inbox: the stream of orders from the coordinator."""

from __future__ import annotations

from rollout_api.protocol.messages import FinishReason
from rollout_worker.job.engine_worker.executor import RolloutExecutor
from rollout_worker.job.engine_worker.group_joiner import GroupJoiner
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.engine_worker.pause_updater import PauseUpdater
from rollout_worker.job.engine_worker.running import RunningRollouts
from rollout_worker.job.engine_worker.weight_updater import WeightUpdater
from rollout_worker.job.job_store import JobStore, Order, OrderKind
from rollout_worker.job.limits import INBOX_READ_TIMEOUT_S, ORDERS_PER_READ


class InboxReader:
    """Reads the coordinator's orders and passes them on."""

    def __init__(
        self,
        job_store: JobStore,
        lease: EngineLease,
        running: RunningRollouts,
        executor: RolloutExecutor,
        weights: WeightUpdater,
        groups: GroupJoiner,
        pause: PauseUpdater,
    ) -> None:
        self._job_store, self._lease, self._running = job_store, lease, running
        self._executor, self._weights, self._groups, self._pause = executor, weights, groups, pause

    async def run(self) -> None:
        """Execute orders until cancelled."""
        engine_id, cursor = "", "0"
        while True:
            if engine_id != self._lease.engine_id:  # each registration has an inbox of its own
                engine_id, cursor = self._lease.engine_id, "0"
            orders, cursor = await self._job_store.assignments.read_inbox(
                engine_id, cursor, timeout_s=INBOX_READ_TIMEOUT_S, max_orders=ORDERS_PER_READ
            )
            for order in orders:
                if engine_id == self._lease.engine_id:
                    await self._execute(order)

    async def _execute(self, order: Order) -> None:
        if order.kind is OrderKind.SAMPLE and order.assignment is not None:
            # The order stays in the inbox until the rollout has ended, so that it can be reclaimed.
            await self._executor.start(order, order.assignment)
            return
        if order.kind is OrderKind.MIGRATE and order.assignment is not None:
            running = self._running.get(order.assignment.key)
            if running is not None:
                running.migrate()
        elif order.kind is OrderKind.CANCEL:
            self._running.stop_request(order.request_id, FinishReason.CANCELLED)
        elif order.kind is OrderKind.UPDATE_WEIGHTS:
            self._weights.request_update()
        elif order.kind is OrderKind.SEND_WEIGHTS:
            self._weights.request_passing(order.target, order.weight_version)
        elif order.kind is OrderKind.KEEP_WEIGHTS:
            await self._weights.report_missing_source(order.weight_version)
        elif order.kind is OrderKind.JOIN_GROUP:
            self._groups.request_update()
        elif order.kind is OrderKind.UPDATE_PAUSE:
            self._pause.request_update()
        await self._job_store.assignments.acknowledge(self._lease.engine_id, order.order_id)
