"""One engine's part of a job. It needs Redis to continue, but no coordinator."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.spec import Sampling
from rollout_store.history.store import HistoryStore
from rollout_store.job import EngineReport, JobStore
from rollout_store.job.assignments import RolloutKey
from rollout_store.job.limits import HANDOVER_TIMEOUT_S, HEARTBEAT_INTERVAL_S
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.announcer import HistoryAnnouncer
from rollout_worker.engine_worker.executor import RequestCache, RolloutExecutor
from rollout_worker.engine_worker.inbox import InboxReader, PauseUpdater
from rollout_worker.engine_worker.lease import EngineLease
from rollout_worker.engine_worker.monitor import EngineMonitor
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.engine_worker.token_streams import CheckpointWriter, TokenStreams
from rollout_worker.engine_worker.weight_directories import WeightDirectories
from rollout_worker.engine_worker.weight_updater import WeightUpdater
from rollout_worker.policy.governor import SpeculationCutoff

logger = logging.getLogger(__name__)


class EngineWorker:
    """Connects one engine to a job.

    The worker renews its own lease, checkpoints its rollouts, answers clients and loads new weights by itself; only
    new work needs the coordinator. This class starts and stops the parts that do so. Each owns its state:

    - :class:`InboxReader` reads the coordinator's orders,
    - :class:`RolloutExecutor` produces the assigned rollouts,
    - :class:`CheckpointWriter` writes their partials,
    - :class:`TokenStreams` writes the tokens of those that are streamed,
    - :class:`WeightUpdater` loads published weights,
    - :class:`PauseUpdater` pauses and resumes the engine,
    - :class:`HistoryAnnouncer` tells the drafter which histories it needs,
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

        Args:
            engine: a started engine, which the caller closes.
            job_store: the job's state in Redis.
            store: the job's history.
            name: name of the engine, which stays the same over its restarts.
            worker: id of the worker process on this machine that may tell the engine to leave; '' if there is none.
            max_running: maximum number of rollouts that the engine decodes at once.
            checkpoint_tokens: maximum number of tokens of a rollout that are lost with this engine.
            sampling: the job's sampling settings, which a request may override.
            directories: finds published weights.
            speculation_disabled: whether the engine has no speculation because drafting did not pay.
            speculation_cutoff: decides when drafting has not paid for too long.
        """
        non_speculative = engine.config.drafting is None and not speculation_disabled
        report = EngineReport(
            name, worker, os.getpid(), max_running, non_speculative, speculation_disabled, engine.weight_version
        )
        report.full_version, report.ranks = engine.full_weight_version, engine.config.ranks
        report.transfer_backend = engine.config.weight_transfer
        self.speculation_cut_off = False
        """Whether the worker has ended so that an engine without speculation can take its place."""
        self._engine, self._job_store = engine, job_store
        self._running = RunningRollouts()
        self._checkpoints = CheckpointWriter(job_store)
        self._token_streams = TokenStreams(job_store)
        self._announcer = HistoryAnnouncer(engine, store, job_store.keys.uid)
        self._lease = EngineLease(engine, job_store, report, self._running, self._checkpoints)
        self._weights = WeightUpdater(engine, job_store, directories, self._lease, self._running, self._announcer)
        self._executor = RolloutExecutor(
            engine,
            job_store,
            lease=self._lease,
            running=self._running,
            requests=RequestCache(job_store, sampling),
            checkpoints=self._checkpoints,
            token_streams=self._token_streams,
            announcer=self._announcer,
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

        Args:
            on_serving: called once the engine is registered and can be given work.

        Raises:
            EngineError: if the engine has died; its rollouts continue on other engines.
        """
        await self._executor.synchronize_clock()
        await self._weights.update()  # before the engine takes any work
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
                self._weights.run_joins(),
                self._pause.run(),
                self._announcer.run(),
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
