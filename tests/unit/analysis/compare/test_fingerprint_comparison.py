"""Verdicts from fingerprints: equal digests, and what sketches estimate."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from rankdump._analysis.compare.fingerprint_comparison import (
    ESTIMATE_FINDING,
    ESTIMATED_ERROR,
    ESTIMATED_RMSE,
    OTHER_DIGESTS_FINDING,
)
from rankdump._analysis.compare.pair_comparison import compute_statistics, decide_without_reading
from rankdump._analysis.compare.report import (
    ComparisonSettings,
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._core.record import TensorSide
from rankdump._core.tensor_fingerprint import measure_with_fingerprint, place_fingerprint

Array: TypeAlias = "npt.NDArray[Any]"
ONE = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)


def describe(array: Array, *, has_statistics: bool = True, dtype: str = "float32") -> DumpedTensor:
    placement = place_fingerprint(dtype, array.shape, None)
    packed = measure_with_fingerprint((), dtype, array.tobytes(), placement).fingerprint
    known = RecordedFingerprint(int.from_bytes(packed[:8], "little"), packed[8:])
    statistics = compute_statistics(array) if has_statistics else {}
    tensor = DumpedTensor(TensorSide.OUTPUT, 0, "", dtype, array.shape, statistics=statistics)
    return tensor._replace(fingerprint=known)


def compare(a: DumpedTensor, b: DumpedTensor, *, atol: float = 1e-4) -> PairOutcome:
    settings = ComparisonSettings(ElementTolerances(atol=atol))
    found = decide_without_reading(TensorPair(a, b), settings)
    assert found is not None
    return found


@pytest.mark.parametrize("has_statistics", [True, False])
def test_equal_digests_are_equal_elements(has_statistics: bool):
    tensor = describe(ONE, has_statistics=has_statistics)
    outcome = compare(tensor, tensor)
    assert (outcome.verdict, outcome.findings) == (TensorVerdict.SAME, ())
    assert outcome.nonfinite_a is (False if has_statistics else None)


@pytest.mark.parametrize("has_statistics", [True, False])
def test_sketches_estimate_how_far_tensors_are_apart(has_statistics: bool):
    noise = np.random.default_rng(1).normal(size=ONE.shape).astype(np.float32)
    other = ONE + np.float32(0.02) * noise
    tensors = [describe(each, has_statistics=has_statistics) for each in (other, ONE)]
    outcome = compare(*tensors)
    assert outcome.verdict is TensorVerdict.DIFFERENT
    assert outcome.findings == (ESTIMATE_FINDING,)
    found = outcome.statistic_differences
    assert found[ESTIMATED_RMSE] == pytest.approx(0.02, rel=0.3)
    exact = float(np.linalg.norm(other - ONE) / np.linalg.norm(ONE))
    assert found[ESTIMATED_ERROR] == pytest.approx(exact, rel=0.3)
    assert compare(*tensors, atol=0.1).verdict is TensorVerdict.NORMAL


def test_elements_in_other_places_are_found_although_statistics_are_equal():
    outcome = compare(describe(ONE[::-1].copy()), describe(ONE))
    assert outcome.verdict is TensorVerdict.DIFFERENT
    assert outcome.statistic_differences["max"] == 0.0


def test_change_within_the_tolerances_is_close_and_never_equal():
    """Statistics are the same as far as they are known."""
    other = ONE.copy()
    other[3, 4] += np.float32(1e-6)
    tensors = [describe(each)._replace(statistics={"max": 4.0}) for each in (other, ONE)]
    assert compare(*tensors).verdict is TensorVerdict.NORMAL


def test_types_are_compared_by_their_sketches_with_the_rounding_of_the_narrower_one():
    bits = (ONE.view(np.uint32) >> 16).astype(np.uint16)
    narrow = describe(bits, dtype="bfloat16", has_statistics=False)
    outcome = compare(narrow, describe(ONE, has_statistics=False))
    assert outcome.verdict is TensorVerdict.NORMAL
    assert ESTIMATE_FINDING in outcome.findings


def test_sketches_that_are_not_finite_leave_the_digests():
    huge = np.full((4, 4), 3e38, np.float32)
    other = huge.copy()
    other[0, 0] = 2e38
    endless = np.full(64, np.inf, "<f4").tobytes()
    tensors = [
        tensor._replace(fingerprint=tensor.fingerprint._replace(sketch=endless))
        for tensor in (describe(each, has_statistics=False) for each in (huge, other))
        if tensor.fingerprint is not None
    ]
    outcome = compare(*tensors)
    assert outcome.verdict is TensorVerdict.DIFFERENT
    assert OTHER_DIGESTS_FINDING in outcome.findings


def test_a_partial_value_is_equal_to_nothing():
    """The bits of terms of a sum do not add up."""
    tensor = describe(ONE)
    assert tensor.fingerprint is not None
    partial = tensor._replace(fingerprint=tensor.fingerprint._replace(digest=None))
    assert compare(partial, partial).verdict is TensorVerdict.NORMAL
