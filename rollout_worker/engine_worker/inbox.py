"""The engine's inbox, which is the stream of orders from the coordinator, and the order to pause."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.messages import FinishReason, PauseMode
from rollout_store.job import JobStore, Order, OrderKind
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.executor import RolloutExecutor
from rollout_worker.engine_worker.lease import EngineLease
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.engine_worker.weight_updater import WeightUpdater

logger = logging.getLogger(__name__)

INBOX_READ_TIMEOUT_S = 1.0
"""Maximum seconds for which an engine waits for new orders."""
ORDERS_PER_READ = 256
"""Maximum number of orders in one read."""


class PauseUpdater:
    """Pauses and resumes the engine as the job's record says, and reports it."""

    def __init__(self, engine: Engine, job_store: JobStore, lease: EngineLease) -> None:
        self._engine, self._job_store, self._lease = engine, job_store, lease
        self._requested = asyncio.Event()

    def request_update(self) -> None:
        """Follow the job's record soon."""
        self._requested.set()

    async def run(self) -> None:
        """Follow the job's record whenever it is requested, until cancelled.

        Raises:
            EngineError: if the engine has died.
        """
        while True:
            await self._requested.wait()
            self._requested.clear()
            mode = await self._job_store.job.pause()
            applying = asyncio.ensure_future(self._apply(mode))
            requested = asyncio.ensure_future(self._requested.wait())
            try:
                # Waiting for running rollouts ends when the job is resumed.
                await asyncio.wait((applying, requested), return_when=asyncio.FIRST_COMPLETED)
                if applying.done():
                    applying.result()
            finally:
                await cancel_and_wait(applying, requested)

    async def _apply(self, mode: PauseMode | None) -> None:
        if mode is None:
            await self._engine.resume()
            logger.info("The engine is resumed.")
        else:
            await self._engine.pause(finish_running=mode is PauseMode.WAIT)
            logger.info("The engine is paused.")
        self._lease.report.paused = mode or ""
        await self._lease.renew()


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
        if order.kind is OrderKind.CANCEL:
            self._running.stop_request(order.request_id, FinishReason.CANCELLED)
        elif order.kind is OrderKind.UPDATE_WEIGHTS:
            self._weights.request_update()
        elif order.kind is OrderKind.INIT_TRANSFER:
            self._weights.request_join()
        elif order.kind is OrderKind.UPDATE_PAUSE:
            self._pause.request_update()
        await self._job_store.assignments.acknowledge(self._lease.engine_id, order.order_id)
