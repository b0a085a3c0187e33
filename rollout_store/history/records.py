"""Encoding of rollouts in a history: single records in the log, and many together in a block."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from rollout_api.protocol.history_encoding import decode_draft_sources, encode_draft_sources

RECORD_VERSION = 1
"""Version of the encoding."""
CONTEXT_TOKENS = 64
"""Number of tokens in front of a response that the suffix index compares."""
BLOCK_COMPRESSION_LEVEL = 9
"""zstd level of blocks, which are written once and read often."""
_LOG_COMPRESSION_LEVEL = 3
"""zstd level of single records in the log."""
_RESERVED_TOKEN_ID = 2**32 - 1
"""Not a token id: the suffix index marks the start of a response with it."""
_GENERATION_LIMIT = 2**53
"""Generations below this are exact in Lua, whose numbers are doubles."""
_HEADER = struct.Struct("<BI")
"""Version, and the CRC-32 of what follows."""
_MAX_BYTES = 2**30
"""Maximum decompressed size of a record or block, so that damaged data does not request all memory."""
TokenArray: TypeAlias = NDArray[np.uint32]
"""Token ids from 0 to 2^32 - 2, shape (length,). 2^32 - 1 is reserved for the boundary token of the suffix index."""


class RecordError(ValueError):
    """The data is not an encoded record; the message says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class HistoryRecord:
    """One finished rollout, with the data that suffix indexes and length statistics need."""

    rollout_id: str
    """The rollout id."""
    run: str
    """Uid of the job that sampled it, within which weight versions are counted."""
    weight_version: int
    """The weight version that sampled it."""
    generation: int
    """The generation of that weight version in this history."""
    tokens: TokenArray
    """Token ids of the response, shape (length,), uint32."""
    finish_reason: str
    """Why the rollout ended."""
    context: TokenArray = field(default_factory=lambda: np.empty(0, np.uint32))
    """The last tokens before the response in later turns of a trajectory, shape (at most CONTEXT_TOKENS,), uint32.

    Empty in turn 0, whose responses are matched from their start.
    """
    step: int = -1
    """The training step, or the epoch of a dataset source; -1 if unknown."""
    draft_sources: bytes = b""
    """Code of each token, one byte for a token: whether it is an accepted draft token, and its source.

    See :mod:`rollout_api.protocol.history_encoding`. Empty if no draft was verified, or if it is unknown."""

    @property
    def cut_off(self) -> bool:
        """Whether the rollout was ended by something other than the model, so that it would have been longer."""
        return is_cut_off(self.finish_reason)


def is_cut_off(finish_reason: str) -> bool:
    """Return whether a rollout with this finish reason was ended by something other than the model."""
    return finish_reason != "stop"


def encode_record(record: HistoryRecord) -> bytes:
    """Encode one record for the log."""
    return encode_records([record], level=_LOG_COMPRESSION_LEVEL)


def encode_records(records: Sequence[HistoryRecord], *, level: int = BLOCK_COMPRESSION_LEVEL) -> bytes:
    """Encode records of one problem together: a header, then what is compressed with zstd.

    That is columns in msgpack, the token ids, and the draft sources.
    Columns of similar values compress well: siblings share much of their text, and their ids differ little. Token ids
    are stored as uint16 if all of them fit, otherwise as uint32. ``benchmarks.history`` measures why this is zstd at
    this level and not bit packing. Draft sources are stored as runs, as in messages.
    """
    tokens, token_bytes = _concatenate([record.tokens for record in records])
    contexts, context_bytes = _concatenate([record.context for record in records])
    sources = [encode_draft_sources(record.draft_sources) for record in records]
    columns = [
        [record.rollout_id for record in records],
        _encode_runs([record.run for record in records]),
        [record.weight_version for record in records],
        [record.generation for record in records],
        _encode_runs([record.finish_reason for record in records]),
        [record.step for record in records],
        [len(record.tokens) for record in records],
        [len(record.context) for record in records],
        token_bytes,
        context_bytes,
        [len(encoded) for encoded in sources],
    ]
    packed_columns = msgpack.packb(columns)
    body = struct.pack("<I", len(packed_columns)) + packed_columns + tokens + contexts + b"".join(sources)
    compressed = zstandard.ZstdCompressor(level=level).compress(body)
    return _HEADER.pack(RECORD_VERSION, zlib.crc32(compressed)) + compressed


def decode_record(data: bytes) -> HistoryRecord:
    """Reverse :func:`encode_record`.

    Raises:
        RecordError: *data* was not encoded by this function.
    """
    records = decode_records(data)
    if len(records) != 1:
        raise RecordError(f"it contains {len(records)} records instead of one")
    return records[0]


