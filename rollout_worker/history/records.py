"""How rollouts are written in a history: one alone in the log, many together in a block."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

RECORD_VERSION = 3
CONTEXT_TOKENS = 64
"""As many tokens before a response as the draft index compares."""
COMPACT = 9
"""Level of zstd for blocks, which are written once and read often; a record in the log is packed at a low one."""
_QUICK = 3
_RESERVED = 2**32 - 1
"""No token id; the draft index uses it as the start of a response."""
_GENERATIONS = 2**53
"""Generations stay exact in Lua, whose numbers are doubles."""
_HEADER = struct.Struct("<BI")
"""Version, and the CRC-32 of what follows it."""
_LARGEST = 2**30
"""Bytes that a record or block may have unpacked: damaged bytes must not ask for all memory."""
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
    context: TokenArray = field(default_factory=lambda: np.empty(0, np.uint32))
    """The last tokens before the response in later turns of a trajectory, shape (at most CONTEXT_TOKENS,), uint32.

    Empty in turn 0, whose responses are matched from their start.
    """
    step: int = -1
    """The trainer's step, or the epoch of a dataset, for which it was made; -1 where none was told."""

    @property
    def cut_off(self) -> bool:
        """Whether something else than the model ended it: it would have been longer."""
        return self.finish_reason != "stop"


def encode_record(record: HistoryRecord) -> bytes:
    """One record as it stands in the log."""
    return encode_records([record], level=_QUICK)


def encode_records(records: Sequence[HistoryRecord], *, level: int = COMPACT) -> bytes:
    """Records of one problem packed together: a header and columns in msgpack, compressed by zstd.

    Columns of equal things compress well: siblings share much of their text, and ids differ by little. Token ids are
    u16 where all fit, else u32. Why zstd and no bit-packing, and this level, is measured by ``benchmarks.history``.

    Args:
        records: at least one.
        level: of zstd.
    """
    tokens, token_bytes = _pack([record.tokens for record in records])
    contexts, context_bytes = _pack([record.context for record in records])
    columns = [
        [record.rollout_id for record in records],
        _runs([record.run for record in records]),
        [record.weight_version for record in records],
        [record.generation for record in records],
        _runs([record.finish_reason for record in records]),
        [record.step for record in records],
        [len(record.tokens) for record in records],
        [len(record.context) for record in records],
        token_bytes,
        context_bytes,
    ]
    meta = msgpack.packb(columns)
    packed = zstandard.ZstdCompressor(level=level).compress(struct.pack("<I", len(meta)) + meta + tokens + contexts)
    return _HEADER.pack(RECORD_VERSION, zlib.crc32(packed)) + packed


def decode_record(data: bytes) -> HistoryRecord:
    """The inverse of :func:`encode_record`; of versions 1 (no context) and 2 (not compressed) as well.

    Raises:
        RecordError: if *data* is no record of a known version.
    """
    if data[:1] != bytes([RECORD_VERSION]):
        return _decode_plain(data)
    records = decode_records(data)
    if len(records) != 1:
        raise RecordError(f"{len(records)} records where one belongs")
    return records[0]


def decode_records(data: bytes) -> list[HistoryRecord]:
    """The inverse of :func:`encode_records`.

    Raises:
        RecordError: if *data* is none of its results.
    """
    columns, body = _unpacked(data)
    match columns:
        case [list(ids), list(runs), list(versions), list(generations), list(reasons), list(steps), *rest]:
            pass
        case _:
            raise RecordError("a column is missing or of the wrong type")
    match rest:
        case [list(lengths), list(context_lengths), (2 | 4) as token_bytes, (2 | 4) as context_bytes]:
            pass
        case _:
            raise RecordError("a column of lengths is missing or of the wrong type")
    count = len(ids)
    runs, reasons = _spread(runs, count), _spread(reasons, count)
    numbers = (versions, generations, steps, lengths, context_lengths)
    if {len(column) for column in numbers} != {count}:
        raise RecordError("columns have different lengths")
    if not all(isinstance(name, str) for name in ids):
        raise RecordError("a rollout id is no text")
    if not all(isinstance(number, int) for column in numbers for number in column):
        raise RecordError("a number is none")
    if any(not 0 <= generation < _GENERATIONS for generation in generations):
        raise RecordError("a generation is out of range")
    if any(length < 0 for column in (lengths, context_lengths) for length in column):
        raise RecordError("a length is negative")
    ends = sum(lengths) * token_bytes
    if len(body) != ends + sum(context_lengths) * context_bytes:
        raise RecordError("lengths and token ids do not go together")
    tokens = _split(_ids(body[:ends], token_bytes), lengths)
    contexts = _split(_ids(body[ends:], context_bytes), context_lengths)
    return [
        HistoryRecord(*one)
        for one in zip(ids, runs, versions, generations, tokens, reasons, contexts, steps, strict=True)
    ]


