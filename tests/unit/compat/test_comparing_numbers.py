"""Numbers of troubleshooter: truncation, means, and values that it cannot print."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._analysis.compare.report import ElementTolerances
from rankdump._compat.comparison_tables import (
    compare_elements,
    format_statistic_differences,
    truncate_number,
)

TOLERANCES = ElementTolerances()


def cells(a: object, b: object, tolerances: ElementTolerances = TOLERANCES) -> tuple[str, ...]:
    return compare_elements(np.asarray(a), np.asarray(b), tolerances).cells


def test_differences_are_over_unequal_elements_and_truncated():
    a = np.array([1, 2, 3, 4], np.float32)
    b = np.array([1, 2, 3.1, 4.2], np.float32)
    assert cells(a, b) == ("False", "50.00%", "0.99985", "0.14999, 0.19999")


def test_close_elements_count_as_close_but_differ():
    assert cells([1.0, 2.0], [1.0, 2.00001]) == ("True", "100.00%", "0.99999", "0.00001, 0.00001")


def test_identical_tensors_of_any_type_have_no_differences():
    for dtype in (np.float16, np.int64, bool, np.complex64, np.uint8):
        ones = np.ones((2, 2), dtype)
        assert cells(ones, ones) == ("True", "100.00%", "1.00000", "0.00000, 0.00000")
    empty = np.zeros((0, 3), np.float32)
    assert cells(empty, empty)[0] == "True"


def test_different_shapes_are_a_result():
    assert cells([1.0], [1.0, 2.0]) == ("Shape is inconsistent", "0.00%", "nan", "nan, nan")


def test_equal_nan_makes_nan_close():
    tensor = [1.0, math.nan]
    assert cells(tensor, tensor)[:2] == ("False", "50.00%")
    tolerant = ElementTolerances(equal_nan=True)
    assert cells(tensor, tensor, tolerant) == ("True", "100.00%", "nan", "nan, nan")


def test_infinities_and_empty_tensors():
    assert cells([math.inf, 1.0], [1.0, 1.0]) == ("False", "50.00%", "nan", "inf, inf")
    assert cells([0.0, 0.0], [1.0, 1.0])[2] == "nan"
    assert cells([0.0, 1e-20], [0.0, 0.0])[2] == "1.00000"


def test_scalars_are_compared():
    assert cells(np.int64(2), np.int64(3)) == ("False", "0.00%", "1.00000", "1.00000, 1.00000")


def test_half_floats_and_complex_numbers_are_compared():
    assert (
        cells(np.array([1, 2], np.float16), np.array([1, 2.5], np.float16))[3] == "0.50000, 0.50000"
    )
    one, other = np.array([1 + 1j], np.complex64), np.array([1 + 2j], np.complex64)
    assert cells(one, other)[:2] == ("False", "50.00%")


def test_differences_of_statistics():
    assert (
        format_statistic_differences((1.0, -1.0, math.nan), (0.5, -2.0, 1.0))
        == "0.50000, 1.00000, nan"
    )


@given(st.floats(-1e6, 1e6))
def test_truncate_number_rounds_towards_zero(number):
    assert abs(truncate_number(number, 5)) <= abs(number) + 1e-9
    assert abs(number - truncate_number(number, 5)) < 1.1e-5


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e305, np.float32(3e38)])
def test_truncate_number_keeps_huge_numbers(number):
    assert truncate_number(number, 5) == number
