"""Measures of msaccucmp (Ascend/msprobe) beside its formulas and rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._analysis.compare.msaccucmp_measures import (
    MSACCUCMP_NAMES,
    compute_msaccucmp_measures,
)

FLOOR = float(np.finfo(np.float32).eps)


def plainly(x, y) -> dict[str, float]:
    """The same from whole arrays."""
    x, y = (each.astype(np.float32).astype(np.float64) for each in (x, y))
    terms = np.array(
        [abs(p / q - 1) if abs(q) > 2.3e-16 else 0.0 for p, q in zip(x, y, strict=True)]
    )
    p, q = weights(x), weights(y)
    return {
        "MaxAbsoluteError": np.abs(x - y).max(),
        "AccumulatedRelativeError": terms.sum(),
        "RelativeEuclideanDistance": np.linalg.norm(x - y) / np.linalg.norm(y) if y.any() else 0,
        "KullbackLeiblerDivergence": (p * np.log(p / q)).sum(),
        "StandardDeviation.mean_a": x.mean(),
        "StandardDeviation.std_b": y.std(),
        "MeanAbsoluteError": np.abs(x - y).mean(),
        "RootMeanSquareError": math.sqrt(((x - y) ** 2).mean()),
        "MaxRelativeError": terms.max(),
        "MeanRelativeError": terms.mean(),
    }


def weights(values):
    span = values.max() - values.min()
    scaled = np.maximum((values - values.min()) / span if span else values, FLOOR)
    return scaled / scaled.sum()


values = st.lists(st.integers(-40, 40).map(lambda number: number / 8), min_size=7, max_size=7)


@given(values, values)
def test_measures_follow_the_formulas(left, right):
    x, y = np.array(left), np.array(right)
    found = compute_msaccucmp_measures(x, y)
    assert tuple(found) == MSACCUCMP_NAMES
    for name, expected in plainly(x, y).items():
        assert found[name] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def test_cosine_of_zeros_and_single_elements():
    assert compute_msaccucmp_measures(np.array([3.0]), np.array([-4.0]))["CosineSimilarity"] == 1.0
    assert compute_msaccucmp_measures(np.zeros(2), np.zeros(2))["CosineSimilarity"] == 1.0
    assert math.isnan(compute_msaccucmp_measures(np.zeros(2), np.ones(2))["CosineSimilarity"])
    assert (
        compute_msaccucmp_measures(np.array([1.0, 0]), np.array([0, 2.0]))["CosineSimilarity"]
        == 0.0
    )
    assert (
        compute_msaccucmp_measures(np.array([1.0, 1]), np.array([2, 2.0]))["CosineSimilarity"]
        <= 1.0
    )


def test_deviations_below_the_limit_are_zero():
    found = compute_msaccucmp_measures(np.array([0.0001, 0.0002]), np.array([1.0, 2.0]))
    assert (found["StandardDeviation.mean_a"], found["StandardDeviation.std_a"]) == (0.0, 0.0)
    assert found["StandardDeviation.std_b"] == 0.5


def test_measures_are_nan_without_real_finite_elements():
    bools = compute_msaccucmp_measures(np.array([True, False]), np.array([True, True]))
    known = {name for name, value in bools.items() if not math.isnan(value)}
    assert known == {"CosineSimilarity", "RelativeEuclideanDistance"}
    ones = np.ones(2)
    for odd in (np.array([1, math.nan]), np.array([1, math.inf]), np.array([1e300, 1]), ones * 1j):
        for pair in ((odd, ones), (ones, odd)):
            assert all(map(math.isnan, compute_msaccucmp_measures(*pair).values()))
    assert all(map(math.isnan, compute_msaccucmp_measures(np.zeros(0), np.zeros(0)).values()))
