"""Types of the arrays that describe a batch, and how arrays grow with it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_MIN_ROWS = 16
"""Number of rows that are allocated first."""
_Scalar = TypeVar("_Scalar", bound=np.generic)


def with_row(array: npt.NDArray[_Scalar], row: int) -> npt.NDArray[_Scalar]:
    """Return *array* if it has a row of this number, else a longer copy; new rows consist of zeros.

    The copy has up to twice as many rows as needed, so that few are made while rows are added one by one.
    """
    if row < len(array):
        return array
    shape: tuple[Any, ...] = (max(_MIN_ROWS, 2 * row) - len(array), *array.shape[1:])
    return np.concatenate([array, np.zeros(shape, array.dtype)])
