"""Types of the arrays that describe the rollouts of a batch, and a function that makes such arrays longer."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_MIN_ROWS = 16
"""Number of rows that are allocated first."""
_Scalar = TypeVar("_Scalar", bound=np.generic)


def with_row(array: npt.NDArray[_Scalar], row: int, new: Any = 0) -> npt.NDArray[_Scalar]:
    """Return *array* if it has the row *row*; otherwise a copy that has it, with *new* in all new rows.

    The copy has at least twice as many rows as *row*, so that few copies are made while rows are added one by one.
    """
    if row < len(array):
        return array
    shape: tuple[Any, ...] = (max(_MIN_ROWS, 2 * row) - len(array), *array.shape[1:])
    added = np.empty(shape, array.dtype)
    added[...] = new
    return np.concatenate([array, added])
