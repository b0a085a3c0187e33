"""Requests: their ledgers, cancellations, refusals and unread results, and their places in traces."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import msgpack

from rollout_api.protocol.keys import IMAGE_RETENTION_S, MESSAGE_FIELD, REQUEST_FIELD
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, RolloutRequest, decode, encode
from rollout_store.job.part import MAX_EVENTS, StorePart, as_text

REFUSAL_RETENTION_S = 600
"""Seconds to keep a refusal."""
META_FIELDS = frozenset({b"entry", b"n", b"cancelled", b"released"})
"""Fields of a ledger that describe the request; all other fields are samples."""
_DEFAULT_PROBLEM_ID = re.compile("[0-9a-f]{32}")
"""Pattern of a problem id that is a digest (``problem_id_of``)."""
_TRACE_ID_BYTES = 16
_CALLER = struct.Struct(">QB")
"""Packed span id of the caller, and flags of its ``traceparent``."""
_PACKED_LENGTHS = (0, _TRACE_ID_BYTES, _TRACE_ID_BYTES + _CALLER.size)
_SAMPLED = 0x01
"""Flag of a W3C ``traceparent``."""


@dataclass(frozen=True)
class LedgerEntry:
    """A finished rollout, without its tokens, which are in the history.

    Entries are kept for :data:`LEDGER_RETENTION_S`, so they have nothing that is not read. Redis stores a ledger in
    half the memory if no entry has more than 64 bytes (``hash-max-listpack-value``).
    """

    problem_id: str
    length: int
    finish_reason: str
    weight_version: int | None
    num_decoding_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    engine: str = ""
    """Id of the engine, in entries of earlier releases."""
    digest: bytes = b""
    """Digest of the tokens that the history has for the rollout; empty in entries of earlier releases."""

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
            digest=bytes.fromhex(rollout.digest),
        )

    def pack(self) -> bytes:
        """Encode the entry."""
        problem_id, *values = vars(self).values()
        if _DEFAULT_PROBLEM_ID.fullmatch(problem_id):
            problem_id = bytes.fromhex(problem_id)
        packed: bytes = msgpack.packb([problem_id, *values])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> LedgerEntry:
        """Decode an entry. Further fields, which a later release may have written, are ignored.

        Raises:
            CodecError: if *data* is not a ledger entry.
        """
        try:
            problem_id, *values = list(msgpack.unpackb(data))[: len(fields(cls))]
            return cls(problem_id.hex() if isinstance(problem_id, bytes) else problem_id, *values)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CodecError(f"not a ledger entry: {error}") from None


class Admission(IntEnum):
    """The outcome of admitting a request. The values are those that ``admit.lua`` returns."""

    NEW = 2
    """The request is open now; none of its rollouts has been produced."""
    KNOWN = 1
    """The request was opened earlier; those of its rollouts that have not ended are to be produced."""
    REPEATED = 0
    """The request is already open under another entry."""
    ANSWERED = -1
    """The request was already answered."""
    CONFLICT = -2
    """A request with this id is open and asks for another number of samples."""
    GONE = -3
    """The entry does not exist any more: its request is answered, or Redis has lost it in a restart."""


class RequestProgress(NamedTuple):
    """How far a request is answered."""

    done: frozenset[int]
    """Samples in the ledger."""
    cancelled: bool


@dataclass(frozen=True)
class ResultProgress:
    """How many bytes of a client's results were written, read and noticed."""

    written: int
    read: int
    noticed: int | None
    """Bytes that the client knows to be in Redis; None if it is of a release that does not tell."""

    @property
    def unread(self) -> int:
        """Bytes that the client has not read."""
        return max(0, self.written - self.read)


