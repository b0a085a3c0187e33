"""Files that contain the difference between two versions of a model's weights. Needs numpy.

A file begins with ``DASDELT1`` and the size of the header, as a little-endian uint32. The header is a JSON object whose
list ``tensors`` describes each tensor that changes. Their compressed differences follow, in the same order; see
:mod:`rollout_api.weights.delta_codec`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout_api.weights.delta_codec import DeltaError

_MAGIC = b"DASDELT1"
_HEADER_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class TensorDelta:
    """The difference between two versions of one tensor."""

    name: str
    """Name of the tensor in the checkpoint."""
    element_bytes: int
    """Size of an element in bytes."""
    num_elements: int
    """Number of the tensor's elements."""
    num_changed: int
    """Number of elements that differ."""
    fingerprint: str
    """Fingerprint of the tensor after the change; see :func:`rollout_api.weights.delta_codec.fingerprint`."""
    data: bytes
    """The compressed difference."""


def write_delta(path: Path, tensors: Sequence[TensorDelta]) -> tuple[int, str]:
    """Write a file atomically, and return its size in bytes and its SHA-256 in hex."""
    described = [
        {name: value for name, value in asdict(tensor).items() if name != "data"} | {"size": len(tensor.data)}
        for tensor in tensors
    ]
    header = json.dumps({"tensors": described}, separators=(",", ":")).encode()
    content = b"".join([_MAGIC, _HEADER_SIZE.pack(len(header)), header, *(tensor.data for tensor in tensors)])
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
    return len(content), hashlib.sha256(content).hexdigest()


def read_delta(path: Path, sha256: str) -> list[TensorDelta]:
    """Read a file.

    Args:
        path: the file.
        sha256: its expected SHA-256 in hex.

    Raises:
        DeltaError: it cannot be read, or has another content.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DeltaError(f"the difference {path} cannot be read: {error}") from None
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DeltaError(f"the difference {path} has the checksum {found}, but was published with {sha256}")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise DeltaError(f"the difference {path} has an unknown format: {error!r}") from None


def _parse(content: bytes) -> list[TensorDelta]:
    if not content.startswith(_MAGIC):
        raise ValueError("it does not begin as a difference does")
    start = len(_MAGIC) + _HEADER_SIZE.size
    [size] = _HEADER_SIZE.unpack_from(content, len(_MAGIC))
    tensors, position = [], start + size
    for described in json.loads(content[start:position])["tensors"]:
        end = position + described.pop("size")
        tensors.append(TensorDelta(**described, data=content[position:end]))
        position = end
    if position != len(content):
        raise ValueError(f"it has {len(content)} bytes instead of {position}")
    return tensors
