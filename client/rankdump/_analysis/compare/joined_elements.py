"""Elements of a tensor that is joined from parts, read one block at a time: placed parts, and sums
of parts. No whole tensor is loaded, except for parts that already are in memory. Pure, except for
reading the parts.

A block of a joined tensor consists of whole rows, unless one row is larger than a block. So each
part is read in one piece for each block, whatever dimension the tensor is divided along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from rankdump._analysis.compare.tensor_blocks import TensorElements
from rankdump._analysis.reader.shard_join import REDUCTIONS, JoinBlock, JoinPlan
from rankdump._core.tensor_layout import find_block_ranges

_Array: TypeAlias = "npt.NDArray[Any]"
_BLOCK_NUMBERS = 1 << 15
"""Number of elements that are read at a time by default; several blocks of this size fit into the
cache of a core.
"""
_MAX_RUNS = 64
_SAMPLE_SPANS, _SPAN_NUMBERS = 8, 1 << 15
_Ranges: TypeAlias = "Sequence[Sequence[range]]"
"""Indexes along each dimension, in ascending order."""


class PlacedPart(NamedTuple):
    """A part, and the places of its elements in the whole tensor."""

    elements: TensorElements
    extents: tuple[int, ...]
    """Shape of what is placed: the first elements of the part, without padding."""
    ranges: _Ranges


class PlacedElements:
    """Elements of a tensor, each of which is in one of the parts. For one thread."""

    def __init__(
        self,
        parts: Sequence[PlacedPart],
        extents: tuple[int, ...],
        dtype: np.dtype[Any],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Parts are placed in a tensor with these extents; `shape` is another shape for the same
        elements.
        """
        self._parts, self._extents = parts, extents
        self.dtype, self.shape = dtype, extents if shape is None else shape
        self._rows: npt.NDArray[Any] = np.empty(0, dtype)
        self._read = memoryview(bytearray(0))
        self._widest = max(part.elements.dtype.itemsize for part in parts)
        self._runs = self._list_runs()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self._extents)

    def part(self, at: int, count: int, buffer: memoryview) -> _Array:
        """Return `count` elements from position `at` on, in `buffer` or in memory of
        this object.
        """
        if not count:
            return np.empty(0, self.dtype)
        for run, elements in self._runs:
            if run.start <= at and at + count <= run.stop and elements.dtype == self.dtype:
                return elements.part(at - run.start, count, buffer)
        out = np.frombuffer(buffer, np.uint8, count * self.dtype.itemsize).view(self.dtype)
        if self._extents:
            self._fill(out, at, 0, [(each, 0) for each in self._parts])
        else:
            out[:] = self._parts[0].elements.part(0, 1, self._get_read_memory(1))
        return out

    def _list_runs(self) -> list[tuple[range, TensorElements]]:
        """Return the parts that are consecutive elements of the whole, with their positions."""
        found: list[tuple[range, TensorElements]] = []
        row = prod(self._extents[1:])
        for part in self._parts if len(self._parts) <= _MAX_RUNS else ():
            has_rows = part.extents[1:] == self._extents[1:]
            if has_rows and all(len(each) == 1 and each[0].step == 1 for each in part.ranges):
                rows = part.ranges[0][0] if part.ranges else range(1)
                found.append((range(rows.start * row, rows.stop * row), part.elements))
        return found

    def _fill(
        self, out: _Array, at: int, level: int, parts: Sequence[tuple[PlacedPart, int]]
    ) -> None:
        """Fill `out` with elements from position `at` on, of a tensor with the extents from
        dimension `level` on. Each part comes with the number of its first element that belongs to
        this tensor.
        """
        row = prod(self._extents[level + 1 :])
        first, last = at // row, -(-(at + out.size) // row)
        if row <= out.size:
            self._fill_from_rows(out, at, level, range(first, last), parts)
            return
        for index in range(first, last):
            begin, end = max(at, index * row), min(at + out.size, (index + 1) * row)
            inner = [
                (part, start + place * prod(part.extents[level + 1 :]))
                for part, start in parts
                for place in _find_places(part.ranges[level], range(index, index + 1))
            ]
            self._fill(out[begin - at : end - at], begin - index * row, level + 1, inner)

    def _fill_from_rows(
        self,
        out: _Array,
        at: int,
        level: int,
        rows: range,
        parts: Sequence[tuple[PlacedPart, int]],
    ) -> None:
        extents = self._extents[level + 1 :]
        row = prod(extents)
        is_exact = at == rows.start * row and out.size == len(rows) * row
        held = out if is_exact else self._get_row_memory(len(rows) * row)
        whole = held.reshape(len(rows), *extents)
        for part, start in parts:
            size, place = prod(part.extents[level + 1 :]), 0
            for each in part.ranges[level]:
                inside = _find_inside(each, rows)
                if len(inside) and size:
                    begin, count = start + (place + inside.start) * size, len(inside) * size
                    read = part.elements.part(begin, count, self._get_read_memory(count))
                    own = each[inside.start : inside.stop]
                    target = slice(own.start - rows.start, own.stop - rows.start, own.step)
                    values = read.reshape(-1, *part.extents[level + 1 :])
                    if part.extents[level + 1 :] == extents:
                        whole[target] = values
                    else:
                        _assign(whole[target], part.ranges[level + 1 :], values)
                place += len(each)
        if not is_exact:
            out[:] = held[at - rows.start * row :][: out.size]

    def _get_row_memory(self, count: int) -> _Array:
        if self._rows.size < count:
            self._rows = np.empty(count, self.dtype)
        return self._rows[:count]

    def _get_read_memory(self, count: int) -> memoryview:
        if len(self._read) < count * self._widest:
            self._read = np.empty(count * self._widest, np.uint8).data
        return self._read


