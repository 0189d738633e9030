"""Two tensors by their figures alone, where the elements of one were never kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.moments import moments
from rankdump.diff.values import Outcome, Tensor, Tolerances, Verdict

_NONFINITE_COUNTS = ("nan count", "negative inf count", "positive inf count")


def compared(
    a: Mapping[str, float], b: Mapping[str, float], tolerances: Tolerances
) -> tuple[Verdict, Mapping[str, float]]:
    """Return a verdict and the differences by name, of the figures that both have.

    One that is NaN on both sides says nothing: of NaN there may be one or many.
    """
    known = {name: (a[name], b[name]) for name in a if name in b}
    known = {name: pair for name, pair in known.items() if not all(map(math.isnan, pair))}
    if not known:
        return Verdict.UNKNOWN, {}
    differences = {name: _difference(*pair) for name, pair in known.items()}
    if all(left == right for left, right in known.values()):
        return Verdict.EQUAL, differences
    if any(_apart(*pair) for pair in known.values()):
        return Verdict.NAN, differences
    close = (
        differences[name] <= tolerances.atol + tolerances.rtol * abs(right)
        for name, (_, right) in known.items()
    )
    return (Verdict.CLOSE if all(close) else Verdict.DIFFERENT), differences


def _difference(left: float, right: float) -> float:
    return 0.0 if left == right else abs(left - right)


def _apart(left: float, right: float) -> bool:
    """Return whether one of two numbers is not finite, and the other is not the same."""
    return left != right and not (math.isfinite(left) and math.isfinite(right))


def figures_of(array: npt.NDArray[Any]) -> dict[str, float]:
    """Return the figures of elements that are there; none of complex ones."""
    if array.dtype.kind == "c":
        return {}
    with np.errstate(all="ignore"):
        found = moments(array.reshape(-1))
    return {
        "max": found.maximum,
        "min": found.minimum,
        "avg": found.mean,
        "l2norm": found.l2norm,
        "count": found.count,
        "nan count": found.nans,
        "negative inf count": found.negative_infinities,
        "positive inf count": found.positive_infinities,
        "zero count": found.zeros,
    }


def nonfinite_of(tensor: Tensor | None) -> bool | None:
    """Return whether figures say that a tensor holds NaN or infinity; None when they cannot.

    The counts tell, and so do both extremes: a NaN makes them NaN.
    """
    if tensor is None or tensor.dtype == "bool":
        return None if tensor is None else False
    figures = tensor.figures
    if not figures:
        return None
    counts = [figures.get(name) for name in _NONFINITE_COUNTS]
    if None not in counts:
        return any(counts)
    extremes = [figures[name] for name in ("max", "min") if name in figures]
    if not all(map(math.isfinite, extremes)):
        return True
    return False if len(extremes) == 2 else None


def by_figures(a: Tensor, b: Tensor, tolerances: Tolerances, findings: tuple[str, ...]) -> Outcome:
    """Return what the figures of two tensors say of them."""
    verdict, differences = compared(a.figures, b.figures, tolerances)
    if verdict is Verdict.UNKNOWN:
        findings = (*findings, "neither elements nor figures are known on both sides")
    return Outcome(
        verdict,
        findings,
        figures=differences,
        nonfinite_a=nonfinite_of(a),
        nonfinite_b=nonfinite_of(b),
    )
