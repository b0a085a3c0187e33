"""Reads and writes the layout of safetensors files, so that their tensors can be accessed as bytes. Needs numpy."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SAFETENSORS_DTYPES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}
"""PyTorch's names of data types → those of safetensors."""
_HEADER_SIZE = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    dtype: str
    """Name of the data type in safetensors."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file."""
    size: int
    """Number of bytes."""


def write_safetensors(path: Path, tensors: Sequence[tuple[str, str, Sequence[int], npt.NDArray[Any]]]) -> None:
    """Write a file.

    Args:
        path: the file.
        tensors: name, data type in safetensors, shape and elements of each tensor, in one dimension.
    """
    described, end = {}, 0
    for name, dtype, shape, elements in tensors:
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + elements.nbytes]}
        end += elements.nbytes
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(_HEADER_SIZE.pack(len(header)) + header)
        for *_, elements in tensors:
            file.write(elements.view(np.uint8).data)


def read_layout(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in the order in which they are stored.

    Raises:
        ValueError: the file is not a complete safetensors file.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            [header_size] = _HEADER_SIZE.unpack(file.read(_HEADER_SIZE.size))
            if header_size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {header_size} bytes")
            described: dict[str, Any] = json.loads(file.read(header_size))
        first = _HEADER_SIZE.size + header_size
        tensors = [
            StoredTensor(
                name,
                tensor["dtype"],
                tuple(tensor["shape"]),
                first + tensor["data_offsets"][0],
                tensor["data_offsets"][1] - tensor["data_offsets"][0],
            )
            for name, tensor in described.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a safetensors file: {error!r}") from None
    tensors.sort(key=lambda tensor: tensor.offset)
    if any(tensor.size < 0 or tensor.offset + tensor.size > size for tensor in tensors):
        raise ValueError(f"{path} has {size} bytes, which is less than its tensors need")
    return tensors
