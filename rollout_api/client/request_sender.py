"""Writes a client's messages to a job's streams, with retries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import redis.asyncio

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, encode
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import execute_even_when_full

IDS_PER_MESSAGE = 1000
"""Request ids in one cancellation, and rollout ids in one report of rewards."""


class RequestSender:
    """Appends messages to a job's streams.

    A message whose reply was lost is sent again. That is harmless: the job recognizes a repeated request by its id, and
    every other message is idempotent.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._keys, self._policy = client, keys, policy

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
