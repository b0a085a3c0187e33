"""The engine's inbox: the stream of orders from the coordinator."""

from __future__ import annotations

from rollout_api.protocol.messages import FinishReason
from rollout_api.redis_client.retry import retry_async
from rollout_worker.job.engine_worker.executor import RolloutExecutor
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.engine_worker.pause_updater import PauseUpdater
from rollout_worker.job.engine_worker.running import RunningRollouts
from rollout_worker.job.engine_worker.weight_updater import WeightUpdater
from rollout_worker.job.job_store import JobStore, Order, OrderKind
from rollout_worker.job.limits import INBOX_READ_TIMEOUT_S, ORDERS_PER_READ


class InboxReader:
    """Reads the coordinator's orders and gives them to the engine's other parts."""

    def __init__(
        self,
        job_store: JobStore,
        lease: EngineLease,
        running: RunningRollouts,
        executor: RolloutExecutor,
        weights: WeightUpdater,
        pause: PauseUpdater,
    ) -> None:
        self._job_store, self._lease, self._running = job_store, lease, running
        self._executor, self._weights, self._pause = executor, weights, pause

    async def run(self) -> None:
        """Execute orders until cancelled."""
        engine_id, cursor = "", "0"
        while True:
            if engine_id != self._lease.engine_id:  # each registration has an inbox of its own
                engine_id, cursor = self._lease.engine_id, "0"
            orders, cursor = await retry_async(self._read, engine_id, cursor)
            for order in orders:
                if engine_id == self._lease.engine_id:
                    await self._execute(order)

    async def _read(self, engine_id: str, cursor: str) -> tuple[list[Order], str]:
        return await self._job_store.assignments.read_inbox(
            engine_id, cursor, timeout_s=INBOX_READ_TIMEOUT_S, max_orders=ORDERS_PER_READ
        )

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
        elif order.kind is OrderKind.INIT_TRANSFER:
            self._weights.request_join()
        elif order.kind is OrderKind.UPDATE_PAUSE:
            self._pause.request_update()
        await retry_async(self._job_store.assignments.acknowledge, self._lease.engine_id, order.order_id)
