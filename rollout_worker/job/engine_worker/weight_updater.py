"""Loads published weights into the engine."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.protocol.messages import WeightsKind, WeightUpdate
from rollout_api.redis_client.retry import retry_async
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.engine_worker.announcer import HistoryAnnouncer
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.engine_worker.running import RunningRollouts
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.weight_transport import UnusableWeightsError, WeightTransport

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Makes the engine serve the published weights. When they cannot be loaded, it keeps the weights that it has."""

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        transport: WeightTransport,
        lease: EngineLease,
        running: RunningRollouts,
        announcer: HistoryAnnouncer,
    ) -> None:
        self._engine, self._job_store, self._transport = engine, job_store, transport
        self._lease, self._running, self._announcer = lease, running, announcer
        self._requested = asyncio.Event()
        self._updating = asyncio.Lock()

    def request_update(self) -> None:
        """Load the published weights soon; weights that could not be loaded before are tried again."""
        self._lease.report.failed.clear()
        self._requested.set()

    async def run(self) -> None:
        """Load weights whenever an update is requested, until cancelled.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
        """
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self.update()

    async def serves(self, version: int) -> bool:
        """Return whether new rollouts are sampled with *version*, once the current update has finished."""
        if version != self._lease.report.upcoming_version:
            return False
        async with self._updating:
            return self._lease.report.version == version

    async def update(self) -> None:
        """Load the published weights that are not served yet, and report the outcome.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
        """
        async with self._updating:
            updates = await retry_async(self._job_store.job.weights)
            for update in updates:
                full = update.weights_kind is WeightsKind.FULL
                served = self._engine.full_weight_version if full else self._engine.weight_version
                if update.weight_version == served or update.weight_version in self._lease.report.failed:
                    continue
                base = updates[0].weight_version
                if not full and base not in (update.weight_version, self._engine.full_weight_version):
                    self._lease.report.loads += 1
                    self._lease.report.failed[update.weight_version] = (
                        f"the adapter needs the full weights of version {base}, which are not loaded"
                    )
                    continue
                await self._try_update(update, served)
            await self._lease.renew()

    async def _try_update(self, update: WeightUpdate, served: int) -> None:
        version, report = update.weight_version, self._lease.report
        report.loading = version
        await self._lease.renew()
        try:
            gap = await self._load(update)
            report.weights = update.identity
            logger.info("Serving weight version %d; decoding was paused for %.3f s.", version, gap)
            report.counters["weights_gap_seconds"] = gap
        except (UnusableWeightsError, EngineError) as error:
            if self._engine.stopped:
                raise
            logger.warning("Cannot load weight version %d; still serving version %d: %s", version, served, error)
            report.failed[version] = str(error)
        report.loads += 1
        report.version, report.loading = self._engine.weight_version, None

    async def _load(self, update: WeightUpdate) -> float:
        load = await self._transport.prepare(update, self._lease.engine_id)
        if update.weights_kind is WeightsKind.FULL:
            # Rollouts that are pinned to another version must end with that version.
            await self._running.wait_pinned_to_others(update.weight_version)
        gap = await load(self._engine)
        self._announcer.publish(update.weight_version)
        return gap
