"""Two tensors to the numbers that troubleshooter prints of them (api-dump.md A.6). Pure.

Mean and maximum are over the unequal elements alone, in the type of the elements, and numbers are
cut off, not rounded. What `rankdump diff` says of two tensors is measured in `diff/measures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.api_tables import SHAPES_DIFFER
from rankdump.diff.values import Tolerances

_PLACES = 5
_SHARE_PLACES = 4
_LARGEST_NORM_OF_NOTHING = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a row of elements says."""

    result: str = str(False)
    share: float = 0.0
    """Of elements that are close, from 0 to 1."""
    cosine: float = math.nan
    mean: float = math.nan
    largest: float = math.nan

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The last four cells of its row."""
        return (
            self.result,
            f"{cut(self.share, _SHARE_PLACES):.2%}",
            _text(self.cosine),
            f"{_text(self.mean)}, {_text(self.largest)}",
        )


NO_PARTNER = Numbers()
_IDENTICAL = Numbers(str(True), 1.0, 1.0, 0.0, 0.0)


def numbers(a: npt.NDArray[Any], b: npt.NDArray[Any], tolerances: Tolerances) -> Numbers:
    """Return the numbers of two tensors; b is the one whose size the relative tolerance is of."""
    if a.shape != b.shape:
        return Numbers(SHAPES_DIFFER)
    a, b = _floating(a), _floating(b)
    unequal = a != b
    if not unequal.any():
        return _IDENTICAL
    with np.errstate(all="ignore"):
        apart = np.abs(a[unequal] - b[unequal])
        close = np.isclose(
            a, b, rtol=tolerances.rtol, atol=tolerances.atol, equal_nan=tolerances.equal_nan
        )
        share = float(np.count_nonzero(close) / close.size)
        result = str(bool(close.all()))
        return Numbers(result, share, _cosine(a.ravel(), b.ravel()), apart.mean(), apart.max())


def differences(a: tuple[float, ...], b: tuple[float, ...]) -> str:
    """Return the last cell of a row of figures: how far each is apart."""
    return ", ".join(_text(abs(one - other)) for one, other in zip(a, b, strict=True))


def cut(number: float, places: int) -> float:
    """Return a number without what lies behind so many decimal places.

    Of a float32 it is scaled as one, as numpy 2 does it for the tool.

    >>> cut(0.29999999, 5), cut(-1.5, 0)
    (0.29999, -1.0)
    """
    factor = 10**places
    single = getattr(number, "dtype", None) == np.float32
    with np.errstate(over="ignore"):
        scaled = float(np.multiply(number, factor, dtype=np.float32 if single else np.float64))
    return int(scaled) / factor if math.isfinite(scaled) else float(number)


def _text(number: float) -> str:
    return f"{cut(number, _PLACES):.{_PLACES}f}"


def _floating(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array to calculate with: of half floats the tool cannot print what it finds."""
    if array.dtype.kind == "c":
        return np.stack((np.real(array), np.imag(array)))
    if array.dtype.kind == "f":
        return array.astype(np.float32) if array.dtype.itemsize < np.float32().itemsize else array
    return array.astype(np.float64)


def _cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the cosine of two vectors; 1 when both are nothing, NaN when one is."""
    norm_a: Any = np.linalg.norm(a)
    norm_b: Any = np.linalg.norm(b)
    nothing = (norm_a <= _LARGEST_NORM_OF_NOTHING, norm_b <= _LARGEST_NORM_OF_NOTHING)
    if any(nothing):
        return 1.0 if all(nothing) else math.nan
    return float(np.clip(np.dot(a, b) / (norm_a * norm_b), -1, 1))
