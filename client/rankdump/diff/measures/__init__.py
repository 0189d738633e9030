"""How far two tensors are apart: all measures of a pair in few passes over blocks. Pure.

A block of either side stays in a core's cache until it is done with, so beside the two tensors
there are a few blocks in memory, whatever their size and type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.kernel import Kernel
from rankdump.diff.measures.msaccucmp import msaccucmp
from rankdump.diff.measures.narrow import half_unit, terms_of
from rankdump.diff.measures.operands import Elements, Held, Operands, flat, same_bytes
from rankdump.diff.measures.room import BLOCK, Room, lent
from rankdump.diff.values import Measures, Tolerances

__all__ = ["Elements", "Measured", "measure", "msaccucmp", "terms_of"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring two arrays found."""

    measures: Measures
    same_bytes: bool
    """Elements of one type, and the same bytes."""
    nan_both: int
    """Places where both sides are NaN."""
    first_apart: int | None
    """First element, in C order, that is not finite on one side and not the same on the other."""
    terms: str
    """Type that the wider side was rounded to; empty where both were taken as they are."""


def measure(
    a: npt.NDArray[Any] | Elements,
    b: npt.NDArray[Any] | Elements,
    tolerances: Tolerances,
    *,
    dtype_a: str = "",
    dtype_b: str = "",
) -> Measured:
    """Return the measures of two tensors of as many elements each; b is the reference.

    The names of types are those of the framework, where files hold wider ones. Complex elements
    count as two numbers each, their parts.
    """
    dtype_a, dtype_b = dtype_a or str(a.dtype), dtype_b or str(b.dtype)
    terms = terms_of(dtype_a, dtype_b)
    # The side that has the type already is left as it is.
    to_a, to_b = ("" if held == terms else terms for held in (dtype_a, dtype_b))
    pair = Operands(_elements(a), _elements(b), to_a, to_b)
    rtol = max(tolerances.rtol, half_unit(terms))
    with lent() as room, np.errstate(all="ignore"):
        kernel = Kernel(room, rtol=rtol, atol=tolerances.atol)
        same = _add_blocks(pair, kernel, room)
    sums, width = kernel.sums, pair.width
    first = sums.first_apart
    return Measured(
        measures=sums.measures(pair.a.size * width, equal_nan=tolerances.equal_nan),
        same_bytes=same,
        nan_both=sums.nan_both,
        first_apart=None if first is None else first // width,
        terms=terms,
    )


def _elements(given: npt.NDArray[Any] | Elements) -> Elements:
    return Held(flat(given)) if isinstance(given, np.ndarray) else given


def _add_blocks(pair: Operands, kernel: Kernel, room: Room) -> bool:
    """Add all blocks to the sums; return whether each had the same bytes on both sides."""
    size, step = pair.a.size, BLOCK // pair.width
    kinds = (np.float32, np.float64) if pair.narrow and kernel.narrow else (np.float64,)
    same = pair.raw
    for at in range(0, size, step):
        count = min(step, size - at)
        a, b = pair.a.part(at, count, room.file_a), pair.b.part(at, count, room.file_b)
        alike = pair.raw and same_bytes(a, b)
        same = same and alike
        for kind in kinds:
            buffers = room.buffers(count * pair.width, kind)
            x = pair.numbers_a(a, buffers.x)
            if alike:
                added = kernel.add_same(at * pair.width, x)
            else:
                y = pair.numbers_b(b, buffers.y)
                pair.subtract(a, b, x, y, buffers.d)
                added = kernel.add(at * pair.width, x, y, buffers)
            if added:
                break
    return same
