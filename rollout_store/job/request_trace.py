"""Where the span of a request is in its trace.

Trace ids and span ids follow from the request. The coordinator and the relay, and processes that replace them, thus add
spans to the same trace without talking to each other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from rollout_api.protocol.messages import RolloutRequest

_TRACE_ID_BYTES = 16
_CALLER = struct.Struct(">QB")
"""Packed span id of the caller, and flags of its ``traceparent``."""
_PACKED_LENGTHS = (0, _TRACE_ID_BYTES, _TRACE_ID_BYTES + _CALLER.size)
_SAMPLED = 0x01
"""Flag of a W3C ``traceparent``."""


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

        Args:
            data: what :func:`pack_trace` has returned for the request. With anything else, which a later release may
                have written, the request has a trace of its own.
            job_uid: uid of the request's job.
            request_id: id of the request.
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
