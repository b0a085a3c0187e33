"""How one rollout is written in a history's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

RECORD_VERSION = 1
_RESERVED = 2**32 - 1
"""No token id; the draft index uses it as the start of a response."""
_GENERATIONS = 2**53
"""Generations stay exact in Lua, whose numbers are doubles."""
TokenArray = NDArray[np.uint32]


class RecordError(ValueError):
    """Bytes that are no record; the text says what is wrong with them."""


@dataclass(frozen=True, eq=False)
class HistoryRecord:
    """One finished rollout of a problem, as a draft index and length statistics need it."""

    rollout_id: str
    run: str
    """Uid of the job that made it; weight versions are counted within a run."""
    weight_version: int
    generation: int
    """Age within the history: counts published weight versions over all runs."""
    tokens: TokenArray
    """The model's own response tokens, shape (length,), uint32."""
    finish_reason: str


def encode_record(record: HistoryRecord) -> bytes:
    """*record* as msgpack, the token ids as packed little-endian uint32."""
    packed: bytes = msgpack.packb(
        [
            RECORD_VERSION,
            record.rollout_id,
            record.run,
            record.weight_version,
            record.generation,
            record.finish_reason,
            record.tokens.astype("<u4", copy=False).tobytes(),
        ]
    )
    return packed


def decode_record(data: bytes) -> HistoryRecord:
    """The inverse of :func:`encode_record`.

    Raises:
        RecordError: if *data* is no record of a known version.
    """
    try:
        body: Any = msgpack.unpackb(data)
    except Exception as error:  # msgpack raises a dozen unrelated types, ValueError to UnicodeDecodeError
        raise RecordError(f"no msgpack: {error or type(error).__name__}") from None
    if not isinstance(body, list) or not body or body[0] != RECORD_VERSION:
        raise RecordError(f"not a record of version {RECORD_VERSION}")
    match body[1:]:
        case [str(rollout_id), str(run), int(version), int(generation), str(reason), bytes(tokens)] if (
            len(tokens) % 4 == 0
        ):
            ids = np.frombuffer(tokens, dtype="<u4").astype(np.uint32, copy=False)
            if len(ids) and ids.max() == _RESERVED:
                raise RecordError(f"token id {_RESERVED} is out of range")
            if not 0 <= generation < _GENERATIONS:
                raise RecordError(f"generation {generation} is out of range")
            return HistoryRecord(rollout_id, run, version, generation, ids, reason)
    raise RecordError("a field is missing or of the wrong type")