class RequestStore(StorePart):
    """Admits requests and reads their progress."""

    async def admit(self, entry_id: str, request: RolloutRequest) -> Admission:
        """Open the ledger of a request. Unless the result is NEW or KNOWN, the entry is deleted."""
        ledger = self._keys.ledger(request.request_id)
        result = await self._call("admit", keys=[ledger, self._keys.requests], args=[entry_id, request.sampling.n])
        return Admission(int(result))

    async def admitted_entries(self, request_ids: Sequence[str]) -> list[str]:
        """Return for each request the id of the entry from which it was admitted; empty if it was not."""
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(self._keys.ledger(request_id), "entry")
        return [as_text(entry or b"") for entry in await pipeline.execute()] if request_ids else []

    async def read(self, entry_id: str) -> RolloutRequest | None:
        """Return the request of an entry as the client sent it; None once the request is answered."""
        found: Any = await self._client.xrange(self._keys.requests, min=entry_id, max=entry_id)
        if not found:
            return None
        message = decode(found[0][1][MESSAGE_FIELD.encode()])
        return message if isinstance(message, RolloutRequest) else None

    async def image(self, digest: str) -> bytes | None:
        """Return an encoded image, and keep it for longer; None if it is not there any more."""
        image: Any = await self._client.getex(self._keys.image(digest), ex=IMAGE_RETENTION_S)
        return None if image is None else bytes(image)

    async def progress(self, request_ids: Sequence[str]) -> list[RequestProgress]:
        """Return the progress of each request."""
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hkeys(self._keys.ledger(request_id))
            pipeline.hget(self._keys.ledger(request_id), "cancelled")
        replies = await pipeline.execute()
        return [
            RequestProgress(frozenset(int(key) for key in fields if key not in META_FIELDS), cancelled == b"1")
            for fields, cancelled in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def mark_cancelled(self, request_ids: Sequence[str]) -> None:
        """Record that requests were cancelled; unknown requests are ignored."""
        await self._call("cancel", keys=[self._keys.ledger(request_id) for request_id in request_ids])

    async def trajectory_engines(self, requests: Sequence[RolloutRequest]) -> list[str | None]:
        """Return for each request the engine that has its prefix cached; None for the first turn or if none has."""
        if not any(request.turn for request in requests):
            return [None] * len(requests)
        keys = [self._keys.trajectory(request.trajectory_id or "") for request in requests]
        found = await self._client.mget(keys)
        return [
            str(engine, "utf-8") if isinstance(engine, bytes) and request.turn else None
            for engine, request in zip(found, requests, strict=True)
        ]


class ResultStore(StorePart):
    """Refuses requests, and measures how far clients have received their results."""

    async def refuse(self, request: RolloutRequest, refusal: Refusal) -> None:
        """Tell the client of a request that it is refused."""
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(self._keys.refusal(request.request_id), encode(refusal), ex=REFUSAL_RETENTION_S)
            updates = self._keys.result_updates(request.reply_to)
            pipeline.xadd(updates, {REQUEST_FIELD: request.request_id}, maxlen=MAX_EVENTS)
            await pipeline.execute()

    async def progress(self, clients: Sequence[str]) -> dict[str, ResultProgress]:
        """Return how far each client has received its results."""
        if not clients:
            return {}
        pipeline = self._client.pipeline(transaction=False)
        for key in (self._keys.results_written, self._keys.results_read, self._keys.results_noticed):
            pipeline.hmget(key, clients)
        return {
            client: ResultProgress(int(written or 0), int(read or 0), None if noticed is None else int(noticed))
            for client, written, read, noticed in zip(clients, *await pipeline.execute(), strict=True)
        }


@dataclass(frozen=True)
class RequestTrace:
    """The trace of a request."""

    trace_id: int
    span_id: int
    """Id of the request's span."""
    caller_span_id: int = 0
    """Id of the span that the request's span is a child of; 0 if there is none."""
    caller_sampled: bool = False
    """Whether the caller records its span."""

    @classmethod
    def unpack(cls, data: bytes, job_uid: str, request_id: str) -> Self:
        """Return the trace of a request.

        With *data* that :func:`pack_trace` has not returned, which a later release may have written, the request has a
        trace of its own.
        """
        if len(data) not in _PACKED_LENGTHS:
            data = b""
        trace_id = data[:_TRACE_ID_BYTES] or _hash(_TRACE_ID_BYTES, "request", job_uid, request_id)
        caller, flags = _CALLER.unpack(data[_TRACE_ID_BYTES:]) if len(data) > _TRACE_ID_BYTES else (0, 0)
        return cls(int.from_bytes(trace_id, "big"), span_id_of(job_uid, request_id), caller, bool(flags & _SAMPLED))


def pack_trace(request: RolloutRequest) -> bytes:
    """Return what the trace of a request needs in addition to the job uid and the request id.

    A request with a ``traceparent`` continues the caller's trace. The turns of a trajectory share a trace, whose id
    follows from the trajectory id. Any other request has a trace of its own, and nothing has to be stored.
    """
    if request.traceparent is not None:
        _, trace_id, span_id, flags = request.traceparent.split("-")
        if int(trace_id, 16) and int(span_id, 16):  # zeros are invalid, and an invalid traceparent is ignored
            return bytes.fromhex(trace_id) + _CALLER.pack(int(span_id, 16), int(flags, 16))
    if request.trajectory_id is not None:
        return _hash(_TRACE_ID_BYTES, "trajectory", request.job_uid, request.trajectory_id)
    return b""


def span_id_of(*names: object) -> int:
    """Return the id of the span with these names."""
    return int.from_bytes(_hash(8, "span", *names), "big")


def _hash(num_bytes: int, *names: object) -> bytes:
    return blake2b("\0".join(map(str, names)).encode(), digest_size=num_bytes).digest()
