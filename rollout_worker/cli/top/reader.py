"""Reads what ``rollout top`` shows, again and again."""

from __future__ import annotations

import logging
import time
from typing import Any

from rollout_api.client.job_info import parse_status
from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.messages import CodecError
from rollout_api.redis_client.connection import connect_async, connect_history
from rollout_worker.cli.top.live_job import RECENT_S, LiveJob, predicted
from rollout_worker.history.length_lookup import LengthLookup
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.limits import MAX_BLOCKING_READ_S

logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 30.0
"""Seconds for which the last status is still shown after it has expired."""


class LiveJobReader:
    """Reads the state of one job. Engines report their running rollouts while it is read."""

    def __init__(self, url: str, uid: str, history_url: str = "") -> None:
        """Open the state of a job for the caller's asyncio event loop.

        Args:
            url: URL of the job's Redis.
            uid: the job's uid.
            history_url: URL of the Redis that keeps the history; empty for the job's. Without it, the lengths of the
                rollouts of a job whose history is on another server are not predicted.
        """
        self._client = connect_async(url, block=MAX_BLOCKING_READ_S)
        self._store = JobStore(self._client, MessageKeys(uid))
        self._url, self._history_url = url, history_url
        self._job: LiveJob | None = None
        self._lengths: LengthLookup | None = None
        self._last_ended = ""
        self._read_status_at = 0.0

    async def read(self) -> LiveJob | None:
        """Return the current state; None if no coordinator runs.

        Raises:
            redis.RedisError: if Redis cannot be used.
        """
        timeline = self._store.timeline
        await timeline.observe()
        published: Any = await self._client.get(self._store.keys.status)
        status = parse_status(published)
        now = time.monotonic()
        if status is None:
            if now - self._read_status_at > _STATUS_INTERVAL_S:
                self._job = None
            return self._job
        self._read_status_at = now
        if self._job is None:
            self._job = LiveJob(status)
            await self._begin(self._job)
        self._job.status = status
        progress = await timeline.running()
        problems = {one.problem_id for rollouts in progress.values() for one in rollouts}
        self._job.running = predicted(progress, await self._length_stats(problems), status["engines"])
        await self._read_ended(self._job)
        return self._job

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()

    async def _begin(self, job: LiveJob) -> None:
        """Read what has happened lately."""
        description: list[Any] = await self._client.hmget(self._store.keys.job, ["history", "history_redis"])
        history, elsewhere = (value.decode() if value else "" for value in description)
        url = self._history_url or (None if elsewhere else self._url)
        if history and url:
            store = HistoryStore.for_all_generations(connect_history(url), HistoryKeys.from_full_name(history))
            self._lengths = LengthLookup(store)
        began = int((await self._store.clock() - RECENT_S) * 1000)
        self._last_ended = f"{max(0, began)}-0"
        job.measurements.extend(await self._store.timeline.last_measurements(job.measurements.maxlen or 0))

    async def _length_stats(self, problems: set[str]) -> dict[str, LengthStats]:
        return {} if self._lengths is None or not problems else await self._lengths.fetch(problems)

    async def _read_ended(self, job: LiveJob) -> None:
        timeline = self._store.timeline
        try:
            while entries := await timeline.ended(self._last_ended):
                job.recent.extend(entry.rollout for entry in entries)
                self._last_ended = entries[-1].entry_id
            last = job.measurements[-1].time if job.measurements else 0.0
            job.measurements.extend(one for one in await timeline.last_measurements(2) if one.time > last)
        except CodecError as error:
            logger.debug("The timeline cannot be read: %s", error)
