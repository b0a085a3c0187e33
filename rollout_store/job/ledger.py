"""The entries of the ledger of finished rollouts. What is in the ledger is never sampled again."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from rollout_api.protocol.messages import CodecError, Rollout

META_FIELDS = frozenset({b"entry", b"n", b"cancelled", b"released"})
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
        packed: bytes = msgpack.packb(list(vars(self).values()))
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
