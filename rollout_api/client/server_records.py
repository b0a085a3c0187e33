"""What the HTTP servers of a job share in Redis: turns of conversations, idempotency keys and names of adapters.

All methods that access Redis raise :class:`rollout_api.RolloutClientError` if that is impossible for too long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from typing_extensions import Self

from rollout_api.client.job_channel import JobChannel
from rollout_api.protocol.messages import MAX_KEEP_SECONDS, CodecError, pack_tokens, unpack_tokens

TURN_RETENTION_S = 900
"""Seconds to remember a turn after its response, or after the conversation was last continued."""


class _Records:
    """Records of one kind.

    Args:
        channel: channel to the job.
    """

    def __init__(self, channel: JobChannel) -> None:
        self._client, self._keys, self._policy = channel.redis, channel.keys, channel.policy


@dataclass(frozen=True)
class TurnRecord:
    """A turn that has been sampled."""

    record_id: str
    """Id of its rollout."""
    earlier: list[str]
    """Ids of the records of the earlier turns of the conversation."""
    token_ids: list[int]
    """Tokens of the conversation that follow those of the previous turn: the rest of the prompt, and the response."""
    num_ends: int
    """Number of end tokens up to the end of this turn when the messages are rendered."""
    trajectory_id: str
    """Id of the conversation."""
    turn: int
    """Number of the turn."""
    problem_id: str
    """Problem of the conversation."""

    def encode(self) -> bytes:
        """Return the record as bytes."""
        packed: bytes = msgpack.packb(
            [
                *(self.record_id, self.earlier, pack_tokens(self.token_ids), self.num_ends),
                *(self.trajectory_id, self.turn, self.problem_id),
            ]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the record that *data* encodes.

        Raises:
            CodecError: it is not a record.
        """
        try:
            record_id, earlier, tokens, *rest = msgpack.unpackb(data)
            return cls(record_id, earlier, unpack_tokens(tokens), *rest)
        except (ValueError, TypeError) as error:
            raise CodecError(f"not the record of a turn: {error}") from None


@dataclass(frozen=True)
class TurnNames:
    """Hashes of a conversation up to the end of a turn, under which the turn can be found."""

    distinct: list[str]
    """Those that also contain what tells responses with the same content apart, the best one first."""
    common: str
    """The one that responses with the same content share."""


class TurnRecords(_Records):
    """Reads and writes records of turns."""

    async def find(self, turns: Sequence[TurnNames]) -> list[str]:
        """Return the id of the record of each turn; empty if none or more than one has its names."""
        keys = [self._keys.turn_name(name) for turn in turns for name in (*turn.distinct, turn.common)]
        if not keys:
            return []
        values: Any = await self._policy.run(lambda: self._client.mget(keys), action="look up a conversation")
        remaining, found = iter(values), []
        for turn in turns:
            owners = [set((next(remaining) or b"").split()) for _ in (*turn.distinct, turn.common)]
            found.append(next((owner.decode() for [owner] in filter(_is_single, owners)), ""))
        return found

    async def read(self, record_id: str) -> list[TurnRecord]:
        """Return a turn after the earlier ones, which are then remembered for longer; empty if one is not known."""

        async def read_all(record_ids: Sequence[str]) -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for one in record_ids:
                pipeline.getex(self._keys.turn(one), ex=TURN_RETENTION_S)
            return list(await pipeline.execute())

        action = "read the turns of a conversation"
        [last] = await self._policy.run(lambda: read_all([record_id]), action=action)
        if last is None:
            return []
        turn = TurnRecord.decode(last)
        earlier = await self._policy.run(lambda: read_all(turn.earlier), action=action) if turn.earlier else []
        return [] if None in earlier else [*map(TurnRecord.decode, earlier), turn]

    async def write(self, records: Sequence[tuple[TurnRecord, TurnNames]]) -> None:
        """Write records and their names. The first of several turns with the same distinct name has it."""

        async def write_all() -> None:
            pipeline = self._client.pipeline(transaction=False)
            for record, names in records:
                owner = record.record_id
                pipeline.set(self._keys.turn(owner), record.encode(), ex=TURN_RETENTION_S, nx=True)
                for name in names.distinct:
                    pipeline.set(self._keys.turn_name(name), owner, ex=TURN_RETENTION_S, nx=True)
                # All owners are kept, so that nobody takes a turn for another one with the same content.
                pipeline.append(self._keys.turn_name(names.common), f"{owner} ")
                pipeline.expire(self._keys.turn_name(names.common), TURN_RETENTION_S)
            await pipeline.execute()

        if records:
            await self._policy.run(write_all, action="record the turns of conversations")


def _is_single(owners: set[bytes]) -> bool:
    return len(owners) == 1


class IdempotencyKeys(_Records):
    """Reads and writes the fingerprints of the requests that have idempotency keys."""

    async def claim(self, key: str, fingerprint: bytes) -> bytes | None:
        """Give a key to a request unless another one has it; return the fingerprint of the one that had it before.

        The request has the key for a day, unless :meth:`keep` or :meth:`release` ends this earlier.
        """
        name = self._keys.idempotency(key)
        owner: Any = await self._policy.run(
            lambda: self._client.set(name, fingerprint, nx=True, get=True, ex=MAX_KEEP_SECONDS),
            action="record an idempotency key",
        )
        return None if owner is None else bytes(owner)

    async def keep(self, key: str, seconds: int) -> None:
        """Let a request have its key for this many seconds from now on, or for less if less is left."""
        name = self._keys.idempotency(key)
        await self._policy.run(
            lambda: self._client.expire(name, seconds, lt=True), action="limit the lifetime of an idempotency key"
        )

    async def release(self, key: str) -> None:
        """Let any request have the key."""
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


class AdapterNames(_Records):
    """Reads and writes the names of a job's adapters."""

    async def set(self, name: str, adapter: NamedAdapter) -> None:
        """Give an adapter a name; an adapter that has this name loses it."""
        await self._policy.run(
            lambda: self._client.hset(self._keys.adapters, name, adapter.encode()),
            action="store the name of an adapter",
        )

    async def get(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name; None if there is none."""
        found: Any = await self._policy.run(
            lambda: self._client.hget(self._keys.adapters, name), action="read the name of an adapter"
        )
        return None if found is None else NamedAdapter.decode(found)

    async def delete(self, name: str) -> bool:
        """Forget a name; return whether an adapter had it."""
        deleted: Any = await self._policy.run(
            lambda: self._client.hdel(self._keys.adapters, name), action="delete the name of an adapter"
        )
        return bool(deleted)
