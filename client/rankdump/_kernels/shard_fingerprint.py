"""Fingerprints of tensors, which add up over shards: equal tensors have equal fingerprints, and the
distance of two fingerprints estimates the distance of the tensors. Pure.

    digest   sum of (h | 1) * (bits + 1) modulo 2**64, h = splitmix64(global index of the element)
    sketch   64 sums: each element adds to bucket h >> 58, negated where bit 57 of h is set
    moments  of the elements

The digest depends on every bit of every element, and its place; it is the same in any order of
summation. The sketch is a CountSketch (Charikar, Chen, Farach-Colton, Finding Frequent Items in
Data Streams, 2002), which is linear: that of a sum or difference is the sum or difference of
sketches, but for rounding. Its 2-norm estimates the 2-norm of the elements, here with a standard
error of about sqrt(2 / 64) = 18 percent of the square. An element that is not finite is not in
the sketch. A complex element is two real ones, in a last dimension of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rankdump._kernels.element_moments import ELEMENT_CODES, ElementMoments, find_address
from rankdump._kernels.kernel_functions import KERNELS
from rankdump.errors import UnsupportedError

SKETCH_BUCKETS = 64
_DIGEST_RANGE = 1 << 64


class ShardFingerprint(NamedTuple):
    """Fingerprint of a tensor or a shard of it."""

    digest: int
    """Digest from 0 to 2**64 - 1; that of a shard uses the global indices of its elements."""
    sketch: npt.NDArray[np.float64]
    moments: ElementMoments

    def merge_with(self, other: ShardFingerprint) -> ShardFingerprint:
        """Return the joint fingerprint of two shards that have no elements in common."""
        return ShardFingerprint(
            (self.digest + other.digest) % _DIGEST_RANGE,
            self.sketch + other.sketch,
            self.moments.merge_with(other.moments),
        )

    def estimate_distance(self, other: ShardFingerprint) -> float:
        """Return an estimate of the 2-norm of the difference of two tensors with the same shape."""
        return float(np.linalg.norm(self.sketch - other.sketch))


def compute_fingerprint(
    elements: npt.NDArray[Any],
    dtype: str | None = None,
    *,
    global_shape: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
) -> ShardFingerprint:
    """Return the fingerprint of a shard whose first element is at `offset` in the whole tensor.

    Without `global_shape` the array is the whole tensor. `dtype` names an element type that numpy
    lacks, such as bfloat16 held as uint16. UnsupportedError for a type without kernels, or a shard
    that is not within the tensor. The result does not depend on the layout of the array in memory.
    """
    shape = elements.shape if global_shape is None else global_shape
    start = (0,) * len(shape) if offset is None else offset
    _check_place(elements.shape, shape, start)
    real = _make_native(elements)
    if real.ndim != elements.ndim:
        shape, start = (*shape, 2), (*start, 0)
    name = dtype or str(real.dtype)
    code = ELEMENT_CODES.get(name)
    if code is None:
        raise UnsupportedError(f"element type {name!r} has no fingerprint")
    digest, sketch, moments = KERNELS.functions.fingerprint_shard(
        find_address(real), code, *place_shard(real.shape, shape, start)
    )
    return ShardFingerprint(digest, np.frombuffer(sketch), ElementMoments(*moments))


def _make_native(elements: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements in C order and the byte order of the processor, complex ones as pairs."""
    packed = np.ascontiguousarray(elements, cast("Any", elements.dtype).newbyteorder("="))
    packed = packed.reshape(elements.shape)  # numpy makes a scalar one-dimensional
    if packed.dtype.kind != "c":
        return packed
    return packed.view(f"f{packed.itemsize // 2}").reshape(*elements.shape, 2)


def _check_place(shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    fits = len(shape) == len(whole) == len(offset) and all(
        first >= 0 and first + extent <= all_of
        for first, extent, all_of in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise UnsupportedError(f"a shard {shape} at {offset} is not within a tensor {whole}")


class ShardPlacement(NamedTuple):
    """Global indices of the elements of a shard, in the form that kernels take."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """Difference of the global index for a step along each axis."""
    first: int


def place_shard(
    shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]
) -> ShardPlacement:
    """Return the global indices of a shard within the whole tensor, with as few axes as
    possible.
    """
    extents: list[int] = []
    strides: list[int] = []
    first, stride = 0, 1
    for extent, of, at in zip(reversed(shape), reversed(whole), reversed(offset), strict=True):
        first += at * stride
        if extents and stride == strides[-1] * extents[-1]:
            extents[-1] *= extent
        elif extent != 1 or not extents:
            extents.append(extent)
            strides.append(stride)
        stride *= of
    if not extents:
        return ShardPlacement((1,), (1,), first)
    return ShardPlacement(tuple(reversed(extents)), tuple(reversed(strides)), first)
