"""Verdicts from fingerprints, for tensors whose elements are not known, or not needed: equal
digests decide, and sketches estimate how far two tensors are apart. Pure.

If each element is within the tolerances, the 2-norm of the difference is at most
`atol * sqrt(n) + rtol * norm(b)`. A difference that is estimated as clearly larger is certain; a
smaller one shows that the tensors are close as a whole, and not that each element is.
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

ESTIMATED_RMSE, ESTIMATED_ERROR = "rmse (estimated)", "relative error (estimated)"
"""Names among the differences of statistics."""
ESTIMATE_FINDING = "estimated from fingerprints, with a standard error of 9 percent"
OTHER_DIGESTS_FINDING = "their fingerprints differ, and their sketches cannot be compared"
_SURE_FACTOR = 1.3
"""Three standard errors above the bound."""
_DECIDED = (TensorVerdict.NAN, TensorVerdict.DIFFERENT)


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
    """Return the outcome of comparing statistics with what fingerprints say of the tensors."""
    left, right = a.fingerprint, b.fingerprint
    if left is None or right is None or a.shape is None or b.shape is None:
        return outcome
    if have_equal_fingerprints(a, b):
        return replace(outcome, verdict=TensorVerdict.EQUAL)
    if prod(a.shape) != prod(b.shape):
        return outcome
    narrow = NARROW_HALF_UNITS.get(select_comparison_dtype(a.dtype, b.dtype), 0.0)
    own, other = (np.frombuffer(each.sketch, "<f4").reshape(1, -1) for each in (left, right))
    judged = judge_sketches(
        own,
        other,
        np.array([prod(b.shape)]),
        tolerances,
        np.array([narrow]),
    )
    has_other_digest = a.dtype == b.dtype and None not in (left.digest, right.digest)
    return judged.judge(0, outcome, has_other_digest=has_other_digest)


@dataclass(frozen=True, slots=True)
class SketchDistances:
    """Estimates of many pairs of tensors; NaN for sketches that are not finite."""

    rmse: npt.NDArray[np.float64]
    relative: npt.NDArray[np.float64]
    """Of the 2-norms of the difference and of b."""
    is_apart: npt.NDArray[np.bool_]
    """Whether it is certain that some elements are not close."""

    def judge(self, at: int, outcome: PairOutcome, *, has_other_digest: bool) -> PairOutcome:
        """Return the outcome of comparing the statistics of a pair, with its estimates."""
        rmse, verdict = float(self.rmse[at]), outcome.verdict
        if math.isnan(rmse):
            if not has_other_digest or verdict in _DECIDED:
                return outcome
            if verdict is not TensorVerdict.CLOSE:
                is_equal = verdict is TensorVerdict.EQUAL
                verdict = TensorVerdict.CLOSE if is_equal else TensorVerdict.DIFFERENT
            return replace(
                outcome, verdict=verdict, findings=(*outcome.findings, OTHER_DIGESTS_FINDING)
            )
        if verdict not in _DECIDED:
            verdict = TensorVerdict.DIFFERENT if self.is_apart[at] else TensorVerdict.CLOSE
        estimates = {ESTIMATED_RMSE: rmse, ESTIMATED_ERROR: float(self.relative[at])}
        return replace(
            outcome,
            verdict=verdict,
            findings=(*outcome.findings, ESTIMATE_FINDING),
            statistic_differences={**outcome.statistic_differences, **estimates},
        )


def judge_sketches(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
    tolerances: ElementTolerances,
    narrow: npt.NDArray[np.float64],
) -> SketchDistances:
    """Return the distances of pairs of sketches, a row each, of tensors with so many elements.

    `narrow` is the least relative tolerance that follows from the types of each pair.
    """
    with np.errstate(all="ignore"):
        wide = b.astype(np.float64)
        distance = np.sqrt(np.square(a - wide).sum(axis=1))
        norm = np.sqrt(np.square(wide).sum(axis=1))
        roots = np.sqrt(counts)
        distance[~np.isfinite(distance) | ~np.isfinite(norm)] = np.nan
        bound = tolerances.atol * roots + np.maximum(tolerances.rtol, narrow) * norm
        relative = np.where(norm > 0, distance / norm, np.where(distance > 0, np.inf, 0.0))
        relative[np.isnan(distance)] = np.nan
        return SketchDistances(distance / roots, relative, distance > _SURE_FACTOR * bound)
