"""Which part of the modules is measured, and what counts as a jump."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._recorder.pulse_decisions import (
    MAX_STRIDE,
    MIN_HISTORY,
    choose_stride,
    has_jumped,
)


@pytest.mark.parametrize(
    ("stride", "share", "expected", "is_over_budget"),
    [
        (1, 0.009, 1, False),
        (1, 0.02, 3, False),
        (4, 0.0101, 6, False),
        (4, 0.002, 1, False),
        (4, 0.006, 4, False),
        (1, 0.0, 1, False),
        (MAX_STRIDE, 0.5, MAX_STRIDE, True),
        (600, 0.5, MAX_STRIDE, False),
    ],
)
def test_stride_follows_the_share(stride, share, expected, is_over_budget):
    assert choose_stride(stride, share, 0.01) == (expected, is_over_budget)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 0.02), st.floats(0.001, 1.0))
def test_stride_settles_where_the_cost_is_allowed(part_cost, fixed_cost, allowed):
    """The cost of a step is a fixed one, and one that falls with the stride."""
    stride = 1
    seen: list[int] = []
    for _ in range(60):
        share = fixed_cost + part_cost / stride
        stride = choose_stride(stride, share, allowed).stride
        seen.append(stride)
    share = fixed_cost + part_cost / stride
    # Modules are whole: a stride of 2 in place of 1 halves the cost.
    assert share <= allowed * 1.0001 or stride == MAX_STRIDE or fixed_cost > allowed / 2
    assert 1 <= stride <= MAX_STRIDE


def test_jump_needs_a_history():
    assert not has_jumped([1.0] * (MIN_HISTORY - 1), 1e9)
    assert has_jumped([1.0] * MIN_HISTORY, 1e9)


def test_norm_that_varies_much_needs_a_larger_jump():
    wide = [1.0, 30.0, 1000.0] * 8
    assert not has_jumped(wide, 20_000.0)
    assert has_jumped([1.0, 1.1, 1.2] * 8, 20_000.0)


@given(st.lists(st.floats(0.01, 1e6), min_size=MIN_HISTORY), st.floats(0.01, 1e9))
def test_jump_is_one_by_the_logarithms(earlier, norm):
    usual = [math.log(each) for each in earlier]
    middle = statistics.median(usual)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in usual)
    above = math.log(norm) - middle
    assert has_jumped(earlier, norm) == (above > math.log(10) and above > 10 * deviation)


def test_smaller_or_equal_norms_are_no_jump():
    assert not has_jumped([5.0] * 20, 5.0)
    assert not has_jumped([5.0] * 20, 1e-9)


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0, -1.0])
def test_norm_without_a_logarithm_is_no_jump(norm):
    assert not has_jumped([1.0] * 20, norm)


def test_earlier_norms_without_a_logarithm_do_not_count():
    assert not has_jumped([math.nan, math.inf, 0.0] * 20, 1e9)
