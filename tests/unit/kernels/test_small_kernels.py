"""Kernels of single values, compiled and in Python alike: copies of a few bytes, and varints."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankdump._kernels._native as native
from rankdump._kernels import numpy_twin
from rankdump._kernels.kernel_functions import KernelFunctions
from rankdump.wire.v1 import agent_pb2

BOTH: tuple[KernelFunctions, ...] = (native, numpy_twin)
LIMIT = 1 << 64


@given(number=st.integers(0, LIMIT - 1))
def test_varint_is_that_of_the_message(number: int):
    frame = agent_pb2.Frame(sequence=number)
    for kernels in BOTH:
        assert agent_pb2.Frame.FromString(b"\x08" + kernels.encode_varint(number)) == frame


@pytest.mark.parametrize("bits", range(65))
def test_varint_at_the_edges_of_its_groups_is_the_same_in_both(bits: int):
    for number in {max(0, (1 << bits) - 1), min(1 << bits, LIMIT - 1)}:
        assert native.encode_varint(number) == numpy_twin.encode_varint(number)


@pytest.mark.parametrize("number", [-1, LIMIT])
def test_number_of_more_than_64_bits_is_rejected(number: int):
    for kernels in BOTH:
        with pytest.raises(OverflowError):
            kernels.encode_varint(number)


@given(data=st.binary(max_size=300), begin=st.integers(0, 300))
def test_copy_of_memory_has_its_bytes(data: bytes, begin: int):
    memory = ctypes.create_string_buffer(data, len(data) + 1)
    begin = min(begin, len(data))
    for kernels in BOTH:
        found = kernels.read_memory(ctypes.addressof(memory) + begin, len(data) - begin)
        assert found == data[begin:]


def test_copy_of_memory_of_negative_length_is_rejected():
    memory = ctypes.create_string_buffer(8)
    for kernels in BOTH:
        with pytest.raises(ValueError, match="-1 bytes are not allowed"):
            kernels.read_memory(ctypes.addressof(memory), -1)


@given(data=st.data(), size=st.sampled_from([1, 2, 4, 8, 16]))
def test_copy_of_strided_elements_is_in_order(data: st.DataObject, size: int):
    """Law: the bytes are those that numpy puts in C order, also of an expanded axis."""
    extents = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    axes = data.draw(st.permutations(range(len(extents))))
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(extents), max_size=len(extents)))
    steps = [0] * len(extents)
    due = 1
    for axis, gap in zip(axes, gaps, strict=True):
        steps[axis] = due * gap
        due *= max(1, extents[axis] * gap)
    held = np.random.default_rng(due).bytes(due * size)
    elements = np.frombuffer(held, f"V{size}")
    view = np.lib.stride_tricks.as_strided(elements, extents, [step * size for step in steps])
    for kernels in BOTH:
        place = elements.__array_interface__["data"][0]
        assert kernels.read_strided(place, size, tuple(extents), tuple(steps)) == view.tobytes()


@pytest.mark.parametrize("extents", [(), (1,) * 33, (2, -1), (1 << 40, 1 << 40)])
def test_copy_of_elements_in_a_shape_that_cannot_be_is_rejected(extents: tuple[int, ...]):
    memory = ctypes.create_string_buffer(8)
    with pytest.raises(ValueError, match=r"extent|not allowed"):
        native.read_strided(ctypes.addressof(memory), 4, extents, (1,) * len(extents))
