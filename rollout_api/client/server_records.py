"""What the HTTP servers of a job share in Redis: turns of conversations, idempotency keys and names of adapters.

All methods that access Redis raise :class:`rollout_api.RolloutClientError` if that is impossible for too long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
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
    """Hash of the tokens of the conversation up to its end."""
    earlier: list[str]
    """Ids of the records of the earlier turns of the conversation."""
    token_ids: list[int]
    """Tokens of the conversation that follow those of the previous turn: the rest of the prompt, and the response."""
    num_ends: int
    """Number of end tokens up to the end of this turn when the messages are rendered."""
    num_last: int
    """Number of rendered tokens behind the last end token before the response that later prompts contain, too."""
    responses: list[int]
    """Numbers, counted from 1, of the end tokens of the earlier turns in the rendered prompt."""
    outline: str
    """Hash of the rendered prompt without the earlier turns."""
    trajectory_id: str
    """Id of the conversation."""
    turn: int
    """Number of the turn."""
    problem_id: str
    """Problem of the conversation."""

    def encode(self) -> bytes:
        """Return the record as bytes."""
        packed: bytes = msgpack.packb({**asdict(self), "token_ids": pack_tokens(self.token_ids)})
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the record that *data* encodes.

        Raises:
            CodecError: it is not a record.
        """
        try:
            fields = msgpack.unpackb(data)
            return cls(**{**fields, "token_ids": unpack_tokens(fields["token_ids"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CodecError(f"not the record of a turn: {error}") from None


_SEVERAL = b"-"
"""Owner of a name that several turns have."""


class TurnRecords(_Records):
    """Reads and writes records of turns, and the names under which they are found.

    A name is a hash of a conversation up to the end of a turn. It finds a turn only if no other one has it.
    """

    async def find(self, turns: Sequence[Sequence[str]]) -> list[str]:
        """Return for the names of each turn the id of its record: that of the first name that finds one, or empty."""
        keys = [self._keys.turn_name(name) for names in turns for name in names]
        if not keys:
            return []
        values: Any = await self._policy.run(lambda: self._client.mget(keys), action="look up a conversation")
        owners = iter(values)
        found = ([owner for owner in islice(owners, len(names)) if owner not in (None, _SEVERAL)] for names in turns)
        return [each[0].decode() if each else "" for each in found]

    async def read(self, record_ids: Sequence[str]) -> list[TurnRecord | None]:
        """Return turns, which are then remembered for longer; None for those that are not known."""
        if not record_ids:
            return []

        async def read_all() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for record_id in record_ids:
                pipeline.getex(self._keys.turn(record_id), ex=TURN_RETENTION_S)
            return list(await pipeline.execute())

        found = await self._policy.run(read_all, action="read the turns of a conversation")
        return [None if one is None else TurnRecord.decode(one) for one in found]

    async def write(self, records: Sequence[tuple[TurnRecord, Sequence[str]]]) -> None:
        """Write records and their names."""
        names = [(self._keys.turn_name(name), record.record_id) for record, each in records for name in each]

        async def write_all() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for name, owner in names:
                pipeline.set(name, owner, ex=TURN_RETENTION_S, nx=True, get=True)
            for name, _ in names:
                pipeline.expire(name, TURN_RETENTION_S)
            for record, _ in records:
                pipeline.set(self._keys.turn(record.record_id), record.encode(), ex=TURN_RETENTION_S)
            return list(await pipeline.execute())

        if not records:
            return
        action = "record the turns of conversations"
        owners = await self._policy.run(write_all, action=action)
        shared = {
            name: _SEVERAL
            for (name, own), owner in zip(names, owners, strict=False)
            if owner not in (None, own.encode(), _SEVERAL)
        }

        async def mark_shared() -> None:
            pipeline = self._client.pipeline(transaction=False)
            for name, owner in shared.items():
                pipeline.set(name, owner, ex=TURN_RETENTION_S)
            await pipeline.execute()

        if shared:
            await self._policy.run(mark_shared, action=action)


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
