"""Slices of tensors: any two dimensions, and extremes where there are too many elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rankdump._analysis.plot.tensor_slice import MAX_CELLS, cut_slice, join_cells

TENSOR = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("axes", "at", "expected"),
    [
        ((1, 2), (1, 0, 0), TENSOR[1]),
        ((2, 1), (1, 0, 0), TENSOR[1].T),
        ((0, 2), (0, 2, 0), TENSOR[:, 2]),
        ((2, 0), (0, 2, 3), TENSOR[:, 2].T),
    ],
)
def test_any_two_dimensions(axes, at, expected):
    found = cut_slice(TENSOR, axes[0], axes[1], at)
    assert (found.cells == expected).all()
    assert found.shape == expected.shape


@pytest.mark.parametrize(("tensor", "shape"), [(np.float32(3), (1, 1)), (np.arange(5), (1, 5))])
def test_less_than_two_dimensions_are_one_row(tensor, shape):
    assert cut_slice(np.asarray(tensor), 0, 0, (0,) * np.ndim(tensor)).cells.shape == shape


@pytest.mark.parametrize(
    ("axes", "at"), [((0, 0), (0, 0, 0)), ((1, 3), (0,) * 3), ((0, 1), (0, 0, 9))]
)
def test_slice_outside_of_the_tensor_is_an_error(axes, at):
    with pytest.raises(IndexError):
        cut_slice(TENSOR, axes[0], axes[1], at)


def test_large_slices_keep_extremes_and_nan():
    large = np.zeros((MAX_CELLS * 3, MAX_CELLS + 1), np.float16)
    large[4, 5], large[7, 7], large[1535, 512] = -5, np.nan, 3
    found = cut_slice(large, 0, 1, (0, 0))
    assert found.cells.shape == (MAX_CELLS, 257)
    assert (found.row_step, found.column_step) == (3, 2)
    assert found.cells[1, 2] == -5
    assert np.isnan(found.cells[2, 3])
    assert found.cells[511, 256] == 3


@given(
    arrays.arrays(
        np.float64, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(-9, 9)
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_cell_is_the_extreme_of_its_block(part, row_step, column_step):
    cells = join_cells(part, row_step, column_step)
    for (row, column), value in np.ndenumerate(cells):
        rows = slice(row * row_step, (row + 1) * row_step)
        block = part[rows, column * column_step : (column + 1) * column_step]
        assert abs(value) == np.abs(block).max()
        assert value in block
