"""The bytes of a payload as an array, in the shape it had on the device. Pure.

Facts: ascend-formats.md 1.2. Three defects of msaccucmp are not copied: 0x7F and 0xFF of
FLOAT8_E4M3FN are NaN and not 480, infinities keep their sign, and an empty tensor its element type.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.dtypes import ELEMENT_TYPES, as_stored
from rankdump.contract.dump_types import DATA_TYPES
from rankdump.contract.dumpdata import OpInput, OpOutput
from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.contract.npy import MAX_DIMENSIONS

Array = npt.NDArray[Any]
_PACKED = {"INT4": 4, "UINT1": 1}
"""Bits of the types of which several elements share a byte."""
_HIFLOAT8_NAN, _HIFLOAT8_INFINITY = 0x80, 0x6F
# Dot field of HiFloat8 -> bits of its exponent; what follows the exponent is the mantissa.
_DOTS = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}


def array(part: OpInput | OpOutput, data: bytes | memoryview) -> Array:
    """Return a tensor, read-only; no format is converted.

    Types that numpy lacks are widened: bfloat16 and 8-bit floats to float32, INT4 to int8, UINT1
    to uint8; UNDEFINED is bytes, whatever its shape says. UnsupportedError for what is no number
    or lies in no known way, DamagedError where the bytes are too few for the shape.
    """
    name = type_name(part.data_type)
    flat = _elements(part.data_type, name, memoryview(data))
    dims = part.shape.dim if part.shape else ()
    shape = (len(flat),) if name == "UNDEFINED" or not dims else dims
    if len(shape) > MAX_DIMENSIONS:
        raise DamagedError(
            f"damaged: a shape of {len(shape)} extents, at most {MAX_DIMENSIONS} are allowed"
        )
    count = math.prod(shape)
    if count > len(flat):
        raise DamagedError(
            f"damaged: {len(data)} bytes of {name} are {len(flat)} elements, too few for the shape "
            f"{shape}"
        )
    try:
        tensor = flat[:count].reshape(shape)
    except (ValueError, OverflowError):
        raise DamagedError(f"damaged: shape {shape}, which no array can have") from None
    tensor.flags.writeable = False
    return tensor


def type_name(number: int) -> str:
    """Return what CANN calls an element type, without its prefix; its number if it has no name."""
    known = DATA_TYPES.get(number)
    return known.name if known else str(number)


def _elements(number: int, name: str, data: memoryview) -> Array:
    """Return as many elements as the bytes hold; a rest that is no element is left out."""
    if name == "UNDEFINED":
        return np.frombuffer(data, dtype=np.int8)
    if name == "HIFLOAT8":
        return _hifloat8_table()[np.frombuffer(data, dtype=np.uint8)]
    if name in _PACKED:
        return _unpacked(np.frombuffer(data, dtype=np.uint8), _PACKED[name])
    known = DATA_TYPES.get(number)
    if known is None or not known.element:
        raise UnsupportedError(f"elements of type {name} cannot be read as numbers")
    element = ELEMENT_TYPES[known.element]
    whole = data[: len(data) // element.item_bytes * element.item_bytes]
    return np.frombuffer(as_stored(element.name, whole), dtype=element.descr)


def _unpacked(held: npt.NDArray[np.uint8], bits: int) -> Array:
    if bits == 1:
        return np.unpackbits(held)  # the first element is in the highest bit
    nibbles = np.stack((held & 0xF, held >> 4), axis=-1).reshape(-1).astype(np.int8)
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)


@cache
def _hifloat8_table() -> npt.NDArray[np.float32]:
    """Return the 256 values of HiFloat8, indexed by the byte."""
    return np.array([_hifloat8(byte) for byte in range(256)], dtype="<f4")


def _hifloat8(byte: int) -> float:
    """Return the value of one byte: sign, dot, exponent, mantissa (arXiv 2409.16626, table 2).

    The exponent is sign and magnitude, whose highest bit is left out because it is one. Where the
    dot field is 0000, the mantissa M stands for 2 ** (M - 23).
    """
    if byte == _HIFLOAT8_NAN:
        return math.nan
    sign, rest = (-1.0 if byte & 0x80 else 1.0), byte & 0x7F
    if rest == _HIFLOAT8_INFINITY:
        return sign * math.inf
    bits = f"{rest:07b}"
    for dot, width in _DOTS.items():
        if bits.startswith(dot):
            exponent, mantissa = bits[len(dot) : len(dot) + width], bits[len(dot) + width :]
            fraction = int(mantissa, 2) / (1 << len(mantissa))
            return sign * (1 + fraction) * 2.0 ** _exponent(exponent)
    return sign * 2.0 ** (rest - 23) if rest else 0.0


def _exponent(bits: str) -> int:
    if not bits:
        return 0
    magnitude = int("1" + bits[1:], 2)
    return -magnitude if bits[0] == "1" else magnitude
