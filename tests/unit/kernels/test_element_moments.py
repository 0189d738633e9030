"""The compiled kernels and numpy's against each other, and against exact sums."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_variants import (
    VARIANTS,
    ElementRecipe,
    get_dtype,
    place_unaligned,
    recipes,
    using,
    widen_elements,
)

import rankdump._kernels._native as native
from rankdump._kernels import numpy_twin
from rankdump._kernels.array_kernels import measure_array
from rankdump._kernels.element_moments import (
    ALL_PARTS,
    COUNTS,
    ELEMENT_CODES,
    EXTREMES,
    PACKED_MOMENTS,
    SUMS,
    ElementMoments,
    find_address,
)

UNIT = 2.0**-53
NAN = math.nan


def sums_of(moments: ElementMoments) -> tuple[float, float]:
    return moments.total, moments.squares


def exact_parts(moments: ElementMoments) -> list[str]:
    """All but the sums; texts tell the zeros apart, and take NaN as equal."""
    return [repr(item) for item in moments._replace(total=0.0, squares=0.0)]


def check_sums(found: ElementMoments, wide: np.ndarray, factor: float) -> None:
    """Sums are within the stated error of exact ones; NaN and infinities are as in any order."""
    with np.errstate(all="ignore"):
        squares, large = wide * wide, np.abs(wide).sum()
    if not math.isfinite(large) or not math.isfinite(squares.sum()):
        if np.isfinite(wide).all():
            return  # what overflows first depends on the order
        with np.errstate(all="ignore"):
            expected = wide.sum(), squares.sum()
        assert [repr(item) for item in sums_of(found)] == [repr(float(item)) for item in expected]
        return
    total, root = math.fsum(wide), math.fsum(squares)
    assert abs(found.total - total) <= (factor + 1) * UNIT * math.fsum(np.abs(wide))
    assert abs(found.squares - root) <= (factor + 1) * UNIT * root


@pytest.mark.parametrize("name", ELEMENT_CODES)
@given(data=st.data())
@settings(max_examples=40)
def test_moments_of_all_kernels_are_equal(name: str, data: st.DataObject):
    """Law: for any elements at any address, everything but the sums is equal, and sums are near."""
    elements = data.draw(recipes(name)).make()
    buffer, address = place_unaligned(elements, data.draw(st.integers(0, 63)))
    code, size = ELEMENT_CODES[name], elements.size
    twin = ElementMoments(*numpy_twin.measure_elements(address, size, code, ALL_PARTS))
    wide = widen_elements(name, elements)
    check_sums(twin, wide, 8192 + size / 8192)
    found = []
    for variant in VARIANTS:
        with using(variant):
            moments = ElementMoments(*native.measure_elements(address, size, code, ALL_PARTS))
        assert exact_parts(moments) == exact_parts(twin)
        check_sums(moments, wide, 70 + size / 1024)
        found.append([repr(item) for item in moments])
    assert found[1:] == found[:-1], "variants have the same bits"
    assert buffer.size


@pytest.mark.parametrize("name", ELEMENT_CODES)
def test_moments_of_a_large_tensor_are_equal(name: str):
    elements = ElementRecipe(name, 1_000_003, "normal", 5, ((NAN, 999_999), (-0.0, 7))).make()
    address, code = find_address(elements), ELEMENT_CODES[name]
    found = ElementMoments(*native.measure_elements(address, elements.size, code, ALL_PARTS))
    twin = ElementMoments(*numpy_twin.measure_elements(address, elements.size, code, ALL_PARTS))
    assert exact_parts(found) == exact_parts(twin)
    check_sums(found, widen_elements(name, elements), 70 + 1000)
    bytes_found = native.measure_elements(elements.tobytes(), elements.size, code, ALL_PARTS)
    assert repr(bytes_found) == repr(tuple(found))
    for module, expected in ((native, found), (numpy_twin, twin)):
        packed = module.pack_moments(address, elements.size, code, ALL_PARTS)
        assert repr(PACKED_MOMENTS.unpack(packed)) == repr(tuple(expected))


@pytest.mark.parametrize("parts", [EXTREMES, SUMS, COUNTS, EXTREMES | SUMS, EXTREMES | COUNTS])
@pytest.mark.parametrize("name", ELEMENT_CODES)
def test_parts_are_those_of_all_moments(name: str, parts: int):
    """Each part is the same with and without the others, also where a block has NaN."""
    elements = ElementRecipe(name, 3000, "normal", 1, ((NAN, 4), (math.inf, 2000))).make()
    address, code = find_address(elements), ELEMENT_CODES[name]
    fields = {EXTREMES: slice(1, 3), SUMS: slice(3, 5), COUNTS: slice(5, 11)}
    for module in (native, numpy_twin):
        every = module.measure_elements(address, elements.size, code, ALL_PARTS)
        found = module.measure_elements(address, elements.size, code, parts)
        for part, where in fields.items():
            if parts & part:
                assert repr(found[where]) == repr(every[where]), (module, part)


@given(data=st.data())
@settings(max_examples=20)
def test_bfloat16_is_widened_bit_by_bit(data: st.DataObject):
    halves = data.draw(recipes("bfloat16")).make()
    buffer, address = place_unaligned(halves, data.draw(st.integers(0, 63)))
    for module in (native, numpy_twin):
        wide = np.zeros(halves.size, np.uint32)
        module.widen_bfloat16(wide.ctypes.data, address, halves.size)
        assert (wide == halves.astype("u4") << 16).all()
    assert buffer.size


def test_moments_of_every_float16_and_bfloat16_are_right():
    """Each of the 65,536 values alone: its number, its sign, and what it is."""
    for name in ("float16", "bfloat16"):
        elements = np.arange(1 << 16).astype("u2").view(get_dtype(name))
        code, address = ELEMENT_CODES[name], find_address(elements)
        wide = widen_elements(name, elements)
        counts = [np.isnan(wide), wide == np.inf, wide == -np.inf, wide > 0, wide < 0, wide == 0]
        for variant in VARIANTS:
            with using(variant):
                found = [
                    native.measure_elements(address + 2 * at, 1, code, ALL_PARTS)
                    for at in range(1 << 16)
                ]
            numbers = np.array([item[1] for item in found])
            assert (numbers[~np.isnan(wide)].view("u8") == wide[~np.isnan(wide)].view("u8")).all()
            assert np.isnan(numbers[np.isnan(wide)]).all()
            assert (counts == np.array([item[5:] for item in found], dtype=bool).T).all()


def test_empty_arrays_and_arrays_of_any_order_have_moments():
    assert measure_array(np.zeros(0, "f4")) == ElementMoments()
    values = np.arange(200_000, dtype="f4")
    every_other = measure_array(values[::2])
    assert (every_other.size, every_other.maximum) == (100_000, 199_998)
    assert every_other.total == values[::2].astype("f8").sum()
    swapped = measure_array(values.astype(">f4"))
    assert exact_parts(swapped) == exact_parts(measure_array(values))
    assert measure_array(values.astype(np.longdouble)).maximum == 199_999


def test_moments_merge_into_those_of_all_elements():
    recipe = ElementRecipe("float32", 5000, "relu", 3, ((-0.0, 4000), (math.inf, 10)))
    values = recipe.make()
    whole = measure_array(values)
    merged = measure_array(values[:1234]).merge_with(measure_array(values[1234:]))
    assert exact_parts(merged) == exact_parts(whole)
    assert merged.total == pytest.approx(whole.total)
    none = ElementMoments()
    assert repr(none.merge_with(whole)) == repr(whole)
    spoilt = merged.merge_with(measure_array(np.array([NAN], "f4")))
    assert math.isnan(spoilt.maximum)
    assert math.isnan(spoilt.minimum)


def test_kernels_reject_wrong_arguments():
    """A mistake of a caller is an exception, never a read of what is not there."""
    cases: list[tuple[tuple[Any, ...], type[Exception]]] = [
        ((b"1234", 2, ELEMENT_CODES["float32"], 7), ValueError),
        ((b"1234", 1, len(ELEMENT_CODES), 7), ValueError),
        ((b"1234", 1, -1, 7), ValueError),
        ((b"1234", -1, 0, 7), ValueError),
        ((b"1234", 1 << 61, ELEMENT_CODES["float64"], 7), ValueError),
        (("1234", 1, 0, 7), TypeError),
        ((b"1234", 1, 0), TypeError),
        ((b"1234", 1.5, 0, 7), TypeError),
    ]
    for arguments, error in cases:
        with pytest.raises(error):
            native.measure_elements(*arguments)


def test_several_threads_measure_independently():
    """Law: the lock is released, and the results are those of one thread."""
    rng = np.random.default_rng(5)
    arrays = [rng.normal(size=300_000, scale=i + 1).astype("f4") for i in range(8)]
    expected = [measure_array(array) for array in arrays]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(measure_array, arrays)) == expected