def decode_records(data: bytes) -> list[HistoryRecord]:
    """Reverse :func:`encode_records`.

    Raises:
        RecordError: *data* was not encoded by this function.
    """
    columns, body = _decompress(data)
    match columns:
        case [
            list(ids),
            list(runs),
            list(versions),
            list(generations),
            list(reasons),
            list(steps),
            list(lengths),
            list(context_lengths),
            (2 | 4) as token_bytes,
            (2 | 4) as context_bytes,
            list(source_bytes),
        ]:
            pass
        case _:
            raise RecordError("a column is missing or of the wrong type")
    count = len(ids)
    runs, reasons = _decode_runs(runs, count), _decode_runs(reasons, count)
    numbers = (versions, generations, steps, lengths, context_lengths, source_bytes)
    if {len(column) for column in numbers} != {count}:
        raise RecordError("columns have different lengths")
    if not all(isinstance(name, str) for name in ids):
        raise RecordError("a rollout id is not a string")
    if not all(isinstance(number, int) for column in numbers for number in column):
        raise RecordError("a number is not an integer")
    if any(not 0 <= generation < _GENERATION_LIMIT for generation in generations):
        raise RecordError("a generation is out of range")
    if any(length < 0 for column in (lengths, context_lengths, source_bytes) for length in column):
        raise RecordError("a length is negative")
    end_of_tokens = sum(lengths) * token_bytes
    end_of_contexts = end_of_tokens + sum(context_lengths) * context_bytes
    if len(body) != end_of_contexts + sum(source_bytes):
        raise RecordError("the lengths do not match the number of token ids")
    tokens = _split(_token_ids(body[:end_of_tokens], token_bytes), lengths)
    contexts = _split(_token_ids(body[end_of_tokens:end_of_contexts], context_bytes), context_lengths)
    sources = _split_sources(body[end_of_contexts:], source_bytes, lengths)
    return [
        HistoryRecord(*values)
        for values in zip(ids, runs, versions, generations, tokens, reasons, contexts, steps, sources, strict=True)
    ]


def _decompress(data: bytes) -> tuple[Any, bytes]:
    """Return the columns and the bytes of the token ids and the draft sources."""
    if len(data) < _HEADER.size or data[0] != RECORD_VERSION:
        raise RecordError(f"it is not of version {RECORD_VERSION}")
    _, checksum = _HEADER.unpack_from(data)
    compressed = data[_HEADER.size :]
    if zlib.crc32(compressed) != checksum:
        raise RecordError("the checksum is wrong: bytes were changed or lost")
    try:
        size = zstandard.frame_content_size(compressed)
        if not 4 <= size <= _MAX_BYTES:
            raise RecordError(f"its decompressed size of {size} bytes is out of range")
        body = zstandard.ZstdDecompressor().decompress(compressed)
        (length,) = struct.unpack_from("<I", body)
        return msgpack.unpackb(body[4 : 4 + length]), body[4 + length :]
    except RecordError:
        raise
    except Exception as error:  # msgpack raises a dozen unrelated types, from ValueError to UnicodeDecodeError
        raise RecordError(f"it cannot be decoded: {error or type(error).__name__}") from None


def _concatenate(arrays: Sequence[TokenArray]) -> tuple[bytes, int]:
    """Return all token ids, little-endian, and the number of bytes per id."""
    ids = np.concatenate(arrays)
    small = not len(ids) or int(ids.max()) < 2**16
    return ids.astype("<u2" if small else "<u4").tobytes(), 2 if small else 4


def _encode_runs(texts: Sequence[str]) -> list[Any]:
    """Encode equal neighbors once: ``[text, count, text, count, …]``."""
    runs: list[Any] = []
    for text in texts:
        if runs and runs[-2] == text:
            runs[-1] += 1
        else:
            runs += [text, 1]
    return runs


def _decode_runs(runs: Sequence[Any], count: int) -> list[str]:
    """Reverse :func:`_encode_runs`."""
    texts: list[str] = []
    for text, times in zip(runs[::2], runs[1::2], strict=False):
        if not (isinstance(text, str) and isinstance(times, int) and 0 < times <= count - len(texts)):
            raise RecordError("a run of equal texts is damaged")
        texts += [text] * times
    if len(texts) != count or len(runs) % 2:
        raise RecordError("columns have different lengths")
    return texts


def _token_ids(packed: bytes, size: int) -> TokenArray:
    ids = np.frombuffer(packed, dtype=f"<u{size}").astype(np.uint32, copy=False)
    if size == 4 and len(ids) and ids.max() == _RESERVED_TOKEN_ID:
        raise RecordError(f"token id {_RESERVED_TOKEN_ID} is out of range")
    return ids


def _split(ids: TokenArray, lengths: Sequence[int]) -> list[TokenArray]:
    ends = np.cumsum(lengths, dtype=np.int64)
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _split_sources(encoded: bytes, sizes: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Return the draft sources of each record, given their encoded sizes and the numbers of tokens."""
    split: list[bytes] = []
    start = 0
    for size, length in zip(sizes, lengths, strict=True):
        sources = decode_draft_sources(encoded[start : start + size])
        if sources and len(sources) != length:
            raise RecordError("the draft sources do not match the number of token ids")
        split.append(sources)
        start += size
    return split


START = "-"
"""Cursor in front of the first entry of a log."""


def block_name(newest_generation: int, last_entry: str) -> str:
    """Return the name of a block."""
    return f"{newest_generation}:{last_entry}"


def last_entry_of(block: bytes) -> str:
    """Return the id of the last log entry that was packed into the block of this name."""
    return block.decode(errors="replace").rpartition(":")[2]


def entry_position(entry_id: str) -> tuple[int, int]:
    """Return a log entry's id as numbers that can be compared; what is not an id comes first."""
    milliseconds, _, number = entry_id.partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdigit() and number.isdigit() else (-1, -1)


def block_position(block: bytes) -> tuple[int, int]:
    """Return the position in the log of the last entry that was packed into the block of this name."""
    return entry_position(last_entry_of(block))
