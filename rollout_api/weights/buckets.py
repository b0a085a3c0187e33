"""Divides a sequence of tensors into buckets, each of which is broadcast at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

DEFAULT_BUCKET_BYTES = 256 << 20
"""Largest bucket of several tensors; trainer and engine each hold one."""
_ALIGNMENT = 16
"""Tensors begin at multiples of this, so that memory can be viewed as any data type."""


@dataclass(frozen=True)
class Bucket:
    """Successive tensors in one block of memory."""

    offsets: tuple[int, ...]
    """First byte of each tensor."""
    size: int
    """Bytes of the block."""


def plan_packed(sizes: Iterable[int], limit: int) -> Iterator[Bucket]:
    """Yield the blocks of vLLM's packed format, in order, in which tensors have no gaps between them.

    Source: ``pack_tensors`` of ``vllm/distributed/weight_transfer/packed_tensor.py``, vLLM 0.32.

    Args:
        sizes: bytes of each tensor.
        limit: a block ends with the first tensor with which it has more bytes.
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += size
        if end > limit:
            yield Bucket(tuple(offsets), end)
            offsets, end = [], 0
    if offsets:
        yield Bucket(tuple(offsets), end)


def plan_buckets(sizes: Iterable[int], limit: int) -> Iterator[Bucket]:
    """Yield the buckets of tensors, in order. Trainer and engines compute the same ones.

    Args:
        sizes: bytes of each tensor.
        limit: largest size of a bucket. A larger tensor has a bucket of its own; with 0, each tensor has.
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if offsets and (not limit or start + size > limit):
            yield Bucket(tuple(offsets), end)
            offsets, start = [], 0
        offsets.append(start)
        end = start + size
    if offsets:
        yield Bucket(tuple(offsets), end)
