from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rankdump.reader import statistics

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=6),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(FLOATS)
def test_statistics_equal_plain_python(values):
    """Every figure is what its definition says, element by element, in double precision."""
    plain = [float(x) for x in values.reshape(-1)]
    figures = statistics(values)
    assert figures.count == len(plain)
    assert figures.nans == sum(map(math.isnan, plain))
    assert figures.infinities == sum(map(math.isinf, plain))
    assert figures.zeros == sum(x == 0 for x in plain)
    if figures.nans:
        extremes = (figures.minimum, figures.maximum, figures.mean, figures.l2norm)
        assert [str(figure) for figure in extremes] == ["nan"] * 4
        return
    assert figures.minimum == min(plain)
    assert figures.maximum == max(plain)
    if not figures.infinities:
        assert figures.l2norm == pytest.approx(math.hypot(*plain), rel=1e-9)
        scale = max(map(abs, plain))
        assert figures.mean == pytest.approx(math.fsum(plain) / len(plain), abs=1e-9 * scale)
    else:
        assert figures.l2norm == math.inf


def test_statistics_of_an_empty_tensor_have_no_extremes():
    """Nothing is made up for a tensor without elements."""
    figures = statistics(np.empty((3, 0), np.float32))
    assert (figures.minimum, figures.maximum, figures.mean) == (None, None, None)
    assert (figures.count, figures.l2norm) == (0, 0.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([True, False, True]), (0.0, 1.0, 2 / 3, math.sqrt(2), 1)),
        (np.array([-3, 4], np.int8), (-3.0, 4.0, 0.5, 5.0, 0)),
        (np.array([3 + 4j, 0], np.complex64), (0.0, 5.0, 2.5, 5.0, 1)),
        (np.array([1e200, 1e200]), (1e200, 1e200, 1e200, math.inf, 0)),
    ],
    ids=["bool", "int8", "complex", "huge"],
)
def test_statistics_of_all_types_and_ranges(values, expected):
    """Booleans, integers, moduli; squares that leave a double are as in statistic.csv: infinite."""
    figures = statistics(values)
    shown = (figures.minimum, figures.maximum, figures.mean, figures.l2norm, figures.zeros)
    assert shown == pytest.approx(expected, rel=1e-12)


def test_statistics_do_not_depend_on_blocks():
    """A tensor of several blocks has the figures of the whole."""
    values = np.arange((1 << 20) * 2 + 7, dtype=np.float64)
    values[-1] = np.inf
    figures = statistics(values)
    assert figures.maximum == math.inf
    assert figures.infinities == 1
    assert figures.zeros == 1
    assert statistics(values[:-1]).l2norm == pytest.approx(np.linalg.norm(values[:-1]))