def _find_inside(indices: range, rows: range) -> range:
    """Return the positions of those indexes that are in a range of rows."""
    first = max(0, -((indices.start - rows.start) // indices.step))
    return range(
        first, max(first, min(len(indices), -((indices.start - rows.stop) // indices.step)))
    )


def _find_places(held: Sequence[range], rows: range) -> Iterator[int]:
    """Yield the positions, among all held indexes, of those that are in a range of rows."""
    place = 0
    for each in held:
        yield from (place + at for at in _find_inside(each, rows))
        place += len(each)


def _assign(whole: _Array, ranges: _Ranges, values: _Array) -> None:
    """Store the rows of a part at their places in the whole."""
    if all(len(each) == 1 for each in ranges):
        whole[(slice(None), *(slice(r[0].start, r[0].stop, r[0].step) for r in ranges))] = values
        return
    indices = [np.concatenate([np.asarray(part) for part in each]) for each in ranges]
    whole[np.ix_(np.arange(len(whole)), *indices)] = values


@dataclass(frozen=True, slots=True, eq=False)
class ReducedElements:
    """Elements that are computed from several tensors of the same shape by a reduction
    in float64.
    """

    terms: Sequence[TensorElements]
    reduction: str = "sum"
    divisor: int = 1
    keeps_integers: bool = False
    """Whether integers are reduced in their own type and not in float64."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the first term."""
        return self.terms[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each term."""
        return self.terms[0].shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.terms[0].size

    def part(self, at: int, count: int, buffer: memoryview) -> _Array:
        """Return `count` elements from position `at` on."""
        is_exact = self.keeps_integers and self.dtype.kind in "biu"
        kind: Any = self.dtype if is_exact else np.result_type(self.dtype, np.float64)
        total = self.terms[0].part(at, count, buffer).astype(kind)
        for term in self.terms[1:]:
            other = term.part(at, count, buffer)
            REDUCTIONS[self.reduction](total, other if is_exact else other.astype(kind), out=total)
        return (total if self.divisor == 1 else total / self.divisor).astype(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DividedElements:
    """Elements of a tensor, divided by a number."""

    whole: TensorElements
    divisor: int
    dtype: np.dtype[Any]
    """Element type of the result."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.whole.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.whole.size

    def part(self, at: int, count: int, buffer: memoryview) -> _Array:
        """Return `count` elements from position `at` on."""
        return np.asarray(self.whole.part(at, count, buffer) / self.divisor, self.dtype)


def place_shards(plan: JoinPlan, parts: Mapping[int, TensorElements]) -> TensorElements:
    """Return the elements of a logical tensor; `parts` contains the tensors of the ranks."""
    reduced = [(block, _reduce_block(block, parts)) for block in plan.blocks]
    dtype = reduced[0][1].dtype
    if not plan.blocks[0].layout.flat_range:
        placed = [
            PlacedPart(each, block.shape, find_block_ranges(block.layout, block.shape))
            for block, each in reduced
        ]
        return PlacedElements(placed, plan.shape, dtype)
    flat = [
        PlacedPart(each, (len(held),), [[held]])
        for block, each in reduced
        for held in [range(*block.layout.flat_range)]
    ]
    return PlacedElements(flat, (prod(plan.shape),), dtype, plan.shape)


def _reduce_block(block: JoinBlock, parts: Mapping[int, TensorElements]) -> TensorElements:
    terms = [parts[rank] for rank in block.ranks]
    if len(terms) == 1:
        return terms[0]
    reduction = next(each.reduction for each in block.layout.placements if each.reduction)
    divisor = len(terms) if reduction == "avg" else 1
    return ReducedElements(terms, reduction, divisor, keeps_integers=True)


def read_blocks(
    *tensors: TensorElements, spans: Iterable[range] | None = None
) -> Iterator[list[_Array]]:
    """Yield blocks of tensors with the same size, or only of the elements in `spans`; each block is
    valid until the next one.
    """
    size, widest = tensors[0].size, max(each.dtype.itemsize for each in tensors)
    memory = [np.empty(min(size, _BLOCK_NUMBERS) * widest, np.uint8).data for _ in tensors]
    for span in spans if spans is not None else (range(size),):
        for at in range(span.start, span.stop, _BLOCK_NUMBERS):
            count = min(_BLOCK_NUMBERS, span.stop - at)
            yield [each.part(at, count, own) for each, own in zip(tensors, memory, strict=True)]


def list_sample_spans(size: int) -> list[range]:
    """Return the ranges of a sample of `size` elements, spread evenly from the first to the last;
    empty if a sample would save little.
    """
    if size <= 2 * _SAMPLE_SPANS * _SPAN_NUMBERS:
        return []
    step = (size - _SPAN_NUMBERS) // (_SAMPLE_SPANS - 1)
    return [range(at * step, at * step + _SPAN_NUMBERS) for at in range(_SAMPLE_SPANS)]


def compute_content_digest(elements: TensorElements) -> bytes:
    """Return a digest of all elements."""
    digest = xxhash.xxh3_128()
    for (block,) in read_blocks(elements):
        digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.digest()


def measure_distance(
    a: TensorElements, b: TensorElements, *, spans: Iterable[range] | None = None
) -> float:
    """Return the relative Euclidean distance of tensors with the same size, or of the elements in
    `spans`; infinity where a side is not finite.
    """
    kind: Any = np.result_type(a.dtype, b.dtype, np.float64)
    memory = np.empty(min(a.size, _BLOCK_NUMBERS), kind)
    squares = norm = 0.0
    with np.errstate(all="ignore"):
        for left, right in read_blocks(a, b, spans=spans):
            wide = memory[: right.size]
            wide[:] = right
            norm += _sum_squares(wide)
            wide -= left
            squares += _sum_squares(wide)
    if not np.isfinite(squares):
        return float("inf")
    return float(np.sqrt(squares / norm)) if norm else float(np.sqrt(squares))


def _sum_squares(numbers: _Array) -> float:
    """Return the sum of squares of numbers in float64; for complex numbers, of both their parts."""
    flat: npt.NDArray[np.float64] = numbers.view(np.float64)
    return float(np.dot(flat, flat))
