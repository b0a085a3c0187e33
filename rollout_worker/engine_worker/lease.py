"""The engine's lease: how the coordinator knows that an engine is alive."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import asdict

import redis

from rollout_store.job import EngineReport, JobStore, LeaseState, RolloutProgress
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.engine_worker.token_streams import CheckpointWriter

logger = logging.getLogger(__name__)


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
