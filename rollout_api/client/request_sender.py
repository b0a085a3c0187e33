"""How a client writes into streams: retry_async, in batches, and only as much as the job takes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis.asyncio

from rollout_api.client.job_info import JobInfo
from rollout_api.client.step_state import Asked
from rollout_api.protocol.keys import DATA, MessageKeys
from rollout_api.redis_client.connection import RetryPolicy, even_when_full

logger = logging.getLogger(__name__)

_BATCH, _BATCH_BYTES = 64, 4_000_000
_ROOM_PAUSE_S = 0.2
_SAY_EVERY_S = 60.0


class Sender:
    """Appends messages to a job's streams.

    A message whose reply was lost is sent again: the job recognises repetitions of a request by its id, and every other
    message may be carried out twice.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, job: JobInfo, patience: RetryPolicy) -> None:
        self._client, self._keys, self._job, self._patience = client, keys, job, patience
        self._open_in_job: int | None = None
        self._sent_since = 0
        self._said = 0.0

    def learn(self, status: dict[str, Any]) -> None:
        """Take the job's status: how many rollouts are open in it, from all its clients."""
        self._open_in_job = int(status.get("waiting", 0)) + int(status.get("assigned", 0)) if status else None
        self._sent_since = 0

    async def append(self, stream: str, messages: Sequence[bytes], what: str) -> list[str]:
        """Append messages to a stream; ids of their entries.

        Raises:
            RedisAwayError: Redis was away for too long; some may have arrived.
            RedisRefusedError: Redis refused.
        """
        ids: dict[int, str] = {}

        async def send_missing() -> None:
            missing = [at for at in range(len(messages)) if at not in ids]
            pipeline = self._client.pipeline(transaction=False)
            for at in missing:
                pipeline.xadd(stream, {DATA: messages[at]})
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            ids.update(
                (at, reply.decode()) for at, reply in zip(missing, replies, strict=True) if isinstance(reply, bytes)
            )
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply

        await self._patience.of(send_missing, what=what)
        return [ids[at] for at in range(len(messages))]

    async def cancel(self, messages: Sequence[bytes]) -> None:
        """Append cancellations; also while Redis is full, which they help against.

        Raises:
            RedisAwayError: Redis was away for too long; some may have arrived.
            RedisRefusedError: Redis refused.
        """
        control = self._keys.control
        for message in messages:
            append = partial(even_when_full, self._client, control, "XADD", control, "*", DATA, message)
            await self._patience.of(append, what="cancel requests")

    async def submit(
        self,
        asked: Sequence[Asked],
        sent: Callable[[Asked, str], None],
        go_on: Callable[[], bool],
        open_here: Callable[[], int],
    ) -> None:
        """Send what is open of *asked*, as there is room for it in the job, until all is sent or *go_on* says no.

        Args:
            asked: the requests.
            sent: told each request and its entry.
            go_on: asked between batches.
            open_here: rollouts that this client waits for.
        """
        waiting = deque(asked)
        while waiting and go_on():
            batch = self._batch(waiting, open_here())
            if batch:
                self._sent_since += sum(one.n for one in batch)
                ids = [one.request_id for one in batch]
                entries = await self._append_requests(batch)
                for one, request_id, entry in zip(batch, ids, entries, strict=True):
                    if one.request_id == request_id:  # meanwhile it may be asked for under another
                        sent(one, entry)
            elif waiting:
                self._say_full(len(waiting))
                await asyncio.sleep(_ROOM_PAUSE_S)

    async def _append_requests(self, batch: Sequence[Asked]) -> list[str]:
        return await self.append(self._keys.requests, [one.data for one in batch], "send requests")

    def _batch(self, waiting: deque[Asked], open_here: int) -> list[Asked]:
        """Take from *waiting* what there is room for, by the coordinator's count and by this client's own."""
        known = self._open_in_job
        in_job = open_here if known is None else max(open_here, known + self._sent_since)
        batch: list[Asked] = []
        size = 0
        while waiting and len(batch) < _BATCH and size < _BATCH_BYTES:
            one = waiting[0]
            if one.open:
                if one.entry is None:  # what was sent before is counted already
                    # a job in which nothing is open takes any request that it takes at all
                    if in_job and in_job + one.open > self._job.max_rollouts:
                        break
                    in_job += one.open
                size += len(one.data)
                batch.append(one)
            waiting.popleft()
        return batch

    def _say_full(self, count: int) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            logger.warning(
                "Job %s has %d rollouts open, as many as it takes (spec.queue.maxRollouts); %d requests wait here "
                "until some have ended.",
                self._job.name,
                self._job.max_rollouts,
                count,
            )
