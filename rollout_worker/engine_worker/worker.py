"""One engine's part of a job: it executes the coordinator's orders. It needs Redis to continue, but no coordinator."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import FinishReason, PauseMode
from rollout_store.history.store import HistoryStore
from rollout_store.job import EngineReport, JobStore, Order, OrderKind
from rollout_store.job.assignments import RolloutKey
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.executor import RequestCache, RolloutExecutor
from rollout_worker.engine_worker.history_prefetcher import HistoryPrefetcher
from rollout_worker.engine_worker.lease import EngineLease, EngineMonitor
from rollout_worker.engine_worker.published_weights import PublishedWeights, WeightDirectories
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.engine_worker.token_streams import CheckpointWriter, TokenStreams
from rollout_worker.policy.governor import SpeculationCutoff

logger = logging.getLogger(__name__)

INBOX_READ_TIMEOUT_S = 1.0
"""Maximum seconds for which an engine waits for new orders."""
ORDERS_PER_READ = 256
"""Maximum number of orders in one read."""
HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two heartbeats of an engine."""
HANDOVER_TIMEOUT_S = 4.0
"""Seconds that stopped rollouts have to write their checkpoints; longer than writing all of them takes."""


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
            try:
                mode = await self._job_store.job.pause()
            except ValueError as error:  # of a coordinator of another version
                logger.error("The engine cannot follow the job's record of its pause: %s", error)
                continue
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
        if mode is not None and mode.sleep_level:
            await self._engine.sleep(mode.sleep_level)
            logger.info("The engine sleeps.")
        else:
            await self._engine.wake()
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
        weights: PublishedWeights,
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
            self._weights.request_load()
        elif order.kind is OrderKind.INIT_TRANSFER:
            self._weights.request_transfer_init()
        elif order.kind is OrderKind.UPDATE_PAUSE:
            self._pause.request_update()
        await self._job_store.assignments.acknowledge(self._lease.engine_id, order.order_id)


class EngineWorker:
    """Connects one engine to a job.

    The worker renews its own lease, checkpoints its rollouts, answers clients and loads new weights by itself; only
    new work needs the coordinator. This class starts and stops the parts that do so. Each owns its state:

    - :class:`InboxReader` reads the coordinator's orders,
    - :class:`RolloutExecutor` produces the assigned rollouts,
    - :class:`CheckpointWriter` writes their partials,
    - :class:`TokenStreams` writes the tokens of those that are streamed,
    - :class:`PublishedWeights` loads published weights,
    - :class:`PauseUpdater` pauses and resumes the engine,
    - :class:`HistoryPrefetcher` tells the drafter which histories it needs,
    - :class:`EngineMonitor` reads the engine's statistics, and
    - :class:`EngineLease` publishes the engine's report and renews its lease.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        store: HistoryStore,
        *,
        name: str,
        worker: str,
        max_running: int,
        checkpoint_tokens: int,
        sampling: Sampling,
        directories: WeightDirectories,
        speculation_disabled: bool = False,
        speculation_cutoff: SpeculationCutoff | None = None,
    ) -> None:
        """Create a worker; :meth:`run` starts it.

        The caller has started the *engine*, and closes it. Its *name* stays the same over its restarts. The process
        *worker* may tell it to leave; '' if there is none. At most *checkpoint_tokens* tokens of a rollout are lost
        with it. *speculation_disabled* says that it has no speculation because drafting did not pay.
        """
        non_speculative = engine.config.drafting is None and not speculation_disabled
        report = EngineReport(
            name, worker, os.getpid(), max_running, non_speculative, speculation_disabled, engine.weight_version
        )
        report.full_version, report.ranks = engine.full_weight_version, engine.config.ranks
        report.transfer_backend = engine.config.weight_transfer
        report.can_sleep = engine.config.can_sleep
        self.speculation_cut_off = False
        """Whether the worker has ended so that an engine without speculation can take its place."""
        self._engine, self._job_store = engine, job_store
        self._running = RunningRollouts()
        self._checkpoints = CheckpointWriter(job_store)
        self._token_streams = TokenStreams(job_store)
        self._prefetcher = HistoryPrefetcher(engine, store, job_store.keys.uid)
        self._lease = EngineLease(engine, job_store, report, self._running, self._checkpoints)
        self._weights = PublishedWeights(engine, job_store, directories, self._lease, self._running, self._prefetcher)
        self._executor = RolloutExecutor(
            engine,
            job_store,
            lease=self._lease,
            running=self._running,
            requests=RequestCache(job_store, sampling),
            checkpoints=self._checkpoints,
            token_streams=self._token_streams,
            prefetcher=self._prefetcher,
            weights=self._weights,
            checkpoint_tokens=checkpoint_tokens,
        )
        self._pause = PauseUpdater(engine, job_store, self._lease)
        self._inbox = InboxReader(job_store, self._lease, self._running, self._executor, self._weights, self._pause)
        self._monitor = EngineMonitor(engine, report, self._running, speculation_cutoff or SpeculationCutoff())
        self._draining: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()

    @property
    def engine_id(self) -> str:
        """Id of the engine's current registration; '' before it is registered."""
        return self._lease.engine_id

    @property
    def report(self) -> EngineReport:
        """What the engine reports with its heartbeats."""
        return self._lease.report

    @property
    def running(self) -> frozenset[RolloutKey]:
        """Request id and sample of the rollouts that the engine is producing."""
        return self._running.keys

    async def run(self, on_serving: Callable[[], None] = lambda: None) -> None:
        """Serve until :meth:`drain` has completed.

        Once the engine is registered and can be given work, *on_serving* is called.

        Raises:
            EngineError: if the engine has died; its rollouts continue on other engines.
        """
        await self._executor.synchronize_clock()
        await self._weights.load()  # before the engine takes any work
        await self._lease.register()
        on_serving()
        loops = [
            asyncio.ensure_future(loop)
            for loop in (
                self._inbox.run(),
                self._executor.run(),
                self._checkpoints.run(),
                self._token_streams.run(),
                self._weights.run(),
                self._weights.run_transfer_inits(),
                self._pause.run(),
                self._prefetcher.run(),
                self._monitor.run(),
                self._send_heartbeats(),
                self._leave_at_speculation_cutoff(),
                self._drained.wait(),
            )
        ]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
        finally:
            await cancel_and_wait(*loops, *self._running.tasks)
            await self._lease.release()

    async def drain(self, grace: float) -> None:
        """Take no more work, hand over what has not finished after *grace* seconds, and end :meth:`run`."""
        await self._lease.start_draining()
        await self._running.hand_over(grace=grace, checkpoint_timeout=HANDOVER_TIMEOUT_S)
        self._drained.set()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            _, grace = await asyncio.gather(  # in one round trip
                self._lease.renew(), self._job_store.engines.shutdown_grace(self._lease.report.worker)
            )
            if grace is not None and not self._lease.report.draining:
                self._draining = asyncio.ensure_future(self.drain(grace))

    async def _leave_at_speculation_cutoff(self) -> None:
        await self._monitor.cutoff_reached.wait()
        logger.warning(
            "Drafting has not paid on engine %s for long; an engine without speculation takes its place.",
            self._lease.engine_id,
        )
        self.speculation_cut_off = True
        await self.drain(0.0)
