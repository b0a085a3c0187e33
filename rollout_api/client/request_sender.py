"""Writes a client's messages to a job's streams, in batches, with retries, and within the job's limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis.asyncio

from rollout_api.client.job_info import JobInfo
from rollout_api.client.limits import LOG_INTERVAL_S
from rollout_api.client.step_state import PendingRequest
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, encode
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import execute_even_when_full

logger = logging.getLogger(__name__)

IDS_PER_MESSAGE = 1000
"""Request ids in one cancellation, and rollout ids in one report of rewards."""
_BATCH = 64
"""Requests per write to Redis."""
_BATCH_BYTES = 4_000_000
"""Encoded size, in bytes, above which no further request is added to a batch."""
_CAPACITY_RETRY_PAUSE_S = 0.2
"""Pause while the job has no capacity for another request."""


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
        in_job = self._num_in_job(num_awaited)
        # A job in which nothing is open takes every request that passed validation.
        return not in_job or in_job + num_rollouts <= self._job.max_rollouts

    def count_sent(self, num_rollouts: int) -> None:
        """Count rollouts that were requested with :meth:`append`."""
        self._sent_since_status += num_rollouts

    def count_answered(self, num_rollouts: int) -> None:
        """Count rollouts that have ended since the job's last status. They are not open in the job any more."""
        self._sent_since_status -= num_rollouts

    def _num_in_job(self, num_awaited: int) -> int:
        known = self._open_in_job
        return num_awaited if known is None else max(num_awaited, known + self._sent_since_status)

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

    async def send_batch(self, queue: deque[PendingRequest], num_awaited: int) -> list[tuple[PendingRequest, str]]:
        """Send the next requests of *queue* for which the job has capacity; pause briefly if it has none.

        Args:
            queue: requests to send; those that were sent, or no longer need to be sent, are removed.
            num_awaited: rollouts that this client is waiting for.

        Returns:
            Each request that was sent, with the id of its entry. A request whose id has changed meanwhile is missing.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; some requests may have arrived.
            RedisRefusedError: Redis refused the command.
        """
        batch = self._next_batch(queue, num_awaited)
        if not batch:
            if queue:
                self._log_no_capacity(len(queue))
                await asyncio.sleep(_CAPACITY_RETRY_PAUSE_S)
            return []
        self._sent_since_status += sum(request.n for request in batch)
        ids = [request.request_id for request in batch]
        entry_ids = await self.append(self._keys.requests, [request.data for request in batch], "send requests")
        return [
            (request, entry_id)
            for request, request_id, entry_id in zip(batch, ids, entry_ids, strict=True)
            if request.request_id == request_id
        ]

    def _next_batch(self, queue: deque[PendingRequest], num_awaited: int) -> list[PendingRequest]:
        """Remove from *queue* the requests that fit into the job, by the coordinator's count and by this client's."""
        in_job = self._num_in_job(num_awaited)
        batch: list[PendingRequest] = []
        size = 0
        while queue and len(batch) < _BATCH and size < _BATCH_BYTES:
            request = queue[0]
            if request.num_open:
                if request.entry_id is None:  # a request that was sent before is counted already
                    # A job in which nothing is open takes every request that passed validation.
                    if in_job and in_job + request.num_open > self._job.max_rollouts:
                        break
                    in_job += request.num_open
                size += len(request.data)
                batch.append(request)
            queue.popleft()
        return batch

    def _log_no_capacity(self, num_waiting: int) -> None:
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
