"""Slice of a tensor along two of its dimensions, as a map with at most 512 x 512 cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_CELLS = 512
"""Largest number of rows, and of columns, in a map."""
CORNER = 8
"""Number of rows, and of columns, of the corner whose elements are listed unchanged."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Slice along two dimensions of a tensor, at one index in each other dimension."""

    row_axis: int
    column_axis: int
    at: tuple[int, ...]
    """Index in each dimension; ignored in the two dimensions of the slice."""
    shape: tuple[int, int]
    """Number of rows and columns of the slice, before elements are joined into cells."""
    cells: npt.NDArray[np.float64]
    """The element with the largest magnitude in each cell; NaN if the cell has a NaN."""
    corner: npt.NDArray[Any]
    """The first elements of the slice, unchanged."""

    @property
    def row_step(self) -> int:
        """Number of rows of elements in one cell."""
        return -(-self.shape[0] // MAX_CELLS) or 1

    @property
    def column_step(self) -> int:
        """Number of columns of elements in one cell."""
        return -(-self.shape[1] // MAX_CELLS) or 1


def cut_slice(
    tensor: npt.NDArray[Any], row_axis: int, column_axis: int, at: Sequence[int]
) -> TensorSlice:
    """Return the slice of a tensor; `at` has an index for each dimension.

    A tensor with one dimension is one row, and a scalar is one cell. IndexError if an index or a
    dimension is outside of the tensor.
    """
    if tensor.ndim < 2:
        flat = tensor.reshape(1, -1)
        return _make_slice(flat, 0, 0, tuple(at))
    if row_axis == column_axis or not {row_axis, column_axis} <= set(range(tensor.ndim)):
        raise IndexError(f"dimensions {row_axis} and {column_axis} of {tensor.ndim}")
    place = tuple(
        slice(None) if axis in (row_axis, column_axis) else int(index)
        for axis, index in enumerate(at)
    )
    part = np.asarray(tensor[place])
    if row_axis > column_axis:
        part = np.transpose(part)
    return _make_slice(part, row_axis, column_axis, tuple(at))


def _make_slice(
    part: npt.NDArray[Any], row_axis: int, column_axis: int, at: tuple[int, ...]
) -> TensorSlice:
    rows, columns = part.shape
    numbers = np.abs(part) if part.dtype.kind == "c" else part
    cells = join_cells(numbers, -(-rows // MAX_CELLS) or 1, -(-columns // MAX_CELLS) or 1)
    return TensorSlice(row_axis, column_axis, at, (rows, columns), cells, part[:CORNER, :CORNER])


def join_cells(part: npt.NDArray[Any], row_step: int, column_step: int) -> npt.NDArray[np.float64]:
    """Return the element with the largest magnitude of each block of rows and columns."""
    if not part.size:
        return np.zeros((0, 0))
    if row_step == column_step == 1:
        return part.astype(np.float64)
    highest = reduce_blocks(np.maximum, part, row_step, column_step).astype(np.float64)
    lowest = reduce_blocks(np.minimum, part, row_step, column_step).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(highest >= -lowest, highest, np.where(np.isnan(highest), np.nan, lowest))


def reduce_blocks(
    reduce: np.ufunc, part: npt.NDArray[Any], row_step: int, column_step: int
) -> npt.NDArray[Any]:
    """Return the results of a function for all blocks of rows and columns."""
    rows = reduce.reduceat(part, range(0, part.shape[0], row_step), axis=0)
    return reduce.reduceat(rows, range(0, part.shape[1], column_step), axis=1)
