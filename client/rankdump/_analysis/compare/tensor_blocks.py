"""Blocks of two tensors as numbers, their rounding to narrow types, and the memory in which blocks
are processed. Pure.

Elements keep their types until their block is processed. A complex element counts as two numbers,
its real and imaginary part. 64-bit integers that float64 cannot represent are subtracted as
integers. Rounding to bfloat16 follows IEEE 754, half to even. Rounding to an 8-bit float gives the
nearest value of the type, and leaves values beyond its largest value unchanged, because rounding
cannot make them equal. The memory is reused, which avoids page faults.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored

Float64Array: TypeAlias = "npt.NDArray[np.float64]"

NARROW_HALF_UNITS = {
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "float8_e8m0fnu": 2.0**-1,
}
"""Half a unit of the last place of each narrow type, relative to the value; the coarsest type is
last.
"""
_FLOAT_DTYPES = frozenset(("float16", "float32", "float64", *NARROW_HALF_UNITS))

FloatBlock: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.float32]"
"""A block of numbers in one of the types in which blocks are processed."""
BLOCK_NUMBERS = 1 << 17
"""Number of numbers that are processed together.

With fewer, the calls of numpy take as long as its work; with more, the buffers do not fit into the
cache.
"""
_ROW_NUMBERS = 1 << 9
"""Number of numbers in one row product. A row is added up in float32, the sums of rows in float64.

With more than 8192, libraries for linear algebra start threads.
"""
_LINE_BYTES = 64
_WORKSPACE_BLOCKS = 11
_BLOCK_DTYPES = (np.float32, np.float64)
_ROWS_OF_ONES: dict[np.dtype[Any], npt.NDArray[Any]] = {
    np.dtype(kind): np.ones((1, _ROW_NUMBERS, 1), kind) for kind in _BLOCK_DTYPES
}
_idle_workspaces: list[BlockWorkspace] = []
"""Workspaces that no thread uses; at most as many as threads were ever using at the same time."""
_MAX_EXACT_INTEGER = 1 << 53
"""Largest integer up to which float64 represents every integer."""
_PROBE_WORDS = 64
"""Number of words that are compared before all words are."""
_FLOAT32_DTYPES = frozenset((np.dtype(np.float32), np.dtype(np.float16)))


def select_comparison_dtype(dtype_a: str, dtype_b: str) -> str:
    """Return the type that both sides are rounded to; empty if neither is rounded.

    If the two float types differ, this is the narrower one, provided that numpy lacks it.
    """
    names = {dtype_a, dtype_b}
    if len(names) < 2 or not names <= _FLOAT_DTYPES:
        return ""
    narrow = [name for name in NARROW_HALF_UNITS if name in names]
    return narrow[-1] if narrow else ""


def round_to_dtype(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Return real elements rounded to a narrow type, as float32."""
    wide = values.astype(np.float32)
    return _round_to_bfloat16(wide) if dtype == "bfloat16" else _round_to_float8(wide, dtype)


def _round_to_bfloat16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    bits = wide.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    # Adding to the bits of a NaN could turn it into a number, so NaN is kept as it is.
    return np.where(np.isnan(wide), wide, near.view(np.float32))


