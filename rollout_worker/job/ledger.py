"""The ledger of finished rollouts. What is in the ledger is never sampled again."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import CodecError, Rollout
from rollout_worker.job.limits import LEDGERS_PER_SCAN

META_FIELDS = frozenset({b"entry", b"n", b"cancelled"})
"""Fields of a ledger that describe the request; all other fields are samples."""


@dataclass(frozen=True)
class LedgerEntry:
    """A finished rollout, without its tokens, which are in the history."""

    problem_id: str
    length: int
    finish_reason: str
    weight_version: int | None
    num_decoding_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    engine: str

    @classmethod
    def of(cls, rollout: Rollout) -> LedgerEntry:
        """Return the entry of a rollout."""
        return cls(
            rollout.problem_id,
            len(rollout.token_ids),
            str(rollout.finish_reason),
            rollout.weight_version,
            rollout.num_decoding_steps,
            rollout.num_draft_tokens,
            rollout.num_accepted_tokens,
            rollout.engine,
        )

    def pack(self) -> bytes:
        """Encode the entry."""
        packed: bytes = msgpack.packb(astuple(self))
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> LedgerEntry:
        """Decode an entry.

        Raises:
            CodecError: if *data* is not a ledger entry.
        """
        try:
            return cls(*msgpack.unpackb(data))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CodecError(f"not a ledger entry: {error}") from None


def read_ledger(client: redis.Redis, keys: MessageKeys, request_ids: list[str]) -> dict[str, dict[int, LedgerEntry]]:
    """Return the finished rollouts of requests: request id → sample → entry."""
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


def count_finished_rollouts(client: redis.Redis, keys: MessageKeys, client_name: str) -> int:
    """Return the number of finished rollouts that a client has requested."""
    pipeline = client.pipeline(transaction=False)
    for ledger in client.scan_iter(keys.ledger(f"{client_name}:*"), count=LEDGERS_PER_SCAN):
        pipeline.hkeys(ledger)
    replies: list[list[bytes]] = pipeline.execute()
    return sum(field not in META_FIELDS for fields in replies for field in fields)
