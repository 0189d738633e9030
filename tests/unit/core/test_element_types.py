"""Element types: sizes, and widened values exactly as another library computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankdump._core.element_types import (
    ELEMENT_TYPES,
    convert_from_stored,
    convert_to_stored,
    get_element_type,
)
from rankdump.errors import UnsupportedError

FLOAT8 = [
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
]


def widened(name: str, raw: np.ndarray) -> np.ndarray:
    return np.frombuffer(convert_to_stored(name, raw.view(np.uint8).data), "<f4")


def by_torch(name: str, raw: np.ndarray) -> np.ndarray:
    tensor = torch.frombuffer(bytearray(raw.tobytes()), dtype=getattr(torch, name))
    return tensor.to(torch.float32).numpy()


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_values_equal_those_of_torch(name: str):
    """All 256 values are torch's, signs of zero included."""
    raw = np.arange(256, dtype=np.uint8)
    ours, theirs = widened(name, raw), by_torch(name, raw)
    assert np.array_equal(ours, theirs, equal_nan=True)
    numbers = ~np.isnan(ours)
    assert np.array_equal(np.signbit(ours)[numbers], np.signbit(theirs)[numbers])


def test_bfloat16_values_equal_those_of_torch():
    """All 65,536 values are torch's, bit for bit."""
    raw = np.arange(1 << 16, dtype="<u2")
    ours, theirs = widened("bfloat16", raw), by_torch("bfloat16", raw)
    assert ours.tobytes() == theirs.tobytes()


def test_convert_to_stored_copies_only_widened_types():
    """Where file and framework agree the view itself is handed on."""
    view = memoryview(bytes(8))
    for name, kind in ELEMENT_TYPES.items():
        assert (convert_to_stored(name, view) is view) is not kind.is_widened


@pytest.mark.parametrize("name", sorted(ELEMENT_TYPES))
def test_element_sizes_equal_those_of_torch(name: str):
    """Sizes are torch's, and a type that is not widened has the same size on disk."""
    kind = get_element_type(name)
    assert kind.item_bytes == torch.empty(0, dtype=getattr(torch, name)).element_size()
    assert np.dtype(kind.descr).itemsize == (4 if kind.is_widened else kind.item_bytes)
    assert convert_to_stored(name, memoryview(b"")).nbytes == 0


def test_convert_to_stored_handles_odd_element_counts():
    """The stored bytes are those of exactly the elements given."""
    for name in ("bfloat16", "float8_e4m3fn"):
        size = ELEMENT_TYPES[name].item_bytes
        stored = convert_to_stored(name, memoryview(bytes(3 * size)))
        assert (stored.nbytes, stored.format, stored.ndim) == (12, "B", 1)


@pytest.mark.parametrize("name", ["", "int4", "object", "Float32", "complex32", "float128"])
def test_get_element_type_rejects_unknown_types(name: str):
    """A type that no file can hold is named in the refusal."""
    with pytest.raises(UnsupportedError, match=repr(name)):
        get_element_type(name)


@pytest.mark.parametrize("name", [*FLOAT8, "bfloat16", "float32", "bool"])
def test_convert_from_stored_reverses_convert_to_stored(name: str):
    """Bit for bit; of NaNs, which may all be one in the file, one answer for each code."""
    size = get_element_type(name).item_bytes
    raw = np.random.default_rng(3).integers(0, 256, 256 * 8, np.uint8)
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8) if name == "bfloat16" else raw
    codes = raw.view(f"u{size}")
    if name in FLOAT8:
        undefined = np.isnan(widened(name, raw))
        every = np.unique(raw[undefined])
        due = [np.where(undefined, code, raw).tobytes() for code in every]
    else:
        due = [codes.tobytes()]
    found = convert_from_stored(name, memoryview(bytes(convert_to_stored(name, raw.data))))
    assert [bytes(each) for each in found] == due


@pytest.mark.parametrize("name", [*FLOAT8, "bfloat16"])
def test_convert_from_stored_returns_nothing_for_impossible_values(name: str):
    assert convert_from_stored(name, memoryview(np.array([1, 1 + 2**-20], "<f4").tobytes())) == ()
