"""The kernels in numpy, for installations without compiled kernels. Pure.

The functions are those of `native.c`, with the same results, except that sums are added in another
order. Every array is a view of memory at an address, in blocks that stay in a core's cache between
the passes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._kernels.element_moments import (
    COUNTS,
    ELEMENT_CODES,
    EXTREMES,
    PACKED_MOMENTS,
    SUMS,
    ElementMoments,
    merge_moments,
    view_memory,
)
from rankdump._kernels.kernel_functions import FoundFingerprint, FoundMoments

_BLOCK_ELEMENTS = 1 << 17
_PART_ELEMENTS = 1 << 16
"""Number of elements that are held as float64 at a time."""
_ROW_ELEMENTS = 1 << 13
"""Number of elements in one product: for more, libraries for linear algebra start threads of their
own.
"""
_CACHE_LINE_BYTES = 64

_NAMES = tuple(ELEMENT_CODES)
_BFLOAT16 = ELEMENT_CODES["bfloat16"]
_DTYPES = [np.dtype("u2" if name == "bfloat16" else name) for name in _NAMES]


# -- moments


def measure_elements(data: int | bytes, count: int, code: int, parts: int) -> FoundMoments:
    """Return the moments of elements at an address, or in a bytes object."""
    return _measure_blocks(_view_elements(data, count, code), code, parts)


def pack_moments(data: int | bytes, count: int, code: int, parts: int) -> bytes:
    """Return the moments of elements, packed."""
    return PACKED_MOMENTS.pack(*measure_elements(data, count, code, parts))


def _view_elements(data: int | bytes, count: int, code: int) -> npt.NDArray[Any]:
    if isinstance(data, bytes):
        return np.frombuffer(data, _DTYPES[code], count)
    return view_memory(data, _DTYPES[code], (count,))


def _measure_blocks(elements: npt.NDArray[Any], code: int, parts: int) -> ElementMoments:
    blocks = (
        _make_comparable(elements[at : at + _BLOCK_ELEMENTS], code)
        for at in range(0, elements.size, _BLOCK_ELEMENTS)
    )
    with np.errstate(all="ignore"):
        return merge_moments([_measure_block(block, parts) for block in blocks])


def _make_comparable(block: npt.NDArray[Any], code: int) -> npt.NDArray[Any]:
    """Return a block as numbers of a type that processors compare fast; the conversion is exact."""
    if code == _BFLOAT16:
        return _widen_halves(block)
    if block.dtype.char == "e":
        return block.astype(np.float32)
    return block.view(np.uint8) != 0 if block.dtype.char == "?" else block


def _widen_halves(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _measure_block(values: npt.NDArray[Any], parts: int) -> ElementMoments:
    # Extremes and signs need no float64, because the conversion keeps the order of elements. They
    # come first, because a loop that only reads brings a block into the cache fastest.
    found: dict[str, Any] = {}
    if parts & EXTREMES:
        found["maximum"], found["minimum"] = _find_extremes(values)
    if parts & COUNTS:
        found |= _count_elements(values)
    if parts & SUMS:
        found["total"], found["squares"] = _run_with_buffer(_Float64Buffer.add, values)
    return ElementMoments(values.size, **found)


def _find_extremes(values: npt.NDArray[Any]) -> tuple[float, float]:
    high, low = float(np.maximum.reduce(values)), float(np.minimum.reduce(values))
    if values.dtype.kind == "f" and 0.0 in {high, low}:
        # If the extreme is a zero, only zeros can have the other sign, so the signs of all elements
        # decide.
        signs = np.signbit(values)
        high = -0.0 if high == 0 and signs.all() else high + 0.0
        low = -0.0 if low == 0 and signs.any() else low + 0.0
    return high, low


def _count_elements(values: npt.NDArray[Any]) -> dict[str, int]:
    conditions = {"positives": values > 0, "negatives": values < 0, "zeros": values == 0}
    if values.dtype.kind == "f":
        conditions["nans"] = np.isnan(values)
        conditions["positive_infinities"] = values == np.inf
        conditions["negative_infinities"] = values == -np.inf
    return {name: int(np.count_nonzero(condition)) for name, condition in conditions.items()}


class _Float64Buffer:
    """Memory for elements as float64 that is reused, so that it causes no page faults."""

    def __init__(self) -> None:
        # Rows are aligned to cache lines: products of rows that begin within a line take a third
        # longer.
        memory = np.empty(_PART_ELEMENTS + _CACHE_LINE_BYTES // 8)
        first = -memory.ctypes.data % _CACHE_LINE_BYTES // 8
        self._memory = memory[first : first + _PART_ELEMENTS]
        self._rows = self._memory.reshape(-1, 1, _ROW_ELEMENTS)
        self._columns = self._memory.reshape(-1, _ROW_ELEMENTS, 1)
        self._products = np.empty((len(self._rows), 1, 1))

    def add(self, values: npt.NDArray[Any]) -> tuple[float, float]:
        """Return the sum of the elements, and the sum of their squares."""
        total = squares = 0.0
        for at in range(0, values.size, _PART_ELEMENTS):
            part = values[at : at + _PART_ELEMENTS]
            held = self._memory[: part.size]
            held[...] = part
            total += float(np.add.reduce(held))
            squares += self._multiply(held)
        return total, squares

    def _multiply(self, held: npt.NDArray[np.float64]) -> float:
        """Return the sum of the squares, computed as products of each row with itself."""
        if held.size <= _ROW_ELEMENTS:
            return float(held.dot(held))
        count = held.size // _ROW_ELEMENTS
        products = np.matmul(self._rows[:count], self._columns[:count], self._products[:count])
        last = held[count * _ROW_ELEMENTS :]
        return sum(products.ravel().tolist(), float(last.dot(last)))


_IDLE_BUFFERS: list[_Float64Buffer] = []
"""Buffers that are not in use. There are as many buffers as threads ever needed at once."""


def _run_with_buffer(
    work: Callable[[_Float64Buffer, npt.NDArray[Any]], tuple[float, float]],
    values: npt.NDArray[Any],
) -> tuple[float, float]:
    try:
        buffer = _IDLE_BUFFERS.pop()
    except IndexError:
        buffer = _Float64Buffer()
    try:
        return work(buffer, values)
    finally:
        _IDLE_BUFFERS.append(buffer)


def widen_bfloat16(target: int, source: int, count: int) -> None:
    """Store bfloat16 elements as float32."""
    halves = view_memory(source, np.uint16, (count,))
    wide = view_memory(target, np.uint32, (count,))
    np.left_shift(halves, np.uint32(16), out=wide, casting="unsafe", dtype=np.uint32)


# -- fingerprints

_HASH_ELEMENTS = 1 << 10
"""Number of elements whose buckets are added before those of the next elements, as in
`kernels.h`.
"""
_BUCKETS = 64


def fingerprint_shard(
    address: int, code: int, extents: tuple[int, ...], strides: tuple[int, ...], first: int
) -> FoundFingerprint:
    """Return the fingerprint of elements in C order."""
    elements = view_memory(address, _DTYPES[code], extents).reshape(-1)
    bits = elements.view(f"u{elements.itemsize}")
    indices = _number_elements(extents, strides, first)
    sketch = np.zeros(_BUCKETS)
    digest = 0
    for at in range(0, elements.size, _HASH_ELEMENTS):
        block = slice(at, at + _HASH_ELEMENTS)
        hashes = _hash_indices(indices[block])
        weights = hashes | np.uint64(1)
        digest += int((weights * bits[block] + weights).sum(dtype=np.uint64))
        with np.errstate(all="ignore"):
            values = _make_comparable(elements[block], code).astype(np.float64)
        values[~np.isfinite(values)] = 0
        np.negative(values, out=values, where=(hashes & _SIGN_BIT) != 0)
        buckets = (hashes >> np.uint64(58)).astype(np.intp)
        sketch += np.bincount(buckets, values, _BUCKETS)
    moments = _measure_blocks(elements, code, EXTREMES | SUMS | COUNTS)
    return digest % (1 << 64), sketch.tobytes(), moments


_SIGN_BIT = np.uint64(1 << 57)


def _number_elements(
    extents: Sequence[int], strides: Sequence[int], first: int
) -> npt.NDArray[np.uint64]:
    numbers = np.array(first, np.uint64)
    for extent, stride in zip(extents, strides, strict=True):
        numbers = numbers[..., None] + np.arange(extent, dtype=np.uint64) * np.uint64(stride)
    return numbers.reshape(-1)


def _hash_indices(indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64 of each index."""
    state = (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# -- copies between orders of axes

_PAGE_BYTES = 4096
_CACHED_LINES = 4096
"""Number of cache lines that stay in a core's cache."""
_DISTANT_TILE = 128, 16
"""Shape of a tile if neighbours in the target are pages apart in the source: numbers of elements
along the source and along the target. More pages would not stay in the cache.
"""


def read_memory(address: int, byte_count: int) -> bytes:
    """Return a copy of a few bytes."""
    if byte_count < 0:
        raise ValueError(f"{byte_count} bytes are not allowed")
    return ctypes.string_at(address, byte_count)


def read_strided(
    address: int, item_bytes: int, extents: tuple[int, ...], steps: tuple[int, ...]
) -> bytes:
    """Return a copy of a few elements in C order; steps are in elements."""
    strides = tuple(step * item_bytes for step in steps)
    return view_memory(address, f"V{item_bytes}", extents, strides).tobytes()


def encode_varint(number: int) -> bytes:
    """Return the varint of a number (twin of the compiled function)."""
    if not 0 <= number < 1 << 64:
        raise OverflowError(f"{number} is no number of 64 bits")
    groups: list[int] = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes((*groups, number))


def copy_strided(
    target: int,
    source: int,
    item_bytes: int,
    extents: tuple[int, ...],
    target_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
) -> None:
    """Copy elements between arrays that do not overlap."""
    if not math.prod(extents):
        return
    item = f"V{item_bytes}"
    placed = view_memory(target, item, extents, target_strides).squeeze()
    found = view_memory(source, item, extents, source_strides).squeeze()
    # Elements that are adjacent on both sides are copied as one, in one step of numpy instead of
    # sixteen.
    if placed.ndim and placed.strides[-1] == found.strides[-1] == item_bytes:
        run = np.dtype((np.void, placed.shape[-1] * item_bytes))
        placed, found = placed.view(run)[..., 0], found.view(run)[..., 0]
    for piece in _split_copy(found):
        np.copyto(placed[(*piece, ...)], found[(*piece, ...)])


def stream_memory(target: int, source: int, byte_count: int) -> None:
    """Copy bytes between addresses; ValueError for a negative size."""
    if byte_count < 0:
        raise ValueError(f"{byte_count} bytes are not allowed")
    np.copyto(
        view_memory(target, np.uint8, (byte_count,)), view_memory(source, np.uint8, (byte_count,))
    )


def _split_copy(source: npt.NDArray[Any]) -> Iterator[tuple[slice, ...]]:
    """Yield parts of a copy that are so small that each cache line stays in the cache until its
    last use.

    numpy goes through the target in order, and so reads neighbours in the source at times that are
    far apart.
    """
    steps = list(source.shape)
    last, nearest = source.ndim - 1, int(np.argmin(source.strides)) if source.ndim else 0
    if nearest < last and source.strides[last] >= _PAGE_BYTES:
        steps[nearest], steps[last] = _DISTANT_TILE
    else:
        lines = 1
        for axis in range(last, nearest, -1):
            if lines * steps[axis] > _CACHED_LINES:
                steps[axis] = max(1, _CACHED_LINES // lines)
                break
            lines *= steps[axis]
    cuts = (
        [slice(start, start + step) for start in range(0, extent, step)]
        for extent, step in zip(source.shape, steps, strict=True)
    )
    return product(*cuts)
