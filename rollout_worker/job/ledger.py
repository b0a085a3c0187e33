"""What a job's ledger keeps of an ended rollout. What is in the ledger is never made again."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import CodecError, Rollout

META_FIELDS = frozenset({b"entry", b"n", b"cancelled"})
"""Fields of a request's ledger that are no samples."""


@dataclass(frozen=True)
class LedgerEntry:
    """One ended rollout; its tokens are in the history."""

    problem_id: str
    length: int
    finish_reason: str
    weight_version: int | None
    steps: int
    drafted: int
    accepted: int
    engine: str

    @classmethod
    def of(cls, rollout: Rollout) -> LedgerEntry:
        """The entry for *rollout*."""
        return cls(
            rollout.problem_id,
            len(rollout.token_ids),
            str(rollout.finish_reason),
            rollout.weight_version,
            rollout.steps,
            rollout.drafted,
            rollout.accepted,
            rollout.engine,
        )

    def pack(self) -> bytes:
        """As it is written."""
        packed: bytes = msgpack.packb(astuple(self))
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> LedgerEntry:
        """The inverse of :meth:`pack`.

        Raises:
            CodecError: if *data* is no such entry.
        """
        try:
            return cls(*msgpack.unpackb(data))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CodecError(f"no entry of a ledger: {error}") from None


def read_ledger(client: redis.Redis, keys: MessageKeys, request_ids: list[str]) -> dict[str, dict[int, LedgerEntry]]:
    """What is done of each of these requests: request id → sample → entry."""
    pipeline = client.pipeline(transaction=False)
    for request_id in request_ids:
        pipeline.hgetall(keys.ledger(request_id))
    replies: list[dict[bytes, Any]] = pipeline.execute()
    return {
        request_id: {
            int(sample): LedgerEntry.unpack(entry) for sample, entry in fields.items() if sample not in META_FIELDS
        }
        for request_id, fields in zip(request_ids, replies, strict=True)
    }


def count_ended(client: redis.Redis, keys: MessageKeys, name: str) -> int:
    """How many rollouts that client *name* asked for have ended."""
    pipeline = client.pipeline(transaction=False)
    for ledger in client.scan_iter(keys.ledger(f"{name}:*"), count=1000):
        pipeline.hkeys(ledger)
    replies: list[list[bytes]] = pipeline.execute()
    return sum(field not in META_FIELDS for fields in replies for field in fields)
