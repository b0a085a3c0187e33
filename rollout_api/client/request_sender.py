"""Writes a client's messages to a job's streams, with retries, and knows how many rollouts the job has room for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis.asyncio

from rollout_api.client.job_info import JobInfo
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, encode
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import execute_even_when_full

logger = logging.getLogger(__name__)

IDS_PER_MESSAGE = 1000
"""Request ids in one cancellation, and rollout ids in one report of rewards."""
LOG_INTERVAL_S = 60.0
"""Time between two log messages about the same problem."""


class RequestSender:
    """Appends messages to a job's streams.

    A message whose reply was lost is sent again. That is harmless: the job recognizes a repeated request by its id, and
    every other message is idempotent.

    Args:
        client: connection to Redis.
        job: the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, job: JobInfo, policy: ClientRetryPolicy) -> None:
        self._client, self._job, self._policy = client, job, policy
        self._keys = MessageKeys(job.uid)
        self._open_in_job: int | None = None
        self._sent_since_status = 0
        self._last_log = 0.0

    def observe_status(self, status: CoordinatorStatus | None) -> None:
        """Read from the job's status how many rollouts of all its clients are open."""
        self._open_in_job = int(status.get("waiting", 0)) + int(status.get("assigned", 0)) if status else None
        self._sent_since_status = 0

    def has_room(self, num_rollouts: int, num_awaited: int) -> bool:
        """Return whether the job takes more rollouts, by the coordinator's count and by this client's.

        Args:
            num_rollouts: number of rollouts to request.
            num_awaited: number of rollouts that this client has requested and not received.
        """
        known = self._open_in_job
        in_job = num_awaited if known is None else max(num_awaited, known + self._sent_since_status)
        # A job in which nothing is open takes every request that passed validation.
        return not in_job or in_job + num_rollouts <= self._job.max_rollouts

    def count_sent(self, num_rollouts: int) -> None:
        """Count rollouts that are requested."""
        self._sent_since_status += num_rollouts

    def count_answered(self, num_rollouts: int) -> None:
        """Count rollouts that have ended since the job's last status. They are not open in the job any more."""
        self._sent_since_status -= num_rollouts

    def log_no_room(self, num_waiting: int) -> None:
        """Log at most once a minute that requests wait in this client because the job has no room for them."""
        now = time.monotonic()
        if now - self._last_log >= LOG_INTERVAL_S:
            self._last_log = now
            logger.warning(
                "Job %s has reached its limit of %d open rollouts (spec.queue.maxRollouts); %d requests wait in this "
                "client until some rollouts have finished.",
                self._job.name,
                self._job.max_rollouts,
                num_waiting,
            )

    async def append(self, stream: str, messages: Sequence[bytes], action: str) -> list[str]:
        """Append messages to a stream and return the ids of their entries.

        Args:
            stream: key of the stream.
            messages: encoded messages.
            action: what the messages do, for errors.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; some messages may have arrived.
            RedisRefusedError: Redis refused the command.
        """
        ids: dict[int, str] = {}

        async def append_missing() -> None:
            missing = [index for index in range(len(messages)) if index not in ids]
            pipeline = self._client.pipeline(transaction=False)
            for index in missing:
                pipeline.xadd(stream, {MESSAGE_FIELD: messages[index]})
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            ids.update(
                (index, reply.decode())
                for index, reply in zip(missing, replies, strict=True)
                if isinstance(reply, bytes)
            )
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply

        await self._policy.run(append_missing, action=action)
        return [ids[index] for index in range(len(messages))]

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ask the job to cancel requests. This works while Redis is full, because it helps to free memory.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; some cancellations may have arrived.
            RedisRefusedError: Redis refused the command.
        """
        control = self._keys.control
        for start in range(0, len(request_ids), IDS_PER_MESSAGE):
            message = encode(Cancel(request_ids=list(request_ids[start : start + IDS_PER_MESSAGE])))
            append = partial(
                execute_even_when_full, self._client, control, "XADD", control, "*", MESSAGE_FIELD, message
            )
            await self._policy.run(append, action="cancel requests")
