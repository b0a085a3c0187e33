"""Watches a job on behalf of its client: its status, its end, and the lease on the client's name."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import redis
import redis.asyncio

from rollout_api.client.job_info import JobInfo, ended_error, parse_status
from rollout_api.client.limits import LOG_INTERVAL_S, ClientLimits
from rollout_api.client.name_lease import NameLease
from rollout_api.client.request_sender import RequestSender
from rollout_api.errors import JobChangedError, JobEndedError, RolloutClientError
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.status import CoordinatorStatus

logger = logging.getLogger(__name__)


class AwaitedResults(Protocol):
    """What a client waits for."""

    ending: RolloutClientError | None
    """Why no further results will come; None while they may."""

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that were requested and have not been received."""


class JobMonitor:
    """Reads the job's state about once a second.

    It renews the lease on the client's name, tells the receiver of results when the job has ended, and tells the sender
    of requests how many rollouts are open in the job.

    Args:
        client: connection to Redis.
        job: the job.
        job_name: ``namespace/name`` by which the client found the job; None if it was given the uid.
        lease: lease on the client's name; None if the client has no result stream.
        results: the client's results.
        sender: the client's sender of requests.
        limits: intervals of the client.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        job: JobInfo,
        job_name: str | None,
        lease: NameLease | None,
        results: AwaitedResults,
        sender: RequestSender,
        limits: ClientLimits,
    ) -> None:
        self.status: CoordinatorStatus | None = None
        """Latest status of the job; None while no coordinator runs."""
        self._client, self._job, self._job_name = client, job, job_name
        self._lease, self._results, self._sender, self._limits = lease, results, sender, limits
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
            await asyncio.sleep(self._limits.monitor_interval_s)

    async def _check(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.get(self._keys.status)
        pipeline.hmget(self._keys.job, ["state", "reason"])
        if self._job_name is not None:
            pipeline.get(job_uid_key(self._job_name))
        if self._lease is not None:
            pipeline.get(self._lease.key)
        status, description, *found = await pipeline.execute()
        uid = found.pop(0) if self._job_name is not None else None
        self.status = parse_status(status)
        self._sender.observe_status(self.status)
        self._log_missing_coordinator()
        state, reason = (None if value is None else value.decode() for value in description)
        ending = self._ending(uid, state, reason)
        if self._lease is None:
            self._results.ending = ending
            return
        [holder] = found
        if holder is not None and not self._lease.is_held_by_this_process(holder):
            ending = self._lease.in_use_error(holder)
        self._results.ending = ending
        await self._lease.renew(holder)

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
        if outage > self._limits.coordinator_grace_s and waiting and log_is_due:
            self._last_log = now
            logger.warning(
                "Job %s has had no coordinator for %.0f s; the requests for %d rollouts are kept in Redis until it is "
                "back.",
                self._job.name,
                outage,
                waiting,
            )
