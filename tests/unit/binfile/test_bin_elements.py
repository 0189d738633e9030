"""Payloads as arrays, against a slow decoder that works bit by bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._binfile.bin_file import get_type_name, read_payload_array
from rankdump._binfile.header_parts import OpInput, OpOutput, Shape
from rankdump._core.cann_types import DATA_TYPES
from rankdump.errors import CorruptedError, UnsupportedError

NUMBER = {kind.name: kind.number for kind in DATA_TYPES.values()}
PLAIN = {
    "FLOAT": ("f", np.float32),
    "FLOAT16": ("e", np.float16),
    "INT8": ("b", np.int8),
    "UINT8": ("B", np.uint8),
    "INT16": ("h", np.int16),
    "UINT16": ("H", np.uint16),
    "INT32": ("i", np.int32),
    "INT64": ("q", np.int64),
    "UINT32": ("I", np.uint32),
    "UINT64": ("Q", np.uint64),
    "BOOL": ("?", np.bool_),
    "DOUBLE": ("d", np.float64),
    "RESOURCE": ("q", np.int64),
}
REFUSED = (
    *("STRING", "DUAL_SUB_INT8", "DUAL_SUB_UINT8", "QINT8", "QINT16", "QINT32", "QUINT8"),
    *("QUINT16", "STRING_REF", "DUAL", "VARIANT", "INT2", "UINT2", "COMPLEX32", "FLOAT6_E3M2"),
    *("FLOAT6_E2M3", "FLOAT4_E2M1", "FLOAT4_E1M2", "HIFLOAT4", "HIFLOAT4_SCALE"),
)
DECODED = (
    *("UNDEFINED", "COMPLEX64", "COMPLEX128", "BF16", "INT4", "UINT1", "HIFLOAT8"),
    *("FLOAT8_E5M2", "FLOAT8_E4M3FN", "FLOAT8_E8M0"),
)


def of(name: str, shape: tuple[int, ...], data: bytes):
    """The array of an input of that type."""
    return read_payload_array(OpInput(NUMBER[name], 2, Shape(shape), size=len(data)), data)


def test_payload_types_are_all_tested():
    """No number of the table is without a test below."""
    assert {*PLAIN, *REFUSED, *DECODED} == set(NUMBER)


@pytest.mark.parametrize("name", PLAIN)
@given(data=st.binary(min_size=48, max_size=48))
def test_payload_of_plain_types(name: str, data: bytes):
    """Little endian, read-only, in the shape that is asked for."""
    letter, kind = PLAIN[name]
    if name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    count = 48 // struct.calcsize(f"<{letter}")
    made = of(name, (2, count // 2), data)
    assert made.dtype == kind
    assert made.shape == (2, count // 2)
    assert not made.flags.writeable
    due = struct.unpack(f"<{count}{letter}", data)
    np.testing.assert_array_equal(made.reshape(-1), np.array(due, dtype=kind))


def test_payload_of_complex_types():
    """Real part first."""
    data = struct.pack("<4f", 1, 2, 3, 4)
    assert of("COMPLEX64", (2,), data).tolist() == [1 + 2j, 3 + 4j]
    data = struct.pack("<4d", 1, 2, 3, 4)
    assert of("COMPLEX128", (2,), data).tolist() == [1 + 2j, 3 + 4j]


def test_payload_of_bfloat16():
    """The upper half of a float32."""
    made = of("BF16", (4,), bytes.fromhex("803f20c0807fc07f"))
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, [1.0, -2.5, math.inf, math.nan])


@given(data=st.binary(min_size=4, max_size=4), count=st.integers(0, 8))
def test_payload_of_int4(data: bytes, count: int):
    """The low half of a byte first, with its sign."""
    due: list[int] = []
    for byte in data:
        due += [(byte & 15) - 16 * (byte & 8 > 0), (byte >> 4) - 16 * (byte >> 7)]
    made = of("INT4", (count,), data)
    assert made.dtype == np.int8
    assert made.tolist() == due[:count]


def test_payload_of_uint1():
    """The highest bit first; the rest of the last byte is none of it."""
    made = of("UINT1", (2, 5), b"\x80\xc0")
    assert made.dtype == np.uint8
    assert made.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 1]]


def test_payload_of_undefined_type_is_bytes():
    """Whatever the shape says."""
    made = of("UNDEFINED", (7, 7), b"\x01\xff\x03")
    assert made.dtype == np.int8
    assert made.tolist() == [1, -1, 3]


def test_payload_of_float8():
    """NaN of E4M3FN is NaN, infinities of E5M2 keep their sign, E8M0 is a power of two."""
    assert of("FLOAT8_E4M3FN", (3,), b"\x38\x7e\xb8").tolist() == [1.0, 448.0, -1.0]
    assert np.isnan(of("FLOAT8_E4M3FN", (2,), b"\x7f\xff")).all()
    made = of("FLOAT8_E5M2", (4,), b"\x3c\x7c\xfc\x01")
    assert made.tolist() == [1.0, math.inf, -math.inf, 2.0**-16]
    assert of("FLOAT8_E8M0", (2,), b"\x7f\x00").tolist() == [1.0, 2.0**-127]
    assert made.dtype == np.float32


def hifloat8_values() -> list[float]:
    """All positive values, built from what the format promises about them and not from its bits.

    7 exponents have 3 bits of mantissa, 8 have 2, 16 have 1, and 7 more powers of two lie below
    (arXiv 2409.16626, abstract); the very last is an infinity, and there is one zero.
    """
    values = [0.0, *(2.0**e for e in range(-22, -15))]
    for exponents, bits in ((range(-3, 4), 3), ([*range(-7, -3), *range(4, 8)], 2)):
        values += [2.0**e * (1 + m / 2**bits) for e in exponents for m in range(2**bits)]
    values += [2.0**e * (1 + m / 2) for e in [*range(-15, -7), *range(8, 16)] for m in (0, 1)]
    return sorted(values)


def test_hifloat8_table_equals_the_formats_values():
    """Every byte has its own value, and together they are those that the format promises."""
    made = of("HIFLOAT8", (2, 128), bytes(range(256)))
    positive, negative = made
    assert made.dtype == np.float32
    assert positive[0] == 0
    assert positive[0x6F] == math.inf
    assert negative[0x6F] == -math.inf
    assert math.isnan(negative[0])
    promised = hifloat8_values()[:-1]
    assert sorted(positive[np.isfinite(positive)].tolist()) == promised
    np.testing.assert_array_equal(negative[1:], -positive[1:])


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0x01, 2.0**-22),
        (0x07, 2.0**-16),
        (0x08, 1.0),
        (0x09, 1.125),
        (0x10, 2.0),
        (0x18, 0.5),
        (0x20, 4.0),
        (0x28, 8.0),
        (0x30, 0.25),
        (0x3F, 0.234375),
        (0x40, 16.0),
        (0x5F, 2.0**-7 * 1.75),
        (0x60, 256.0),
        (0x6E, 32768.0),
        (0x7F, 2.0**-15 * 1.5),
    ],
)
def test_payload_of_hifloat8(byte: int, value: float):
    """One byte from each end of every field: sign, dot, exponent with its sign, mantissa."""
    assert of("HIFLOAT8", (1,), bytes([byte])).tolist() == [value]
    assert of("HIFLOAT8", (1,), bytes([byte | 0x80])).tolist() == [-value]


@pytest.mark.parametrize("name", REFUSED)
def test_payload_of_unsupported_type_is_rejected(name: str):
    """What nothing here can hold is named."""
    with pytest.raises(UnsupportedError, match=f"type {name} cannot"):
        of(name, (1,), bytes(16))


@pytest.mark.parametrize("number", [43, 1000, -1, -(1 << 31)])
def test_payload_of_unknown_type_is_rejected(number: int):
    """A number of a newer release is named, too."""
    assert get_type_name(number) == str(number)
    with pytest.raises(UnsupportedError, match=f"type {number} cannot"):
        read_payload_array(OpOutput(number, 2, Shape((1,))), bytes(8))


@pytest.mark.parametrize(
    ("shape", "size", "due"),
    [
        (None, 4, (1,)),
        ((), 4, (1,)),
        ((), 12, (3,)),
        ((), 14, (3,)),
        ((), 0, (0,)),
        ((0,), 0, (0,)),
        ((2, 0, 3), 4, (2, 0, 3)),
        ((2,), 32, (2,)),
        ((2, 1), 9, (2, 1)),
    ],
)
def test_payload_shape_follows_the_header(
    shape: tuple[int, ...] | None, size: int, due: tuple[int, ...]
):
    """A scalar has one extent, what stands behind the last element is dropped."""
    part = OpOutput(1, 2, None if shape is None else Shape(shape), size=size)
    made = read_payload_array(part, bytes(size))
    assert made.shape == due
    assert made.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("FLOAT", (3,), 11),
        ("FLOAT", (1,), 0),
        ("INT4", (5,), 2),
        ("UINT1", (9,), 1),
        ("FLOAT", (1 << 63, 1 << 63), 64),
        ("INT8", ((1 << 64) - 1,), 64),
        ("FLOAT", (0, 1 << 63), 0),
        ("FLOAT", (1,) * 65, 4),
        ("FLOAT", (2,) * 100_000, 4),
    ],
)
def test_payload_with_an_impossible_shape_is_rejected(name: str, shape: tuple[int, ...], size: int):
    """Too few bytes, and shapes that no array can have."""
    with pytest.raises(CorruptedError) as error:
        of(name, shape, bytes(size))
    assert len(str(error.value)) < 2000
