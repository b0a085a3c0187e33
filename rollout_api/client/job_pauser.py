"""Pauses and resumes a job."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

from rollout_api.client.engine_reports import read_engine_reports
from rollout_api.client.job_info import JobInfo
from rollout_api.client.request_sender import RequestSender
from rollout_api.errors import PauseError
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import Pause, PauseMode, Resume, encode
from rollout_api.redis_client.retry import ClientRetryPolicy

_POLL_INTERVAL_S = 0.05
_MAX_LISTED_ENGINES = 5


class JobPauser:
    """Pauses and resumes one job, and waits until its engines have followed.

    Args:
        client: connection to Redis.
        job: the job.
        sender: sender of messages.
        policy: how failing commands are retried.
    """

    def __init__(
        self, client: redis.asyncio.Redis, job: JobInfo, sender: RequestSender, policy: ClientRetryPolicy
    ) -> None:
        self._client, self._job, self._sender, self._policy = client, job, sender, policy
        self._keys = MessageKeys(job.uid)

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`rollout_api.AsyncRolloutClient.pause`."""
        await self._change(mode, timeout)

    async def resume(self, timeout: float) -> None:
        """See :meth:`rollout_api.AsyncRolloutClient.resume`."""
        await self._change(None, timeout)

    async def mode(self) -> PauseMode | None:
        """Return how the job is paused; None if it is not.

        Raises:
            RolloutClientError: Redis cannot be read.
        """
        found = await self._policy.run(
            lambda: self._client.hget(self._keys.job, "pause"), action="read whether the job is paused"
        )
        return PauseMode(str(found, "utf-8")) if isinstance(found, bytes) and found else None

    async def _change(self, mode: PauseMode | None, timeout: float) -> None:
        """Pause the job, or resume it if *mode* is None, and wait for the engines."""
        what = "resumed" if mode is None else "paused"
        deadline, num_sent = time.monotonic() + timeout, 0
        entry_id = ""
        while True:
            if not entry_id:
                [entry_id] = await self._sender.append(self._keys.control, [_message(mode)], "pause or resume the job")
                num_sent += 1
            is_processed = await self._is_processed(entry_id)
            if is_processed and await self.mode() != mode:
                if num_sent > 1:
                    raise PauseError(
                        f"the job was not {what}, because another client has paused or resumed it at the same time; "
                        "let only one of them do so, or call this again"
                    )
                entry_id = ""  # Redis may have lost the message when it was restarted
                continue
            engines = await read_engine_reports(self._client, self._keys, self._policy)
            waiting = sorted(engine for engine, report in engines.items() if report.get("paused", "") != (mode or ""))
            if is_processed and not waiting:
                return
            if time.monotonic() > deadline:
                raise PauseError(f"the job is not {what} after {timeout:.0f} s: {_reason(is_processed, waiting)}")
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _is_processed(self, entry_id: str) -> bool:
        waiting = await self._policy.run(
            lambda: self._client.xrange(self._keys.control, min=entry_id, max=entry_id),
            action="check whether the job has processed a message",
        )
        return not waiting


def _message(mode: PauseMode | None) -> bytes:
    return encode(Resume() if mode is None else Pause(mode=mode))


def _reason(is_processed: bool, waiting: list[str]) -> str:
    if not is_processed:
        return "no coordinator has processed the message; is the job running?"
    listed = ", ".join(waiting[:_MAX_LISTED_ENGINES])
    return (
        f"{len(waiting)} engines have not followed: {listed}. They do so as soon as they can; call this again to wait"
    )
