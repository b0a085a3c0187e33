"""Differences between two versions of a tensor, bit by bit. Pure; needs numpy.

At the learning rates of RL, most weights in bfloat16 do not change from one version to the next, because an update of
less than half a unit in the last place is rounded away; those that change mostly do so by one unit (arXiv 2602.03839).
A difference therefore consists of the distances between the changed elements, and of what is added to each as an
integer. Distances and additions are separated into planes of bytes, most of which are zero or noise, so that zlib only
looks for repeated bytes. benchmarks/README.md says how many bytes this takes.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]
"""The elements of a tensor as unsigned integers of the same size, in one dimension."""
MAX_ELEMENTS = 2**32
"""Largest number of elements of a tensor."""
_DISTANCE = np.dtype("<u4")
_BLOCK_ELEMENTS = 1 << 20
"""Number of elements that are compared at once, so that intermediate results stay in the CPU's cache."""
_WORDS_PER_SUM = 4096
_DIGEST_BYTES = 8


class DeltaError(ValueError):
    """A difference cannot be read or applied. The message says why."""


def word_type(size: int) -> np.dtype[Any]:
    """Return the type of the words that stand for elements of *size* bytes: 1, 2, 4 or 8.

    Raises:
        DeltaError: there are no such words.
    """
    if size not in (1, 2, 4, 8):
        raise DeltaError(f"elements of {size} bytes are not supported")
    return np.dtype(f"<u{size}")


def encode(old: Words, new: Words) -> tuple[int, bytes]:
    """Return the number of elements in which *new* differs from *old*, and the compressed difference.

    Args:
        old: the elements before.
        new: as many elements of the same type.

    Raises:
        DeltaError: there are too many elements.
    """
    if len(new) > MAX_ELEMENTS:
        raise DeltaError(f"a tensor has {len(new)} elements; at most {MAX_ELEMENTS} are supported")
    distances, additions, previous = [], [], -1
    for start in range(0, len(new), _BLOCK_ELEMENTS):
        before, after = old[start : start + _BLOCK_ELEMENTS], new[start : start + _BLOCK_ELEMENTS]
        found = _find_changes(before, after)
        if len(found):
            additions.append(after[found] - before[found])
            found += start
            distances.append((np.diff(found, prepend=previous) - 1).astype(_DISTANCE))
            previous = int(found[-1])
    if not distances:
        return 0, b""
    added = np.concatenate(additions)
    compressor = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_RLE)
    planes = _to_planes(np.concatenate(distances)) + _to_planes(added)
    return len(added), compressor.compress(planes) + compressor.flush()


def apply(target: Words, num_changed: int, data: bytes) -> None:
    """Change *target* in place from the old version to the new one.

    Args:
        target: the elements.
        num_changed: number of elements that change.
        data: the difference.

    Raises:
        DeltaError: *data* is not a difference of so many elements, or not of such a tensor; *target* is unchanged.
    """
    if not num_changed:
        return
    size = target.dtype.itemsize
    split, end = num_changed * _DISTANCE.itemsize, num_changed * (_DISTANCE.itemsize + size)
    decompressor = zlib.decompressobj()
    try:
        planes = decompressor.decompress(data, end + 1)
    except zlib.error as error:
        raise DeltaError(f"the difference cannot be decompressed: {error}") from None
    if len(planes) != end or not decompressor.eof:
        raise DeltaError(f"the difference has not the size of {num_changed} changed elements")
    positions = np.cumsum(_from_planes(planes[:split], _DISTANCE).astype(np.int64) + 1) - 1
    if positions[-1] >= len(target):
        raise DeltaError(f"the difference changes element {positions[-1]} of a tensor with {len(target)}")
    target[positions] += _from_planes(planes[split:], target.dtype)


def fingerprint(elements: Words) -> str:
    """Return a hash of a tensor's bytes, in hex, that is as fast as reading them.

    It finds a tensor to which a difference was applied that belongs to another version. It is not cryptographic: blocks
    of 32 KiB are only summed up, and the sums are hashed.
    """
    data: npt.NDArray[np.uint8] = elements.view(np.uint8)
    whole = len(data) // (8 * _WORDS_PER_SUM) * (8 * _WORDS_PER_SUM)
    sums = data[:whole].view("<u8").reshape(-1, _WORDS_PER_SUM).sum(axis=1, dtype="<u8")
    digest = blake2b(sums.tobytes(), digest_size=_DIGEST_BYTES)
    digest.update(data[whole:].tobytes())
    return digest.hexdigest()


def _find_changes(old: Words, new: Words) -> npt.NDArray[np.int64]:
    """Return the indices of the elements that differ, in order."""
    per_group = 8 // old.dtype.itemsize
    whole = len(old) // per_group * per_group
    # Few elements change, so that groups of eight bytes are compared first.
    old_groups, new_groups = old[:whole].view("<u8"), new[:whole].view("<u8")
    groups = np.flatnonzero(old_groups != new_groups)
    within = np.flatnonzero(old_groups[groups].view(old.dtype) != new_groups[groups].view(old.dtype))
    changed: npt.NDArray[np.int64] = np.concatenate(
        [
            groups[within // per_group] * per_group + within % per_group,
            np.flatnonzero(old[whole:] != new[whole:]) + whole,
        ]
    )
    return changed


def _to_planes(words: Words) -> bytes:
    """Return the first bytes of all words, then the second ones, and so on."""
    return bytes(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T.tobytes())


def _from_planes(planes: bytes, dtype: np.dtype[Any]) -> Words:
    """Return the words of :func:`_to_planes`."""
    words: Words = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T)
    return words.reshape(-1).view(dtype)
