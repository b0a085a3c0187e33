"""Views of tensors and of memory as arrays, and index arrays for rows of different lengths."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = np.ndarray[Any, Any]
Float32 = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def float32(tensor: torch.Tensor) -> Float32:
    """Return the numbers of a tensor of any floating-point type: a view if they are float32, otherwise a copy."""
    array: Float32 = tensor.float().numpy()
    return array


@lru_cache(maxsize=64)
def int32_memory(address: int, length: int) -> npt.NDArray[np.int32]:
    """Return a view of *length* integers that start at *address*."""
    return np.ctypeslib.as_array((ctypes.c_int32 * length).from_address(address))


def enumerate_rows(lengths: Array) -> tuple[Integers, Integers]:
    """Return the row and the place within its row of each element of rows that have these lengths, in order."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - np.repeat(starts, lengths)
