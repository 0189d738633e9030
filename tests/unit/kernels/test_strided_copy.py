"""Copies between orders of axes, in all kernels, against numpy's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_variants import VARIANTS, using

import rankdump._kernels._native as native
from rankdump._kernels import array_kernels, numpy_twin
from rankdump._kernels.array_kernels import copy_array
from rankdump._kernels.element_moments import find_address

ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
extents = st.lists(st.integers(1, 9), min_size=0, max_size=5) | st.lists(
    st.integers(1, 150), min_size=2, max_size=3
).filter(lambda shape: math.prod(shape) < 60_000)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array of a shape whose axes lie in memory in any order, with gaps, or backwards."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from((1, 1, 1, 2))) for _ in shape]
    lengths = [shape[axis] * gap for axis, gap in zip(order, gaps, strict=True)]
    held = np.zeros(math.prod(lengths), dtype).reshape(lengths)
    held.reshape(-1)[...] = np.arange(1, held.size + 1) % 251
    steps = tuple(slice(None, None, -gap if draw(st.integers(0, 5)) == 0 else gap) for gap in gaps)
    return held[(*steps, ...)].transpose(np.argsort(order) if order else ())


@given(data=st.data(), size=st.sampled_from(sorted(ITEMS)))
@settings(max_examples=300)
def test_copy_between_any_two_orders_is_numpys(data: st.DataObject, size: int):
    """Law: every element arrives at its place, and nothing else is written."""
    shape = tuple(data.draw(extents))
    source = data.draw(views(shape, ITEMS[size]))
    target = data.draw(views(shape, ITEMS[size]))
    whole = target if target.base is None else target.base
    while whole.base is not None:
        whole = whole.base
    results = []
    for variant in (*VARIANTS, "numpy"):
        whole[...] = 77
        if variant == "numpy":
            plan = find_address(target), find_address(source), target.itemsize
            strides = target.strides or (0,), source.strides or (0,)
            numpy_twin.copy_strided(*plan, shape or (1,), *strides)
        else:
            with using(variant):
                copy_array(target, source)
        results.append(whole.copy())
        assert np.array_equal(target, source)
    expected = np.full_like(whole, 77)
    whole[...] = 77
    target[...] = source
    expected[...] = whole
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.parametrize("size", sorted(ITEMS))
def test_transposition_of_large_planes_is_numpys(size: int):
    """Tiles, their rests in both directions, and several passes over a plane."""
    for rows, columns in ((64, 512), (63, 515), (2, 3000), (3000, 2), (333, 129)):
        source = np.arange(rows * columns).reshape(rows, columns).astype(ITEMS[size])
        target = np.zeros((columns, rows), ITEMS[size])
        for variant in VARIANTS:
            target[...] = 0
            with using(variant):
                copy_array(target, source.T)
            assert (target == source.T).all()


@pytest.mark.parametrize("item", [*ITEMS.values(), "V24", "V32", "V48", "V64"])
def test_planes_of_a_copy_past_the_caches_are_numpys(item: str):
    """Blocks and their rests, wherever the lines of the cache begin; nothing else is written."""
    width = np.dtype(item).itemsize
    rows = -(-600 // width) * 64
    columns = (9 << 19) // (rows * width) + 3
    source = np.random.default_rng(0).integers(0, 255, (rows, columns * width), "u1").view(item)
    size = source.nbytes
    for variant in VARIANTS:
        for begin in (0, width, 3 * width, 7):
            held = np.full(size + 256, 77, "u1")
            begin += -find_address(held) % 64
            target = held[begin : begin + size].view(item).reshape(columns, rows)
            with using(variant):
                copy_array(target, source.T)
            assert (target.view("u1") == np.ascontiguousarray(source.T).view("u1")).all()
            assert (held[:begin] == 77).all()
            assert (held[begin + size :] == 77).all()


def test_broadcast_source_is_repeated():
    target = np.zeros((5, 7), "f4")
    copy_array(target, np.broadcast_to(np.arange(7, dtype="f4"), (5, 7)))
    assert (target == np.arange(7)).all()


def test_copy_rejects_arrays_that_do_not_match():
    target = np.zeros((2, 3), "f4")
    for source in (np.zeros((3, 2), "f4"), np.zeros((2, 3), "f8")):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy_array(target, source)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_array(target, np.ones((2, 3), "f4"))
    assert array_kernels.copy_array is copy_array


@given(
    size=st.integers(0, 400) | st.integers(0, 300_000),
    shifts=st.tuples(st.integers(0, 63), st.integers(0, 63)),
)
@settings(max_examples=60)
def test_streamed_copy_has_the_bytes_and_writes_nothing_else(size: int, shifts: tuple[int, int]):
    """It writes whole lines past the caches, and the rest of the first and the last line by words.

    Three mebibytes are copied without the interpreter's lock."""
    for byte_count in (size, (3 << 20) + size):
        source = np.arange(byte_count + 64, dtype=np.uint8) % 251
        for variant in (*VARIANTS, "numpy"):
            target = np.full(byte_count + 128, 77, np.uint8)
            plan = find_address(target) + shifts[0], find_address(source) + shifts[1], byte_count
            if variant == "numpy":
                numpy_twin.stream_memory(*plan)
            else:
                with using(variant):
                    native.stream_memory(*plan)
            end = shifts[0] + byte_count
            assert np.array_equal(target[shifts[0] : end], source[shifts[1] :][:byte_count])
            assert (target[: shifts[0]] == 77).all()
            assert (target[end:] == 77).all()


def test_streamed_copy_refuses_a_size_below_0_and_a_target_that_is_read_only():
    data = bytearray(8)
    for module in (native, numpy_twin):
        with pytest.raises(ValueError, match="-1 bytes are not allowed"):
            module.stream_memory(0, 0, -1)
    with pytest.raises(ValueError, match="read-only"):
        array_kernels.stream_memory(memoryview(bytes(8)), find_address(np.frombuffer(data, "u1")))
