"""How what an index has learned of drafts is written in Redis."""

from __future__ import annotations

import zstandard

from rollout_worker.history.records import RecordError

_LEVEL = 3
_LARGEST = 2**24
"""Bytes unpacked: damaged bytes must not ask for all memory."""


def encode_learned(learned: bytes) -> bytes:
    """``SuffixIndex.learned``, packed with a checksum."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(learned)


def decode_learned(data: bytes) -> bytes:
    """The inverse of :func:`encode_learned`.

    Raises:
        RecordError: if *data* is none of its results.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= _LARGEST:
            raise RecordError("out of range unpacked")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise RecordError(f"cannot be unpacked: {error}") from None
