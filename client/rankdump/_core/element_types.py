"""Element types: their common names, their sizes, and how each one is stored in an npy file. Pure.

Types that numpy lacks are widened to float32 in files, as MindSpore does for bfloat16 (MindSpore
2.3, Dump guide); the record keeps the name of the original type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._kernels.element_moments import find_address
from rankdump._kernels.kernel_functions import KERNELS
from rankdump.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type."""

    name: str
    """Common name, such as `float32` or `bfloat16`."""
    item_bytes: int
    """Size of one element in bytes, as the framework holds it."""
    descr: str
    """Type string in the header of an npy file, little endian."""

    @property
    def is_widened(self) -> bool:
        """Whether files hold float32 because numpy has no such type."""
        return self.name in _WIDENED_TYPES


_NUMPY_DESCRS = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
# name -> (exponent bits, mantissa bits, bias, kind). The kinds are those of the OCP 8-bit float
# paper and of the fn / fnuz variants that ml_dtypes names: "ieee" has infinities, "fn" has one NaN
# per sign, "fnuz" has a single NaN at 0x80 and no negative zero, "exp" is a power of two without
# sign.
_FLOAT8_FORMS = {
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e8m0fnu": (8, 0, 127, "exp"),
}
_WIDENED_TYPES = frozenset(("bfloat16", *_FLOAT8_FORMS))

ELEMENT_TYPES = {
    **{name: ElementType(name, int(descr[2:]), descr) for name, descr in _NUMPY_DESCRS.items()},
    "bfloat16": ElementType("bfloat16", 2, "<f4"),
    **{name: ElementType(name, 1, "<f4") for name in _FLOAT8_FORMS},
}


def get_element_type(name: str) -> ElementType:
    """Return the element type with this name; UnsupportedError if no npy file can hold it."""
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise UnsupportedError(f"element type {name!r} cannot be written to an npy file") from None


def convert_to_stored(name: str, data: memoryview) -> memoryview:
    """Return raw elements as an npy file stores them, in a new buffer only if they are widened."""
    if name not in _WIDENED_TYPES:
        return data
    elements = np.frombuffer(data, dtype=np.uint8)
    if name != "bfloat16":
        return _view_bytes(_make_float8_table(name)[elements])
    wide = np.empty(elements.size // 2, "<u4")
    KERNELS.functions.widen_bfloat16(find_address(wide), find_address(elements), wide.size)
    return _view_bytes(wide)


def convert_from_stored(name: str, stored: memoryview) -> tuple[memoryview, ...]:
    """Return the raw elements that `convert_to_stored` turns into `stored`; () if there are none.

    An 8-bit type with several codes for NaN stores all of them alike. The result then has one
    candidate for each code; every NaN of a candidate has that code.
    """
    if name not in _WIDENED_TYPES:
        return (stored,)
    words = np.frombuffer(stored, dtype="<u4")
    if name == "bfloat16":
        exact = not (words & np.uint32(0xFFFF)).any()
        return (_view_bytes((words >> np.uint32(16)).astype("<u2")),) if exact else ()
    table = _make_float8_table(name)
    codes = _find_first_codes(name)
    at = np.minimum(np.searchsorted(codes.words, words), len(codes.words) - 1)
    if not np.array_equal(codes.words[at], words):
        return ()
    held = codes.bytes[at]
    undefined = np.isnan(table[held])
    if not undefined.any():
        return (_view_bytes(held),)
    every = np.flatnonzero(np.isnan(table)).astype(np.uint8)
    return tuple(_view_bytes(np.where(undefined, code, held)) for code in every)


class _Float8Codes(NamedTuple):
    """All values of an 8-bit type as sorted float32 bit patterns, and the lowest code of each."""

    words: npt.NDArray[np.uint32]
    bytes: npt.NDArray[np.uint8]


@cache
def _find_first_codes(name: str) -> _Float8Codes:
    words, first = np.unique(_make_float8_table(name).view("<u4"), return_index=True)
    return _Float8Codes(words, first.astype(np.uint8))


def _view_bytes(elements: npt.NDArray[Any]) -> memoryview:
    return elements.view(np.uint8).reshape(-1).data


@cache
def _make_float8_table(name: str) -> npt.NDArray[np.float32]:
    """Return the 256 values of an 8-bit float type, indexed by the code."""
    exponent_bits, mantissa_bits, bias, kind = _FLOAT8_FORMS[name]
    values = [_decode_float8(byte, exponent_bits, mantissa_bits, bias, kind) for byte in range(256)]
    return np.array(values, dtype="<f4")


def _decode_float8(
    byte: int, exponent_bits: int, mantissa_bits: int, bias: int, kind: str
) -> float:
    if kind == "exp":
        return float("nan") if byte == 0xFF else 2.0 ** (byte - bias)
    if kind == "fnuz" and byte == 0x80:
        return float("nan")
    sign = -1.0 if byte & 0x80 else 1.0
    mantissa = byte & ((1 << mantissa_bits) - 1)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    top = (1 << exponent_bits) - 1
    if kind == "ieee" and exponent == top:
        return float("nan") if mantissa else sign * float("inf")
    if kind == "fn" and byte & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
