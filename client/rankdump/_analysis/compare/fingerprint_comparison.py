"""Verdicts from fingerprints, for tensors whose elements are not known or need not be read: equal
digests decide, and sketches estimate the distance of two tensors. Pure.

If each element is within the tolerances, the 2-norm of the difference is at most `atol * sqrt(n) +
rtol * norm(b)`. So a difference with a clearly larger estimate is certain. A smaller estimate shows
that the tensors are close as a whole, but not that each element is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.report import (
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_blocks import NARROW_HALF_UNITS, select_comparison_dtype

ESTIMATED_RMSE, ESTIMATED_ERROR = "estimated rmse", "estimated relative error"
"""Names under which estimates appear among the differences of statistics."""
ESTIMATE_FINDING = "estimated from fingerprints, with a standard error of 9 percent"
OTHER_DIGESTS_FINDING = "their fingerprints differ, and their sketches cannot be compared"
_SKETCHES_AT_A_TIME = 1 << 14
_SURE_FACTOR = 1.3
"""Factor for a certain difference: three standard errors of the estimate above the bound."""
VERDICTS = tuple(TensorVerdict)
"""All verdicts; arrays of verdicts contain indexes into this tuple."""
_NAN, _DIFFERENT, _CLOSE = map(
    VERDICTS.index, (TensorVerdict.NAN, TensorVerdict.DIFFERENT, TensorVerdict.NORMAL)
)


def have_equal_fingerprints(a: DumpedTensor, b: DumpedTensor) -> bool:
    """Return whether digests show that two tensors have the same elements."""
    left, right = a.fingerprint, b.fingerprint
    if left is None or right is None or left.digest is None or a.shape is None:
        return False
    return (
        left.digest == right.digest and a.shape == b.shape and bool(a.dtype) and a.dtype == b.dtype
    )


def judge_by_fingerprints(
    outcome: PairOutcome, a: DumpedTensor, b: DumpedTensor, tolerances: ElementTolerances
) -> PairOutcome:
    """Return the outcome of comparing statistics, completed with what the fingerprints show."""
    left, right = a.fingerprint, b.fingerprint
    if left is None or right is None or a.shape is None or b.shape is None:
        return outcome
    if have_equal_fingerprints(a, b):
        return replace(outcome, verdict=TensorVerdict.SAME)
    if prod(a.shape) != prod(b.shape):
        return outcome
    narrow = NARROW_HALF_UNITS.get(select_comparison_dtype(a.dtype, b.dtype), 0.0)
    own, other = (np.frombuffer(each.sketch, "<f4").reshape(1, -1) for each in (left, right))
    counts = np.array([prod(b.shape)])
    judged = judge_sketches(own, other, counts, tolerances, np.array([narrow]))
    has_other_digest = a.dtype == b.dtype and None not in (left.digest, right.digest)
    before = np.array([VERDICTS.index(outcome.verdict)])
    (verdict,) = judged.decide(before, has_other_digest=has_other_digest).tolist()
    rmse, findings, differences = float(judged.rmse[0]), outcome.findings, {}
    if not math.isnan(rmse):
        findings = *findings, ESTIMATE_FINDING
        differences = {ESTIMATED_RMSE: rmse, ESTIMATED_ERROR: float(judged.relative[0])}
    elif has_other_digest:
        findings = *findings, OTHER_DIGESTS_FINDING
    return replace(
        outcome,
        verdict=VERDICTS[verdict],
        findings=findings,
        statistic_differences={**outcome.statistic_differences, **differences},
    )


@dataclass(frozen=True, slots=True)
class SketchDistances:
    """Estimated distances of many pairs of tensors; NaN for sketches that are not finite."""

    rmse: npt.NDArray[np.float64]
    relative: npt.NDArray[np.float64]
    """2-norm of the difference, relative to the 2-norm of b."""
    is_apart: npt.NDArray[np.bool_]
    """Whether it is certain that some elements are not close."""

    def decide(
        self, verdicts: npt.NDArray[np.int64], *, has_other_digest: bool
    ) -> npt.NDArray[np.int64]:
        """Return the verdicts on pairs, given the verdicts from their statistics.

        Verdicts are indexes into VERDICTS. With `has_other_digest` the digests differ, so no pair
        is equal.
        """
        decided = (verdicts == _NAN) | (verdicts == _DIFFERENT)
        estimated = np.where(self.is_apart, _DIFFERENT, _CLOSE)
        unknown = np.where(verdicts == VERDICTS.index(TensorVerdict.UNKNOWN), _DIFFERENT, _CLOSE)
        without = unknown if has_other_digest else verdicts
        return np.where(decided, verdicts, np.where(np.isnan(self.rmse), without, estimated))


def judge_sketches(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
    tolerances: ElementTolerances,
    narrow: npt.NDArray[np.float64],
) -> SketchDistances:
    """Return the distances of pairs of sketches, one pair in each row; `counts` contains the number
    of elements of each tensor.

    `narrow` contains the smallest relative tolerance that follows from the types of each pair.
    """
    distance, norm = np.empty(len(a)), np.empty(len(a))
    with np.errstate(all="ignore"):
        for at in range(0, len(a), _SKETCHES_AT_A_TIME):
            part = slice(at, at + _SKETCHES_AT_A_TIME)
            wide = b[part].astype(np.float64)
            norm[part] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
            wide -= a[part]
            distance[part] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
        roots = np.sqrt(counts)
        distance[~np.isfinite(distance) | ~np.isfinite(norm)] = np.nan
        bound = tolerances.atol * roots + np.maximum(tolerances.rtol, narrow) * norm
        relative = np.where(norm > 0, distance / norm, np.where(distance > 0, np.inf, 0.0))
        relative[np.isnan(distance)] = np.nan
        return SketchDistances(distance / roots, relative, distance > _SURE_FACTOR * bound)