def _unpacked(data: bytes) -> tuple[Any, bytes]:
    """Columns, and the bytes of token ids behind them."""
    if len(data) < _HEADER.size or data[0] != RECORD_VERSION:
        raise RecordError(f"not of version {RECORD_VERSION}")
    _, checksum = _HEADER.unpack_from(data)
    packed = data[_HEADER.size :]
    if zlib.crc32(packed) != checksum:
        raise RecordError("the checksum is wrong: bytes were changed or lost")
    try:
        size = zstandard.frame_content_size(packed)
        if not 4 <= size <= _LARGEST:
            raise RecordError(f"{size} bytes unpacked are out of range")
        plain = zstandard.ZstdDecompressor().decompress(packed)
        (length,) = struct.unpack_from("<I", plain)
        return msgpack.unpackb(plain[4 : 4 + length]), plain[4 + length :]
    except RecordError:
        raise
    except Exception as error:  # msgpack raises a dozen unrelated types, ValueError to UnicodeDecodeError
        raise RecordError(f"cannot be unpacked: {error or type(error).__name__}") from None


def _pack(arrays: Sequence[TokenArray]) -> tuple[bytes, int]:
    """All ids after each other, little-endian, and the bytes of each."""
    ids = np.concatenate(arrays)
    small = not len(ids) or int(ids.max()) < 2**16
    return ids.astype("<u2" if small else "<u4").tobytes(), 2 if small else 4


def _runs(texts: Sequence[str]) -> list[Any]:
    """Equal neighbours as one: ``[text, count, text, count, …]``."""
    runs: list[Any] = []
    for text in texts:
        if runs and runs[-2] == text:
            runs[-1] += 1
        else:
            runs += [text, 1]
    return runs


def _spread(runs: Sequence[Any], count: int) -> list[str]:
    """The inverse of :func:`_runs`."""
    texts: list[str] = []
    for text, times in zip(runs[::2], runs[1::2], strict=False):
        if not (isinstance(text, str) and isinstance(times, int) and 0 < times <= count - len(texts)):
            raise RecordError("a run of equal texts is damaged")
        texts += [text] * times
    if len(texts) != count or len(runs) % 2:
        raise RecordError("columns have different lengths")
    return texts


def _ids(packed: bytes, size: int = 4) -> TokenArray:
    if len(packed) % size:
        raise RecordError(f"{len(packed)} bytes of token ids are no whole number of uint{8 * size}")
    ids = np.frombuffer(packed, dtype=f"<u{size}").astype(np.uint32, copy=False)
    if size == 4 and len(ids) and ids.max() == _RESERVED:
        raise RecordError(f"token id {_RESERVED} is out of range")
    return ids


def _split(ids: TokenArray, lengths: Sequence[int]) -> list[TokenArray]:
    ends = np.cumsum(lengths, dtype=np.int64)
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _decode_plain(data: bytes) -> HistoryRecord:
    try:
        body: Any = msgpack.unpackb(data)
    except Exception as error:  # see above
        raise RecordError(f"no msgpack: {error or type(error).__name__}") from None
    if not isinstance(body, list) or not body or body[0] not in (1, 2):
        raise RecordError(f"not a record of version 1 to {RECORD_VERSION}")
    fields = [*body[1:], b""] if body[0] == 1 else body[1:]
    match fields:
        case [str(rollout_id), str(run), int(version), int(generation), str(reason), bytes(tokens), bytes(context)]:
            if not 0 <= generation < _GENERATIONS:
                raise RecordError(f"generation {generation} is out of range")
            return HistoryRecord(rollout_id, run, version, generation, _ids(tokens), reason, _ids(context))
    raise RecordError("a field is missing or of the wrong type")
