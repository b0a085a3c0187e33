"""The lease by which the coordinator knows that an engine is alive, and the watch over the engine's process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import redis

from rollout_store.job import EngineReport, JobStore, LeaseState, RolloutProgress
from rollout_store.job.engines import EngineError
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.engine_stats import counters_of
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.engine_worker.token_streams import CheckpointWriter
from rollout_worker.policy.governor import SpeculationCutoff

logger = logging.getLogger(__name__)
ENGINE_STATS_INTERVAL_S = 1.0
"""Seconds between two reads of an engine's statistics."""
ENGINE_HANG_TIMEOUT_S = 300.0
"""Seconds after which an engine that does not answer is considered hung."""
LOADING_HANG_TIMEOUT_S = 1800.0
"""The same while the engine loads weights, because it answers only between two files or tensors."""
MAX_CUTOFF_DELAY_S = 600.0
"""Seconds for which an engine on which drafting does not pay waits for a moment without rollouts to be replaced."""


class EngineLease:
    """Registers the engine with the job, renews its lease and publishes its report.

    Each registration has an engine id of its own. When the lease was lost, the engine abandons its rollouts, which the
    coordinator has reassigned, and registers again.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        report: EngineReport,
        running: RunningRollouts,
        checkpoints: CheckpointWriter,
    ) -> None:
        self.engine_id = ""
        """Id of the current registration; '' before the first one."""
        self.report = report
        """State of the engine, published with every heartbeat."""
        self._engine, self._job_store = engine, job_store
        self._running, self._checkpoints = running, checkpoints
        self._redis_run_id = ""
        self._renewing = asyncio.Lock()

    async def register(self) -> None:
        """Register the engine, so that it receives assignments."""
        self._redis_run_id = await self._job_store.server_run_id()
        await self._begin()

    async def renew(self) -> None:
        """Renew the lease and publish the report; register again if the lease was lost.

        Does nothing before the first registration.
        """
        if not self.engine_id:
            return
        async with self._renewing:  # two concurrent renewals must not both register again
            state = await self._renew()
        if state is LeaseState.OBSERVED:
            await self._report_running()

    async def start_draining(self) -> None:
        """Tell the coordinator that the engine takes no more rollouts."""
        self.report.draining = True
        await self._job_store.engines.heartbeat(self.engine_id, self.report)

    async def release(self) -> None:
        """End the lease, so that other engines take over at once instead of when it expires."""
        try:
            await self._job_store.once.engines.release(self.engine_id)
        except redis.RedisError as error:
            logger.info("Cannot release the lease of engine %s (%s); it will expire.", self.engine_id, error)

    async def _renew(self) -> LeaseState:
        """Renew the lease, or register again; return what the lease was."""
        self._update_report()
        state, run_id = await asyncio.gather(  # in one round trip
            self._job_store.engines.heartbeat(self.engine_id, self.report),
            self._job_store.server_run_id(),
        )
        if run_id != self._redis_run_id:
            # Redis may have lost its last writes, and with them assignments or finished rollouts.
            self._redis_run_id, reason = run_id, "Redis was restarted"
            await self._job_store.engines.release(self.engine_id)
        elif state is LeaseState.LOST:
            reason = "its lease had expired"
        else:
            return state
        logger.warning(
            "Engine %s registers again because %s; its rollouts continue from their last checkpoints.",
            self.engine_id,
            reason,
        )
        self._running.abandon()
        self._checkpoints.clear()
        await self._begin()
        return state

    async def _begin(self) -> None:
        self.engine_id = f"{self.report.name}-{secrets.token_hex(4)}"
        self._update_report()
        await self._job_store.engines.heartbeat(self.engine_id, self.report, register=True)

    async def _report_running(self) -> None:
        """Publish how far the running rollouts are; a failed write is not repeated, because a later one follows."""
        now, tokens = time.time(), self._engine.running_tokens()
        progress = [
            RolloutProgress(
                request.request_id,
                sample := running.assignment.sample,
                request.problem,
                tokens.get(str(request.rollout_id(sample)), 0),
                request.sampling.max_tokens,
                now - running.started_at,
            )
            for running in self._running
            if (request := running.request) is not None
        ]
        with suppress(redis.RedisError):
            await self._job_store.once.timeline.report_running(self.engine_id, progress)

    def _update_report(self) -> None:
        self.report.counters |= asdict(self._engine.counters)
        self.report.pinned = self._running.num_pinned


class EngineMonitor:
    """Adds the drafter's statistics to the engine's report and decides when to replace the engine."""

    def __init__(
        self, engine: Engine, report: EngineReport, running: RunningRollouts, speculation_cutoff: SpeculationCutoff
    ) -> None:
        self.cutoff_reached = asyncio.Event()
        """Set when the engine should be replaced by one without speculation."""
        self._engine, self._report, self._running = engine, report, running
        self._speculation_cutoff = speculation_cutoff
        self._not_paying_since: float | None = None
        self._has_failed = False
        """Whether the statistics could not be read once, which is logged."""

    async def run(self) -> None:
        """Read the engine's statistics periodically, until cancelled.

        Raises:
            EngineError: if the engine has stopped, or does not answer.
        """
        while True:
            await asyncio.sleep(ENGINE_STATS_INTERVAL_S)
            stats = await self._read_stats()
            self._report.counters |= counters_of(stats)
            self._report.labeled_counters = stats.get("labeled_counters", {})
            if "timed_seconds" in stats and not self._report.draining:
                self._check_cutoff(stats["timed_seconds"], bool(stats["drafting_disabled"]))

    async def _read_stats(self) -> dict[str, Any]:
        started = time.monotonic()
        reading = asyncio.ensure_future(self._engine.stats())
        try:
            while not (await asyncio.wait({reading}, timeout=ENGINE_HANG_TIMEOUT_S))[0]:
                limit = ENGINE_HANG_TIMEOUT_S if self._report.loading is None else LOADING_HANG_TIMEOUT_S
                if (waited := time.monotonic() - started) >= limit:
                    raise EngineError(f"the engine hangs: it has not answered for {waited:.0f} s")
            try:
                return await reading
            except Exception as error:
                if self._engine.stopped:
                    raise
                if not self._has_failed:  # a fault of the drafter must not end the engine
                    logger.warning("Cannot read the statistics of engine %s: %s", self._report.name, error)
                self._has_failed = True
                return {}
        finally:
            reading.cancel()

    def _check_cutoff(self, seconds: float, stopped: bool) -> None:
        """Cut speculation off where it does not pay: while the engine is idle, or at the latest after a while."""
        self._speculation_cutoff.observe(
            weight_version=self._engine.weight_version, decoding_s=seconds, drafting_disabled=stopped
        )
        if not self._speculation_cutoff.is_reached:
            self._not_paying_since = None
            return
        now = time.monotonic()
        self._not_paying_since = self._not_paying_since or now
        if not self._running or now - self._not_paying_since > MAX_CUTOFF_DELAY_S:
            self.cutoff_reached.set()
