"""Encoding of a drafter's learned state in Redis."""

from __future__ import annotations

import zstandard

from rollout_worker.history.records import RecordError

_COMPRESSION_LEVEL = 3
_MAX_BYTES = 2**24
"""Maximum decompressed size, so that damaged data does not request all memory."""


def encode_drafter_state(state: bytes) -> bytes:
    """Compress a state (``SuffixIndex.state_dict``) and add a checksum."""
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True).compress(state)


def decode_drafter_state(data: bytes) -> bytes:
    """Reverse :func:`encode_drafter_state`.

    Raises:
        RecordError: *data* is not an encoded state.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= _MAX_BYTES:
            raise RecordError("its decompressed size is out of range")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise RecordError(f"it cannot be decompressed: {error}") from None
