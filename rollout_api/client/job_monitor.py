"""Watches a job on behalf of its client: its status and its end."""

from __future__ import annotations

import asyncio
import logging
import time

import redis
import redis.asyncio

from rollout_api.client.job_info import JobInfo, ended_error, parse_status
from rollout_api.client.request_queue import LOG_INTERVAL_S
from rollout_api.client.results import Results
from rollout_api.errors import JobChangedError, JobEndedError, RolloutClientError
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.status import CoordinatorStatus

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Time between two checks of the job's state."""
_COORDINATOR_GRACE_S = 5.0
"""Time without a coordinator after which it is logged that the client waits for one."""


class JobMonitor:
    """Reads the job's state about once a second.

    It tells the client's results when the job has ended, and how many rollouts are open in it.

    Args:
        client: connection to Redis.
        job: the job.
        job_name: ``namespace/name`` by which the client found the job; None if it was given the uid.
        results: the client's results.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        job: JobInfo,
        job_name: str | None,
        results: Results,
    ) -> None:
        self.status: CoordinatorStatus | None = None
        """Latest status of the job; None while no coordinator runs."""
        self._client, self._job, self._job_name = client, job, job_name
        self._results = results
        self._keys = MessageKeys(job.uid)
        self._last_status = time.monotonic()
        self._last_log = 0.0

    async def run(self) -> None:
        """Check the job until this task is cancelled."""
        while True:
            try:
                await self._check()
            except redis.RedisError:
                pass  # reads of results and writes of requests report an outage themselves
            except Exception:
                logger.exception("Checking the state of the job failed; trying again.")
            await asyncio.sleep(_INTERVAL_S)

    async def _check(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.get(self._keys.status)
        pipeline.hmget(self._keys.job, ["state", "reason"])
        if self._job_name is not None:
            pipeline.get(job_uid_key(self._job_name))
        status, description, *uid = await pipeline.execute()
        self.status = parse_status(status)
        self._log_missing_coordinator()
        state, reason = (None if value is None else value.decode() for value in description)
        self._results.observe(self.status, self._ending(uid[0] if uid else None, state, reason))

    def _ending(self, uid: bytes | None, state: str | None, reason: str | None) -> RolloutClientError | None:
        """Return why the job answers no more requests; None while it does."""
        name = self._job.name
        if uid is not None and uid.decode() != self._job.uid:
            return JobChangedError(
                f"{name} is another job now (uid {uid.decode()}, was {self._job.uid}); connect again and request the "
                "missing rollouts from it"
            )
        if state is None:
            return JobEndedError(f"job {name} is gone from Redis, and its requests with it")
        return ended_error(name, state, reason)

    def _log_missing_coordinator(self) -> None:
        now = time.monotonic()
        if self.status:
            self._last_status = now
        waiting = self._results.num_awaited
        outage = now - self._last_status
        log_is_due = now - self._last_log > LOG_INTERVAL_S
        if outage > _COORDINATOR_GRACE_S and waiting and log_is_due:
            self._last_log = now
            logger.warning(
                "Job %s has had no coordinator for %.0f s; the requests for %d rollouts are kept in Redis until it is "
                "back.",
                self._job.name,
                outage,
                waiting,
            )
