"""How far two tensors are apart: all measures of a pair in few passes over blocks. Pure.

A block of either side becomes float64 and stays in a core's cache until it is done with, so memory
is that of the two tensors, whatever their size and type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.kernel import Kernel
from rankdump.diff.measures.msaccucmp import msaccucmp
from rankdump.diff.measures.narrow import half_unit, terms_of
from rankdump.diff.measures.operands import Operands, flat
from rankdump.diff.measures.room import BLOCK, Room, lent
from rankdump.diff.values import Measures, Tolerances

__all__ = ["Measured", "measure", "msaccucmp", "terms_of"]


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
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    tolerances: Tolerances,
    *,
    dtype_a: str = "",
    dtype_b: str = "",
) -> Measured:
    """Return the measures of two arrays of as many elements each; b is the reference.

    The names of types are those of the framework, where files hold wider ones. Complex elements
    count as two numbers each, their parts.
    """
    dtype_a, dtype_b = dtype_a or str(a.dtype), dtype_b or str(b.dtype)
    terms = terms_of(dtype_a, dtype_b)
    # The side that has the type already is left as it is.
    to_a, to_b = ("" if held == terms else terms for held in (dtype_a, dtype_b))
    pair = Operands(flat(a), flat(b), to_a, to_b)
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


def _add_blocks(pair: Operands, kernel: Kernel, room: Room) -> bool:
    """Add all blocks to the sums; return whether each had the same bytes on both sides."""
    size, step = pair.a.size, BLOCK // pair.width
    same = pair.raw
    for at in range(0, size, step):
        count = min(step, size - at)
        x, y, d, _, _ = room.buffers(count * pair.width)
        pair.read_a(at, x)
        if pair.same_bytes(at, count):
            kernel.add_same(at * pair.width, x)
        else:
            same = False
            pair.read_b(at, y)
            pair.subtract(at, x, y, d)
            kernel.add(at * pair.width, x, y, d)
    return same
