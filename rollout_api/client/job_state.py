"""Follows the state of a job for its client, and pauses and resumes the job."""

from __future__ import annotations

import asyncio
import logging
import time

import redis

from rollout_api.client.job_channel import JobChannel
from rollout_api.client.job_info import ended_error, parse_status
from rollout_api.client.request_queue import LOG_INTERVAL_S
from rollout_api.client.results import Results
from rollout_api.errors import JobChangedError, JobEndedError, PauseError, RolloutClientError
from rollout_api.protocol.keys import job_uid_key
from rollout_api.protocol.messages import Pause, PauseMode, Resume, encode
from rollout_api.protocol.status import CoordinatorStatus

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Time between two checks of the job's state."""
_COORDINATOR_GRACE_S = 5.0
"""Time without a coordinator after which it is logged that the client waits for one."""
_GONE_GRACE_S = 5.0
"""Time without any record of the job in Redis after which its requests fail."""
_POLL_INTERVAL_S = 0.05
_MAX_LISTED_ENGINES = 5


class JobMonitor:
    """Reads the job's state about once a second.

    It tells the client's results when the job has ended, and how many rollouts are open in it.

    Args:
        channel: channel to the job.
        job_name: ``namespace/name`` by which the client found the job; None if it was given the uid.
        results: the client's results.
    """

    def __init__(self, channel: JobChannel, job_name: str | None, results: Results) -> None:
        self.status: CoordinatorStatus | None = None
        """Latest status of the job; None while no coordinator runs."""
        self._client, self._keys, self._job = channel.redis, channel.keys, channel.job
        self._job_name, self._results = job_name, results
        self._last_status = time.monotonic()
        self._last_log = 0.0
        self._gone_since: float | None = None

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
        now = time.monotonic()
        self._gone_since = None if state is not None else self._gone_since or now
        if self._gone_since is not None:
            if now - self._gone_since < _GONE_GRACE_S:
                return None  # Redis may have lost its data in a restart, and the coordinator writes it again
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


class JobPauser:
    """Pauses and resumes one job, and waits until its engines have followed.

    Args:
        channel: channel to the job.
    """

    def __init__(self, channel: JobChannel) -> None:
        self._channel = channel

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`rollout_api.AsyncRolloutClient.pause`."""
        await self._change(mode, timeout)

    async def resume(self, timeout: float) -> None:
        """See :meth:`rollout_api.AsyncRolloutClient.resume`."""
        await self._change(None, timeout)

    async def mode(self) -> PauseMode | None:
        """Return how the job is paused; None if it is not."""
        channel = self._channel
        found = await channel.policy.run(
            lambda: channel.redis.hget(channel.keys.job, "pause"), action="read whether the job is paused"
        )
        return PauseMode(str(found, "utf-8")) if isinstance(found, bytes) and found else None

    async def _change(self, mode: PauseMode | None, timeout: float) -> None:
        """Pause the job, or resume it if *mode* is None, and wait for the engines."""
        what = "resumed" if mode is None else "paused"
        if mode is not None and mode.sleep_level:
            await self.require_sleep_mode()
        message = encode(Resume() if mode is None else Pause(mode=mode))
        deadline, num_sent = time.monotonic() + timeout, 0
        entry_id = ""
        while True:
            if not entry_id:
                [entry_id] = await self._channel.append(
                    self._channel.keys.control, [message], "pause or resume the job"
                )
                num_sent += 1
            is_processed = await self._channel.is_processed(entry_id, "check whether the job has processed a message")
            if is_processed and await self.mode() != mode:
                if num_sent > 1:
                    raise PauseError(
                        f"the job was not {what}, because another client has paused or resumed it at the same time; "
                        "let only one of them do so, or call this again"
                    )
                entry_id = ""  # Redis may have lost the message when it was restarted
                continue
            engines = await self._channel.engine_reports()
            waiting = sorted(engine for engine, report in engines.items() if report.get("paused", "") != (mode or ""))
            if is_processed and not waiting:
                return
            if time.monotonic() > deadline:
                raise PauseError(f"the job is not {what} after {timeout:.0f} s: {_reason(is_processed, waiting)}")
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def require_sleep_mode(self) -> None:
        """Check that all engines can sleep.

        Raises:
            PauseError: some cannot.
        """
        engines = await self._channel.engine_reports()
        if earlier := sorted(engine for engine, report in engines.items() if "can_sleep" not in report):
            raise PauseError(
                f"the version of {', '.join(earlier[:_MAX_LISTED_ENGINES])} cannot sleep; upgrade the job's image, or "
                "pause the job, whose engines then keep their memory"
            )
        if unable := sorted(engine for engine, report in engines.items() if not report["can_sleep"]):
            raise PauseError(
                f"{', '.join(unable[:_MAX_LISTED_ENGINES])} cannot sleep; set spec.engine.extraArgs: "
                "{enable_sleep_mode: true}, or pause the job, whose engines then keep their memory"
            )


def _reason(is_processed: bool, waiting: list[str]) -> str:
    if not is_processed:
        return "no coordinator has processed the message; is the job running?"
    listed = ", ".join(waiting[:_MAX_LISTED_ENGINES])
    return (
        f"{len(waiting)} engines have not followed: {listed}. They do so as soon as they can; call this again to wait"
    )
