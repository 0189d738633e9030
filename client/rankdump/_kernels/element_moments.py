"""Moments of elements, from which statistics are computed; the codes of element types in kernels;
and addresses of the elements of arrays. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ELEMENT_CODES = {
    name: code
    for code, name in enumerate(
        ("bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64"),
    )
}
"""Code of each element type that kernels read, in the order of `kernels.h`."""

EXTREMES, SUMS, COUNTS = 1, 2, 4
"""Flags of the parts of the moments, to be added; each part is a loop over the elements."""
ALL_PARTS = EXTREMES | SUMS | COUNTS


class ElementMoments(NamedTuple):
    """Results of one pass over the elements, in float64. Parts that were not requested are
    undefined.

    Every element counts as a float64, to which 64-bit integers are rounded, and a byte of a bool
    above zero as one. All but the sums are exact. With u = 2**-53, n elements and no overflow, the
    error of `total` is at most (70 + n / 1024) * u * sum(abs(x)) in the compiled kernels, which
    have 16 lanes in blocks of 1024 elements and the same bits on every processor, and that of
    `squares` at most as many times u * sum(x * x). numpy has 8192 + n / 8192 in place of
    70 + n / 1024. (To the first order in u: Higham, Accuracy and Stability of Numerical
    Algorithms, section 4.2.)
    """

    size: int = 0
    maximum: float = -math.inf
    """Largest element; NaN if an element is NaN, minus infinity if there is no element. 0.0 is
    above -0.0.
    """
    minimum: float = math.inf
    total: float = 0.0
    squares: float = 0.0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    positives: int = 0
    """Number of elements above zero, including infinity."""
    negatives: int = 0
    zeros: int = 0
    """Number of elements equal to zero, of either sign."""

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN if there is no element."""
        return self.total / self.size if self.size else math.nan

    @property
    def l2norm(self) -> float:
        """Root of the sum of squares."""
        return math.sqrt(self.squares)

    def merge_with(self, other: ElementMoments) -> ElementMoments:
        """Return the moments of both sets of elements together."""
        return merge_moments((self, other))


PACKED_MOMENTS = Struct("=q4d6q")
"""Binary form of the fields of `ElementMoments`, in order, as in `kernels.h`."""


def merge_moments(parts: Sequence[ElementMoments]) -> ElementMoments:
    """Return the moments of several sets of elements together."""
    if not parts:
        return ElementMoments()
    size, maxima, minima, *sums = zip(*parts, strict=True)
    # The minimum is computed as a maximum: the larger of -x and -y is the negative of the smaller
    # of x and y.
    minimum = -_find_maximum([-minimum for minimum in minima])
    return ElementMoments(sum(size), _find_maximum(maxima), minimum, *map(sum, sums))


def _find_maximum(numbers: Sequence[float]) -> float:
    if any(map(math.isnan, numbers)):
        return math.nan
    return max(numbers, key=lambda number: (number, math.copysign(1.0, number)))


class _MemoryDescription:
    """Description of memory in the form in which numpy accepts it from other libraries."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.__array_interface__ = description


def view_memory(
    address: int,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> npt.NDArray[Any]:
    """Return an array over memory, which the caller keeps alive; `strides` are in bytes."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    description: dict[str, Any] = {
        "version": 3,
        "data": (address, False),
        "typestr": np.dtype(dtype).str,
        "shape": shape,
        "strides": strides,
    }
    return np.asarray(_MemoryDescription(description))


def find_address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first element; this is faster than `array.ctypes`."""
    return array.__array_interface__["data"][0]
