"""A client's result stream in Redis: reads, acknowledgements, and dead letters for what cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis
import redis.asyncio

from rollout_api.client.limits import ClientLimits
from rollout_api.client.step_state import Entries
from rollout_api.errors import JobEndedError
from rollout_api.protocol.dead_letters import add_dead_letter
from rollout_api.protocol.keys import MESSAGE_FIELD, TRAINER_GROUP, MessageKeys
from rollout_api.redis_client.client_connection import READ_BLOCK_MS
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import async_function, execute_even_when_full

logger = logging.getLogger(__name__)

_STREAM_GONE_ERRORS = ("NOGROUP", "UNBLOCKED")
"""Beginnings of the errors with which Redis reports that the stream or its consumer group does not exist."""


class ResultStream:
    """The stream from which one client reads its results, and the consumer group by which they are delivered.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        name: name of the client.
        policy: how failing commands are retried.
        limits: limits of the client.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: MessageKeys,
        name: str,
        policy: ClientRetryPolicy,
        limits: ClientLimits,
    ) -> None:
        self._client, self._keys, self._name = client, keys, name
        self._policy, self._limits = policy, limits
        self._stream = keys.results(name)
        self._acknowledge_script = async_function(client, __package__, "acknowledge")

    async def create(self) -> None:
        """Create the stream and its consumer group if they do not exist.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: Redis refused a command.
        """
        await self._policy.run(self._create_group, action="read results")

    async def recreate(self) -> JobEndedError | None:
        """Create the stream again, which is gone because Redis has lost its last writes or because the job is gone.

        Returns:
            The error to raise for missing results if the job is gone; nothing is created then.

        Raises:
            RolloutClientError: as for :meth:`create`.
        """
        if not await self._policy.run(lambda: self._client.exists(self._keys.job), action="read results"):
            return JobEndedError(f"job {self._keys.uid} is gone from Redis")
        logger.warning("The result stream %s was gone from Redis; creating it again.", self._stream)
        await self.create()
        return None

    async def read(self, position: str) -> Entries:
        """Read the next entries once, without retries; wait up to a second for new ones.

        Args:
            position: ``>`` for new entries, otherwise the id of an entry: those after it that were delivered and not
                acknowledged are read again.

        Raises:
            redis.RedisError: Redis failed. If the reply was lost, the entries in it count as delivered.
        """
        reply: Any = await self._client.xreadgroup(
            TRAINER_GROUP, self._name, {self._stream: position}, count=self._limits.read_batch, block=READ_BLOCK_MS
        )
        return [(entry_id.decode(), _message(fields)) for _, entries in reply or [] for entry_id, fields in entries]

    async def read_delivered(self, position: str) -> Entries:
        """Read entries after *position* that were delivered and not acknowledged; retry while Redis is unreachable.

        Raises:
            RolloutClientError: as for :meth:`create`.
        """
        return await self._policy.run(lambda: self.read(position), action="read results")

    async def fetch(self, entry_ids: Sequence[str]) -> Entries:
        """Read the entries with these ids, which were delivered before.

        Raises:
            RolloutClientError: as for :meth:`create`.
        """

        async def read() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for entry_id in entry_ids:
                pipeline.xrange(self._stream, min=entry_id, max=entry_id)
            return list(await pipeline.execute())

        found = await self._policy.run(read, action="read results")
        return [
            (entry_id, _message(page[0][1]) if page else None) for entry_id, page in zip(entry_ids, found, strict=True)
        ]

    async def acknowledge(self, entry_ids: Sequence[str]) -> None:
        """Acknowledge the entries with these ids, and delete those that every consumer group has acknowledged.

        Raises:
            RolloutClientError: as for :meth:`create`; some entries may be acknowledged.
        """
        size = self._limits.acknowledge_batch
        for start in range(0, len(entry_ids), size):
            args = [TRAINER_GROUP, *entry_ids[start : start + size]]
            await self._policy.run(
                partial(self._acknowledge_script, keys=[self._stream], args=args),
                action="acknowledge results",
            )

    async def dead_letter(self, entry_id: str, data: bytes, reason: str) -> None:
        """Move a result that cannot be read to the dead letters.

        Raises:
            RolloutClientError: as for :meth:`create`.
        """

        async def move() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                add_dead_letter(pipeline, self._keys.dead_letters, stream=self._stream, data=data, reason=reason)
                pipeline.xack(self._stream, TRAINER_GROUP, entry_id)
                try:
                    await pipeline.execute()
                except redis.exceptions.OutOfMemoryError:
                    # Waiting here would block the reader, and with it the acknowledgements that free memory.
                    logger.warning("Redis is full: result %s stays in %s.", entry_id, self._stream)

        logger.error("Result %s of %s cannot be read and moves to the dead letters: %s", entry_id, self._stream, reason)
        await self._policy.run(move, action="move a result that cannot be read to the dead letters")

    async def _create_group(self) -> None:
        try:
            await execute_even_when_full(
                self._client, self._stream, "XGROUP", "CREATE", self._stream, TRAINER_GROUP, "0", "MKSTREAM"
            )
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


def is_stream_gone(error: redis.RedisError) -> bool:
    """Return whether a read failed because the stream or its consumer group does not exist."""
    return str(error).startswith(_STREAM_GONE_ERRORS)


def _message(fields: Any) -> bytes | None:
    """Return the message of an entry; None if the entry is deleted."""
    if not fields:
        return None
    pairs = fields.items() if isinstance(fields, dict) else fields
    return next((value for name, value in pairs if name == MESSAGE_FIELD.encode()), b"")
