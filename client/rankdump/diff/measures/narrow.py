"""Elements rounded to a type with fewer bits, so that a wider one is compared on its terms. Pure.

To bfloat16 as IEEE 754 rounds, halves to even. To an 8-bit float to the nearest value it has; what
lies beyond its largest is left as it is, for no rounding brings the two together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump.contract.dtypes import ELEMENT_TYPES, as_stored

Floats: TypeAlias = "npt.NDArray[np.float64]"

_HALF_UNITS = {
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "float8_e8m0fnu": 2.0**-1,
}
"""Half a unit of the last place of each narrow type, relative: coarsest last."""
_BITS_OF_FLOAT = frozenset(("float16", "float32", "float64", *_HALF_UNITS))


def terms_of(dtype_a: str, dtype_b: str) -> str:
    """Return the type on whose terms two are compared; empty for the terms of the elements.

    That is the narrower of two different float types, where it is one that numpy lacks.
    """
    names = {dtype_a, dtype_b}
    if len(names) < 2 or not names <= _BITS_OF_FLOAT:
        return ""
    narrow = [name for name in _HALF_UNITS if name in names]
    return narrow[-1] if narrow else ""


def half_unit(terms: str) -> float:
    """Return the least relative tolerance on those terms; 0 for those of the elements."""
    return _HALF_UNITS.get(terms, 0.0)


def rounded(values: npt.NDArray[Any], terms: str) -> npt.NDArray[np.float32]:
    """Return real elements rounded to a narrow type, as float32."""
    wide = values.astype(np.float32)
    return _to_bfloat16(wide) if terms == "bfloat16" else _to_float8(wide, terms)


def _to_bfloat16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    bits = wide.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    # Adding to the bits of a NaN could make a number of it.
    return np.where(np.isnan(wide), wide, near.view(np.float32))


def _to_float8(wide: npt.NDArray[np.float32], terms: str) -> npt.NDArray[np.float32]:
    values, borders = _grid(terms)
    near = values[np.searchsorted(borders, wide)]
    # Half a unit beyond the last value, the type has none that is near.
    beyond = (wide < values[0] - (borders[0] - values[0])) | (
        wide > values[-1] + (values[-1] - borders[-1])
    )
    return np.where(beyond | ~np.isfinite(wide), wide, near)


@lru_cache(maxsize=8)
def _grid(terms: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the finite values of an 8-bit float, ascending, and the middles between them."""
    every = as_stored(terms, memoryview(bytes(range(256))))
    values = np.frombuffer(every, dtype=ELEMENT_TYPES[terms].descr).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = values[:-1] + np.diff(values) / 2
    return values.astype(np.float32), middles.astype(np.float32)
