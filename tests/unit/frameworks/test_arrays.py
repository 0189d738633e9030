"""Sources of numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rankdump._frameworks.arrays import ArraySource
from rankdump.errors import UnsupportedError

KINDS = st.sampled_from(["f2", "f4", "f8", ">f4", "c8", "c16"])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::-2],
        np.array(7, dtype=">i4"),
        np.array([True, False]),
        np.array([1 + 2j], dtype="c8"),
        np.broadcast_to(np.float16(3), (2, 2)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(70_000).reshape(70, 1000),
        np.arange(70_000).reshape(70, 1000).T,
        np.arange(70_000, dtype=">i4"),
    ],
)
def test_array_source_copies_any_memory_order_as_little_endian_c_order(array):
    source = ArraySource(array)
    data = bytearray(source.byte_count)
    source.copy_into(memoryview(data))
    little = array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(np.frombuffer(data, little).reshape(array.shape), array)
    for count in (0, 1, 3, 100):
        head = source.make_head_source(count)
        first = bytearray(head.byte_count)
        head.copy_into(memoryview(first))
        assert head.shape == (min(count, array.size),)
        assert first == data[: len(first)]


@pytest.mark.parametrize("array", [np.zeros(70_000, "u1"), np.zeros(70_000, ">i2"), np.zeros(3)])
def test_array_source_refuses_a_target_of_another_size_or_one_that_is_read_only(array):
    source = ArraySource(array)
    for size in (source.byte_count - 1, source.byte_count + 1):
        target = bytearray(size)
        with pytest.raises(ValueError, match=r"reshape|size|structure"):
            source.copy_into(memoryview(target))
        assert not any(target)
    with pytest.raises((TypeError, ValueError)):
        source.copy_into(memoryview(bytes(source.byte_count)))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([object()]),
        np.array(["2020"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.array([(1, 2)], "i4,i4"),
        "text",
    ],
)
def test_array_source_rejects_types_that_no_file_can_hold(array):
    with pytest.raises(UnsupportedError):
        ArraySource(array)


@given(
    array=arrays.arrays(KINDS, arrays.array_shapes(min_side=0)),
    bad=st.sampled_from([None, np.nan, np.inf, -np.inf]),
    place=st.integers(0, 1 << 30),
)
def test_is_finite_finds_a_single_bad_element(array, bad, place):
    array[~np.isfinite(array)] = 0
    if bad is not None and array.size:
        array.flat[place % array.size] = bad
    assert ArraySource(array).is_finite() is (bad is None or not array.size)


@pytest.mark.parametrize("array", [np.array([True]), np.array([1, -1]), np.ones(1, "u8")])
def test_is_finite_is_true_for_types_without_infinity(array):
    source = ArraySource(array)
    assert source.is_finite()
    assert not source.has_changed()
    assert source.start_statistics(("max",), "high") is None


@pytest.mark.parametrize(("bits", "finite"), [(0x3F80, True), (0x7C00, True), (0x7F80, False)])
def test_is_finite_reads_bits_of_types_that_numpy_lacks(bits, finite):
    """Law: of bfloat16, 0x7F80 is infinity; 0x7C00, which is that of float16, is a number."""
    source = ArraySource(np.array([bits, 0], "u2"), "bfloat16")
    assert source.is_finite() is finite
    assert (source.dtype, source.byte_count) == ("bfloat16", 4)
    assert source.make_head_source(1).is_finite() is finite


@pytest.mark.parametrize(
    ("array", "packed"),
    [
        (np.arange(6, dtype="<i4").reshape(2, 3), True),
        (np.float32(2.5), True),
        (np.zeros((0, 3), "<f4"), True),
        (np.array([True, False]), True),
        (np.arange(6, dtype="<i4").reshape(2, 3).T, False),
        (np.arange(6, dtype="<i4")[::2], False),
        (np.arange(6, dtype=">i4"), False),
    ],
)
def test_elements_in_place_equal_the_copy(array, packed):
    """Law: elements in place equal those of a copy, or there are none."""
    source = ArraySource(array)
    lent = source.elements()
    assert (lent is not None) is packed
    target = memoryview(bytearray(source.byte_count))
    source.copy_into(target)
    assert lent is None or bytes(lent) == bytes(target)
