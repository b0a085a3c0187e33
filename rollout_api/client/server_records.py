"""What the HTTP servers of a job share in Redis: turns of conversations, idempotency keys and names of adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import redis.asyncio
from typing_extensions import Self

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import MAX_KEEP_SECONDS, CodecError, pack_tokens, unpack_tokens
from rollout_api.redis_client.retry import ClientRetryPolicy

TURN_RETENTION_S = 900
"""Seconds to remember a turn after its response, or after the conversation was last continued."""


@dataclass(frozen=True)
class TurnRecord:
    """A turn that has been sampled."""

    previous: str
    """Id of the record of the previous turn; empty for the first turn."""
    token_ids: list[int]
    """Tokens of the conversation that follow those of the previous turn: the rest of the prompt, and the response."""
    trajectory_id: str
    """Id of the conversation."""
    turn: int
    """Number of the turn."""
    problem_id: str
    """Problem of the conversation."""

    def encode(self) -> bytes:
        """Return the record as bytes."""
        packed: bytes = msgpack.packb(
            [self.previous, pack_tokens(self.token_ids), self.trajectory_id, self.turn, self.problem_id]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the record that *data* encodes.

        Raises:
            CodecError: it is not a record.
        """
        try:
            previous, tokens, trajectory_id, turn, problem_id = msgpack.unpackb(data)
            return cls(previous, unpack_tokens(tokens), trajectory_id, turn, problem_id)
        except (ValueError, TypeError) as error:
            raise CodecError(f"not the record of a turn: {error}") from None


class TurnRecords:
    """Reads and writes records of turns.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._keys, self._policy = client, keys, policy

    async def read(self, record_ids: Sequence[str]) -> dict[str, TurnRecord]:
        """Return the records with these ids that exist, which are then remembered for longer.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        if not record_ids:
            return {}

        async def read_all() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for record_id in record_ids:
                pipeline.getex(self._keys.turn(record_id), ex=TURN_RETENTION_S)
            return list(await pipeline.execute())

        found = await self._policy.run(read_all, action="read the turns of a conversation")
        return {
            record_id: TurnRecord.decode(data)
            for record_id, data in zip(record_ids, found, strict=True)
            if data is not None
        }

    async def write(self, records: Mapping[str, TurnRecord]) -> None:
        """Write records under their ids. The first of several with the same id, which have the same text, counts.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """

        async def write_all() -> None:
            pipeline = self._client.pipeline(transaction=False)
            for record_id, record in records.items():
                pipeline.set(self._keys.turn(record_id), record.encode(), ex=TURN_RETENTION_S, nx=True)
            await pipeline.execute()

        if records:
            await self._policy.run(write_all, action="record the turns of conversations")


class IdempotencyKeys:
    """Reads and writes the fingerprints of the requests that have idempotency keys.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._keys, self._policy = client, keys, policy

    async def claim(self, key: str, fingerprint: bytes) -> bytes | None:
        """Give a key to a request unless another one has it; return the fingerprint of the one that had it before.

        The request has the key for a day, unless :meth:`keep` or :meth:`release` ends this earlier.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        owner: Any = await self._policy.run(
            lambda: self._client.set(name, fingerprint, nx=True, get=True, ex=MAX_KEEP_SECONDS),
            action="record an idempotency key",
        )
        return None if owner is None else bytes(owner)

    async def keep(self, key: str, seconds: int) -> None:
        """Let a request have its key for this many seconds from now on, or for less if less is left.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        await self._policy.run(
            lambda: self._client.expire(name, seconds, lt=True), action="limit the lifetime of an idempotency key"
        )

    async def release(self, key: str) -> None:
        """Let any request have the key.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        await self._policy.run(lambda: self._client.delete(name), action="release an idempotency key")


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that has a name."""

    path: str
    """Directory of the adapter, as the engines see it."""
    weight_version: int
    """Version under which it was published."""

    def encode(self) -> str:
        """Return the adapter as JSON."""
        return json.dumps({"path": self.path, "weight_version": self.weight_version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the adapter that *data* encodes."""
        return cls(**json.loads(data))


class AdapterNames:
    """Reads and writes the names of a job's adapters.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._key, self._policy = client, keys.adapters, policy

    async def set(self, name: str, adapter: NamedAdapter) -> None:
        """Give an adapter a name; an adapter that has this name loses it.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        await self._policy.run(
            lambda: self._client.hset(self._key, name, adapter.encode()), action="store the name of an adapter"
        )

    async def get(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name; None if there is none.

        Raises:
            RolloutClientError: Redis cannot be read.
        """
        found: Any = await self._policy.run(
            lambda: self._client.hget(self._key, name), action="read the name of an adapter"
        )
        return None if found is None else NamedAdapter.decode(found)

    async def delete(self, name: str) -> bool:
        """Forget a name; return whether an adapter had it.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        deleted: Any = await self._policy.run(
            lambda: self._client.hdel(self._key, name), action="delete the name of an adapter"
        )
        return bool(deleted)
