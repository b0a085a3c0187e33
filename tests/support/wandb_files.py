"""Reads the file that an offline run of Weights & Biases has written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_CHUNK_HEADER = struct.Struct("<IHB")
"""Checksum, number of bytes, and type of a chunk."""
_LAST_TYPES = (1, 4)
"""Types of a chunk that is a whole record, and of one that ends a record."""


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a ``.wandb`` file, which has the format of LevelDB's log after a header."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    position, record = _FILE_HEADER_BYTES, b""
    while position + _CHUNK_HEADER.size <= len(data):
        if (rest := _BLOCK_BYTES - position % _BLOCK_BYTES) < _CHUNK_HEADER.size:
            position += rest  # a block's last bytes have no room for a chunk
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        record += data[position : position + length]
        position += length
        if kind in _LAST_TYPES:
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