def _round_to_float8(wide: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    values, borders = _list_float8_values(dtype)
    near = values[np.searchsorted(borders, wide)]
    # A value more than half a unit beyond the last value of the type has no near value.
    beyond = (wide < values[0] - (borders[0] - values[0])) | (
        wide > values[-1] + (values[-1] - borders[-1])
    )
    return np.where(beyond | ~np.isfinite(wide), wide, near)


@lru_cache(maxsize=8)
def _list_float8_values(dtype: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the finite values of an 8-bit float type, ascending, and the midpoints
    between them.
    """
    every = convert_to_stored(dtype, memoryview(bytes(range(256))))
    values = np.frombuffer(every, dtype=ELEMENT_TYPES[dtype].descr).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = values[:-1] + np.diff(values) / 2
    return values.astype(np.float32), middles.astype(np.float32)


@dataclass(frozen=True, slots=True)
class BlockBuffers:
    """Buffers in which one block is processed."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    d: npt.NDArray[Any]
    size: npt.NDArray[Any]
    free: npt.NDArray[Any]


class BlockWorkspace:
    """Buffers for one block each, aligned to cache lines."""

    def __init__(self) -> None:
        memory = np.empty(_WORKSPACE_BLOCKS * BLOCK_NUMBERS + _LINE_BYTES // 8)
        first = -memory.ctypes.data % _LINE_BYTES // 8
        rows = memory[first : first + _WORKSPACE_BLOCKS * BLOCK_NUMBERS].reshape(
            _WORKSPACE_BLOCKS, BLOCK_NUMBERS
        )
        self._rows = rows
        self.file_buffer_a, self.file_buffer_b = (memoryview(rows[at]).cast("B") for at in (5, 6))
        """Buffers for bytes that are read from files."""
        self.marks = np.empty(BLOCK_NUMBERS, dtype=np.bool_)
        self._full = {
            kind: BlockBuffers(*(row.view(kind)[:BLOCK_NUMBERS] for row in rows[:5]))
            for kind in _BLOCK_DTYPES
        }

    def get_buffers(self, count: int, kind: type[np.float32 | np.float64]) -> BlockBuffers:
        """Return buffers for `count` numbers, in float32 or float64."""
        full = self._full[kind]
        if count == BLOCK_NUMBERS:
            return full
        x, y, d = full.x[:count], full.y[:count], full.d[:count]
        return BlockBuffers(x, y, d, full.size[:count], full.free[:count])

    def get_float64_buffers(self, count: int) -> list[Float64Array]:
        """Return four more buffers, in float64."""
        return [row[:count] for row in self._rows[7:]]


def compute_dot_product(left: FloatBlock, right: FloatBlock) -> float:
    """Return the scalar product of two blocks.

    For float32, the error is at most 2**-15 of the sum of the absolute terms: rows of 2**9 numbers
    are added up in any order with an error of 2**-24 for each addition, and the rows in float64.
    Usually the error is less than 2**-22.
    """
    whole = left.size - left.size % _ROW_NUMBERS
    if whole == left.size:
        return _sum_row_products(
            left.reshape(-1, 1, _ROW_NUMBERS), right.reshape(-1, _ROW_NUMBERS, 1)
        )
    rows = left[:whole].reshape(-1, 1, _ROW_NUMBERS), right[:whole].reshape(-1, _ROW_NUMBERS, 1)
    return _sum_row_products(*rows) + float(left[whole:].dot(right[whole:]))


def compute_block_sum(values: FloatBlock) -> float:
    """Return the sum of a block, as exact as `compute_dot_product`; 3 times as fast as np.sum."""
    whole = values.size - values.size % _ROW_NUMBERS
    if whole == values.size:
        return _sum_row_products(values.reshape(-1, 1, _ROW_NUMBERS), _ROWS_OF_ONES[values.dtype])
    rows = _sum_row_products(
        values[:whole].reshape(-1, 1, _ROW_NUMBERS), _ROWS_OF_ONES[values.dtype]
    )
    return rows + float(np.add.reduce(values[whole:], dtype=np.float64))


def _sum_row_products(left: FloatBlock, right: FloatBlock) -> float:
    return float(np.add.reduce(np.matmul(left, right), axis=None, dtype=np.float64))


@contextmanager
def borrow_workspace() -> Generator[BlockWorkspace, None, None]:
    """Lend a workspace to one thread."""
    try:
        workspace = _idle_workspaces.pop()
    except IndexError:
        workspace = BlockWorkspace()
    try:
        yield workspace
    finally:
        _idle_workspaces.append(workspace)


class TensorElements(Protocol):
    """The elements of a tensor in C order, in memory or in a file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type as stored."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def part(self, at: int, count: int, buffer: memoryview) -> npt.NDArray[Any]:
        """Return `count` elements from position `at` on, in `buffer` or in other memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayElements:
    """Elements of an array in memory."""

    array: npt.NDArray[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type as stored."""
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.array.size

    def part(self, at: int, count: int, buffer: memoryview) -> npt.NDArray[Any]:
        """Return a view of `count` elements from position `at` on."""
        return self.array.reshape(-1)[at : at + count]


@dataclass(frozen=True, slots=True)
class OperandPair:
    """Two tensors of the same size."""

    a: TensorElements
    b: TensorElements
    rounded_dtype_a: str = ""
    """Type that elements of side a are rounded to; empty if they are not rounded."""
    rounded_dtype_b: str = ""

    @property
    def width(self) -> int:
        """Numbers per element: 2 if either side is complex, else 1."""
        return 2 if "c" in (self.a.dtype.kind, self.b.dtype.kind) else 1

    @property
    def compares_bytes(self) -> bool:
        """Whether equal bytes always mean equal elements, so that bytes may be compared."""
        return self.a.dtype == self.b.dtype and not (self.rounded_dtype_a or self.rounded_dtype_b)

    @property
    def fits_float32(self) -> bool:
        """Whether float32 can represent every element."""
        return {self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("=")} <= _FLOAT32_DTYPES

    @property
    def needs_integers(self) -> bool:
        """Whether both sides are integers, and at least one has 64 bits."""
        kinds, sizes = (
            self.a.dtype.kind + self.b.dtype.kind,
            (self.a.dtype.itemsize, self.b.dtype.itemsize),
        )
        return all(kind in "iu" for kind in kinds) and 8 in sizes

    def convert(self, part: npt.NDArray[Any], rounded: str, buffer: FloatBlock) -> FloatBlock:
        """Return the numbers of a part, rounded to `rounded`; the result is the part itself, or in
        `buffer`.
        """
        if part.dtype == np.float16 and buffer.dtype == np.float32 and not rounded:
            return np.take(_list_float16_values(), part.view(np.uint16), out=buffer, mode="wrap")
        if part.dtype == buffer.dtype and part.size == buffer.size and not rounded:
            return part
        numbers = buffer.view(np.complex128) if self.width == 2 else buffer
        numbers[...] = round_to_dtype(part, rounded) if rounded else part
        return buffer

    def subtract(
        self,
        a: npt.NDArray[Any],
        b: npt.NDArray[Any],
        x: FloatBlock,
        y: FloatBlock,
        out: FloatBlock,
    ) -> None:
        """Store `x - y` in `out`, where `x` and `y` are the numbers of the parts `a` and `b`."""
        np.subtract(x, y, out=out)
        if self.needs_integers and not (_fits_float64(a) and _fits_float64(b)):
            np.copyto(out, _exact_distance(a, b, out))


@lru_cache(maxsize=1)
def _list_float16_values() -> npt.NDArray[np.float32]:
    """Return all float16 values, indexed by their bits, because a lookup is twice as fast as a
    conversion.
    """
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def has_same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether two parts with the same element type have the same bytes."""
    words = np.uint64 if a.nbytes % 8 == 0 else np.uint8
    a, b = a.view(words), b.view(words)
    # Blocks that are not equal mostly differ at their start.
    return bool((a[:_PROBE_WORDS] == b[:_PROBE_WORDS]).all() and (a == b).all())


def _fits_float64(values: npt.NDArray[Any]) -> bool:
    if values.itemsize < 8 or not values.size:
        return True
    return int(values.max()) <= _MAX_EXACT_INTEGER and int(values.min()) >= -_MAX_EXACT_INTEGER


def _exact_distance(
    a: npt.NDArray[Any], b: npt.NDArray[Any], rough: FloatBlock
) -> npt.NDArray[np.float64]:
    """Return distances that are 0 only for equal integers; uint64 can represent every distance."""
    if "u" not in (a.dtype.kind, b.dtype.kind) or a.dtype.kind == b.dtype.kind:
        kind = np.result_type(a, b)
        a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
        # In two's complement, the unsigned difference is correct even where the signed one
        # overflows.
        distance = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return distance.astype(np.float64)
    # One side is signed and one unsigned: a negative number differs from any unsigned number by at
    # least 1.
    left, right = a.astype(np.uint64), b.astype(np.uint64)
    below = (a < 0) | (b < 0)
    distance = np.maximum(left, right) - np.minimum(left, right)
    return np.where(below, np.abs(rough), distance.astype(np.float64))
