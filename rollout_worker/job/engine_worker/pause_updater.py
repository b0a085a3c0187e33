"""Pauses and resumes the engine with its job."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.messages import PauseMode
from rollout_worker.engine.engine import Engine
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.job_store import JobStore

logger = logging.getLogger(__name__)


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
