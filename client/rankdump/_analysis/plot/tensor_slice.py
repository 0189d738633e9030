"""Slice of a tensor along two of its dimensions, as a map of at most 512 x 512 cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_CELLS = 512
"""Rows, and columns, of a map."""
CORNER = 8
"""Rows, and columns, of the elements that are listed as they are."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Two dimensions of a tensor, at one index of each other dimension."""

    row_axis: int
    column_axis: int
    at: tuple[int, ...]
    """Index in each dimension; that of the two shown does not count."""
    shape: tuple[int, int]
    """Elements that are shown, before any are joined to one cell."""
    cells: npt.NDArray[np.float64]
    """The element of each cell with the largest magnitude; NaN where one is in it."""
    corner: npt.NDArray[Any]
    """The first elements, as they are."""

    @property
    def row_step(self) -> int:
        """Elements in a column of one cell."""
        return -(-self.shape[0] // MAX_CELLS) or 1

    @property
    def column_step(self) -> int:
        """Elements in a row of one cell."""
        return -(-self.shape[1] // MAX_CELLS) or 1


def cut_slice(
    tensor: npt.NDArray[Any], row_axis: int, column_axis: int, at: Sequence[int]
) -> TensorSlice:
    """Return the slice of numbers; `at` has an index for each dimension.

    A tensor of one dimension is one row, and a scalar one cell. IndexError where an index or a
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
    """Return what a function makes of each block of rows and columns."""
    rows = reduce.reduceat(part, range(0, part.shape[0], row_step), axis=0)
    return reduce.reduceat(rows, range(0, part.shape[1], column_step), axis=1)
