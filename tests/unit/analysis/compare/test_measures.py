"""Measures of two arrays compared with plain float64, for every element type."""

from __future__ import annotations

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rankdump._analysis.compare import tensor_blocks
from rankdump._analysis.compare.msaccucmp_measures import compute_msaccucmp_measures
from rankdump._analysis.compare.report import DifferenceMeasures, ElementTolerances
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored

PLAIN = [name for name, each in ELEMENT_TYPES.items() if not each.is_widened]
WIDENED = [name for name, each in ELEMENT_TYPES.items() if each.is_widened]


def plainly(a, b, tolerances: ElementTolerances) -> DifferenceMeasures:
    """The same measures, written down as their definitions say, with whole arrays."""
    if "c" in (a.dtype.kind, b.dtype.kind):
        a, b = (each.astype(np.complex128).view(np.float64) for each in (a, b))
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    both = np.isfinite(x) & np.isfinite(y)
    nans = np.isnan(x) & np.isnan(y)
    apart = ~(both | nans | (x == y))
    count, odd = x.size, int(apart.sum() + (0 if tolerances.equal_nan else nans.sum()))
    wide_x, wide_y, nonfinite = x, y, (int((~np.isfinite(x)).sum()), int((~np.isfinite(y)).sum()))
    x, y = wide_x[both], wide_y[both]
    d, size = np.abs(x - y), np.abs(y)
    unequal = ~(d <= tolerances.atol + tolerances.rtol * size)
    relative = d[size > 0] / size[size > 0]
    norms = math.sqrt(x @ x), math.sqrt(y @ y)
    return DifferenceMeasures(
        count=count,
        unequal=odd + int(unequal.sum()),
        max_absolute=largest(d),
        max_relative=largest(relative),
        mean_absolute=mean(d),
        mean_relative=mean(relative),
        cosine=cosine(x, y, norms),
        rmse=math.sqrt(mean(d * d)) if d.size else math.nan,
        relative_euclidean=math.sqrt(d @ d) / norms[1] if norms[1] else math.nan,
        kl_divergence=divergence(x, y),
        mean_absolute_unequal=mean(d[unequal]) if unequal.any() else 0.0,
        max_absolute_unequal=largest(d[unequal]) if unequal.any() else 0.0,
        nonfinite_a=nonfinite[0],
        nonfinite_b=nonfinite[1],
        nonfinite_apart=int(apart.sum()),
    )


def largest(values) -> float:
    return float(values.max()) if values.size else math.nan


def mean(values) -> float:
    return float(values.sum() / values.size) if values.size else math.nan


def cosine(x, y, norms) -> float:
    if not x.size:
        return math.nan
    if not all(norms):
        return math.nan if any(norms) else 1.0
    return float((x / norms[0]) @ (y / norms[1]))


def divergence(x, y) -> float:
    if (x < 0).any() or (y < 0).any() or not (x.sum() > 0 and y.sum() > 0):
        return math.nan
    p, q = x / x.sum(), y / y.sum()
    kept = p > 0
    with np.errstate(divide="ignore"):
        return float((p[kept] * (np.log(p[kept]) - np.log(q[kept]))).sum())


EXACTLY = 1e-9
IN_FLOAT32 = 2.0**-15
"""What the sums of blocks of float32 may be off by; counts and the divergence are not."""


def precision(a, b) -> float:
    return IN_FLOAT32 if {str(a.dtype), str(b.dtype)} <= {"float32", "float16"} else EXACTLY


def check(
    found: DifferenceMeasures, expected: DifferenceMeasures, precision: float = EXACTLY
) -> None:
    for each in fields(DifferenceMeasures):
        got, wanted = getattr(found, each.name), getattr(expected, each.name)
        rel = EXACTLY if each.name == "kl_divergence" else precision
        # Terms of a divergence cancel each other.
        slack = rel if each.name in ("kl_divergence", "cosine") else 0.0
        assert got == pytest.approx(wanted, rel=rel, abs=slack, nan_ok=True), each.name


def elements(dtype: str):
    """Elements of a type, the odd ones among them; of float64, those whose squares it can hold."""
    kind = np.dtype(ELEMENT_TYPES[dtype].descr)
    if kind.kind == "f":
        odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, max(float(np.finfo(kind).tiny), 1e-140)]
        most = min(float(np.finfo(kind).max), 1e140)
        usual = st.floats(-8, 8, width=16) | st.floats(-most, most)
        small = usual.filter(lambda value: value == 0 or abs(value) > 1e-140)
        return (small | st.sampled_from(odd)).map(kind.type)
    if kind.kind == "c":
        part = elements("float32" if dtype == "complex64" else "float64")
        return st.builds(lambda re, im: kind.type(complex(re, im)), part, part)
    if kind.kind == "b":
        return st.booleans()
    most = np.iinfo(kind)
    # Of whole numbers beyond 2**53, the reference knows too little; they have tests of their own.
    near = st.integers(max(most.min, -(1 << 53)), min(most.max, 1 << 53))
    return st.integers(max(most.min, -3), 3) | near


def pairs(dtype_a: str, dtype_b: str):
    def both(size: int):
        sides = [
            arrays.arrays(ELEMENT_TYPES[name].descr, size, elements=elements(name))
            for name in (dtype_a, dtype_b)
        ]
        return st.tuples(*sides)

    return st.integers(0, 9).flatmap(both)


tolerances = st.builds(
    ElementTolerances,
    rtol=st.sampled_from([0.0, 1e-4, 0.5]),
    atol=st.sampled_from([0.0, 1e-4, 2.0]),
    equal_nan=st.booleans(),
)


@pytest.mark.parametrize("dtype", PLAIN)
@settings(max_examples=40)  # of each type
@given(data=st.data())
def test_measures_of_every_type_equal_those_in_float64(dtype, data):
    a, b = data.draw(pairs(dtype, dtype))
    if data.draw(st.booleans()):
        b = np.where(np.arange(b.size) % 2, a, b)
    wanted = data.draw(tolerances)
    with np.errstate(all="ignore"):
        expected = plainly(a, b, wanted)
    check(measure_difference(a, b, wanted).measures, expected, precision(a, b))


@given(st.data(), st.sampled_from(PLAIN), st.sampled_from(PLAIN))
def test_measures_of_different_types_compare_numbers(data, dtype_a, dtype_b):
    """Whichever two meet: as numbers, not as bytes."""
    a, b = data.draw(pairs(dtype_a, dtype_b))
    with np.errstate(all="ignore"):
        expected = plainly(a, b, ElementTolerances())
    check(measure_difference(a, b, ElementTolerances()).measures, expected, precision(a, b))


def of(a, b, **tolerances) -> DifferenceMeasures:
    return measure_difference(
        np.asarray(a), np.asarray(b), ElementTolerances(**tolerances)
    ).measures


@given(st.data(), st.sampled_from([1e-4, 1e-29, 0.3]), st.sampled_from([0.0, 1e-4, 1e-30, 1.0]))
def test_closeness_in_float32_is_decided_as_in_float64(data, atol, rtol):
    """Which numbers are close is decided as in float64, however little is between them."""
    b = data.draw(arrays.arrays(np.float32, 7, elements=st.floats(-(2.0**60), 2.0**60, width=32)))
    off = data.draw(arrays.arrays(np.int32, 7, elements=st.integers(-3, 3)))
    wide = b.astype(np.float64)
    a = (wide + atol + rtol * np.abs(wide)).astype(np.float32)
    a = (a.view(np.int32) + np.where(np.abs(a) > 1e-37, off, 0)).astype(np.int32).view(np.float32)
    expected = np.abs(a.astype(np.float64) - wide) > atol + rtol * np.abs(wide)
    assert of(a, b, rtol=rtol, atol=atol).unequal == expected.sum()


@given(
    st.integers(1, 3 * 512 + 5),
    st.floats(2.0**-9, 2.0**9, width=32),
    st.floats(2.0**-20, 2.0**-1, width=32),
)
def test_float32_sums_have_the_documented_precision(size, value, off):
    """The same rounding again and again is the worst there is."""
    a = np.full(size, value, np.float32)
    b = a * np.float32(1 + off)
    b[::3] = -b[::3]
    check(of(a, b), plainly(a, b, ElementTolerances()), IN_FLOAT32)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-10, 1e10, 1e19, 1e30])
def test_float32_numbers_with_overflowing_squares_are_exact(scale):
    """What is too small or too large to be squared in float32 is not."""
    numbers = np.random.default_rng(0).standard_normal((2, 2000)).astype(np.float32)
    a, b = numbers * np.float32(scale)
    check(of(a, b), plainly(a, b, ElementTolerances()), IN_FLOAT32)
    b[::2] = 0
    tiny = b / np.float32(1e7)
    check(of(a, tiny), plainly(a, tiny, ElementTolerances()), IN_FLOAT32)


@pytest.mark.parametrize(
    "size",
    [
        tensor_blocks.BLOCK_NUMBERS - 1,
        tensor_blocks.BLOCK_NUMBERS,
        2 * tensor_blocks.BLOCK_NUMBERS + 3,
    ],
)
@pytest.mark.parametrize("floor", [-9.0, 0.0, 0.5])
def test_measures_do_not_depend_on_block_borders(size, floor):
    """Where a tensor ends says nothing of what it holds; zeros and signs take ways of their own."""
    numbers = np.random.default_rng(size)
    a = np.maximum(numbers.standard_normal(size, np.float32), np.float32(floor))
    b = np.maximum(a + numbers.standard_normal(size, np.float32) / 1000, np.float32(floor))
    b[: size // 3] = a[: size // 3]
    b[5] = a[-1] = math.nan
    with np.errstate(all="ignore"):
        check(of(a, b), plainly(a, b, ElementTolerances()), precision(a, b))
    assert measure_difference(a, b, ElementTolerances()).first_nonfinite_apart == 5


def test_difference_in_the_last_element_is_found():
    a = np.zeros((3, tensor_blocks.BLOCK_NUMBERS), np.complex64)
    b = a.copy()
    b[2, 7] = complex(0, math.inf)
    assert (
        measure_difference(a, b, ElementTolerances()).first_nonfinite_apart
        == 2 * tensor_blocks.BLOCK_NUMBERS + 7
    )


def test_float16_sums_do_not_overflow():
    """65504 is float16's largest: neither its squares nor its sums are numbers of its own."""
    a, b = np.full(1000, 65504, np.float16), np.full(1000, 65472, np.float16)
    found = of(a, b)
    assert found.max_absolute == found.mean_absolute == found.rmse == 32
    assert found.cosine == pytest.approx(1)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_sums_that_overflow_float64_are_infinite(dtype):
    """A sum that float64 cannot hold is infinite; what is not made of it stays right."""
    a, b = np.array([1e200, 1.0]).astype(dtype), np.array([2e200, 1.0]).astype(dtype)
    found = of(a, b)
    assert (found.max_absolute, found.max_relative, found.unequal) == (1e200, 0.5, 1)
    assert found.rmse == math.inf
    assert math.isnan(found.cosine)
    tiny = of(a / 1e300 / 1e100, b / 1e300 / 1e100, rtol=0.1, atol=0.0)
    assert (tiny.max_relative, tiny.unequal) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (np.array([2**62 + 1], np.int64), np.array([2**62], np.int64), 1),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), 1),
        (np.array([-(2**63)], np.int64), np.array([2**63 - 1], np.int64), 2**64),
        (np.array([-1], np.int64), np.array([2**64 - 1], np.uint64), 2**64),
        (np.array([2**62 + 1], np.int64), np.array([2**62], np.uint64), 1),
        (np.array([-1], np.int8), np.array([2**64 - 1], np.uint64), 2**64),
        (np.array([2**62 + 1], np.int64), np.array([5], np.int32), 2**62),
        (np.array([5], np.uint8), np.array([2**63], np.uint64), 2**63),
    ],
)
def test_64_bit_integers_that_differ_by_one_are_different(a, b, distance):
    """Two that differ by 1 differ, although they are the same float64."""
    for left, right in ((a, b), (b, a)):
        found = of(left, right, rtol=0.0, atol=0.0)
        assert (found.unequal, found.max_absolute) == (1, pytest.approx(distance, rel=1e-15))


def test_equal_tensors_have_cosine_one():
    """A vector is at cosine 1 from itself, not just below; numbers and bytes are told apart."""
    a = np.random.default_rng(0).standard_normal(1000, np.float32)
    found = measure_difference(a, a.copy(), ElementTolerances())
    assert found.same_bytes
    assert (found.measures.cosine, found.measures.unequal) == (1.0, 0)
    wide = measure_difference(a, a.astype(np.float64), ElementTolerances())
    assert not wide.same_bytes
    assert (wide.measures.cosine, wide.measures.max_absolute) == (1.0, 0.0)
    nothing = of(np.zeros(3), np.zeros(3))
    assert (nothing.cosine, nothing.close_share) == (1.0, 1.0)
    assert math.isnan(of(np.zeros(3), np.ones(3)).cosine)
    assert of(np.zeros(0), np.zeros(0)).close_share == 1.0


def test_measures_ignore_the_memory_order():
    """An array that lies by columns is compared by what it holds."""
    a = np.arange(12.0).reshape(3, 4)
    assert of(a, np.asfortranarray(a)).unequal == 0
    assert of(a, a[::-1, ::-1]).unequal == 12
    assert of(a, a.astype(">f8")).unequal == 0


@pytest.mark.parametrize("dtype", WIDENED)
def test_wider_type_is_rounded_to_the_narrow_one(dtype):
    """What is rounded from a value is close to it; two steps of the narrow type away is not."""
    every = np.frombuffer(
        convert_to_stored(dtype, np.arange(1 << 16, dtype="<u2").data.cast("B")), "<f4"
    )
    values = np.unique(every[np.isfinite(every) & (every > 0.01) & (every < 100)])
    step = np.diff(values)
    narrow, wide = values[1:-1], values[1:-1] + step[1:] * np.float32(0.4)
    found = measure_difference(narrow, wide, ElementTolerances(), dtype_a=dtype, dtype_b="float32")
    assert (found.rounded_dtype, found.measures.unequal) == (dtype, 0)
    assert found.measures.max_absolute == 0.0
    far = measure_difference(
        values[:-4], values[4:], ElementTolerances(), dtype_a="float32", dtype_b=dtype
    )
    assert far.measures.close_share < 0.1


def test_rounding_keeps_values_beyond_the_narrow_type():
    """NaN and infinity stay; what lies beyond the largest value of a type is not close to it."""
    odd = np.array([math.nan, math.inf, -math.inf, 1e38], np.float32)
    for dtype in WIDENED:
        found = measure_difference(
            odd, odd.copy(), ElementTolerances(), dtype_a=dtype, dtype_b="float32"
        ).measures
        assert (found.nonfinite_a, found.nonfinite_b) == (3, 3)
    largest = np.array([448], np.float32)
    beyond = measure_difference(
        largest, np.array([1000], np.float32), ElementTolerances(), dtype_a="float8_e4m3fn"
    ).measures
    assert beyond.unequal == 1


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64", "bfloat16"])
def test_measures_need_memory_for_few_blocks(dtype):
    """Beside the two arrays there are a few blocks, however large the arrays are."""
    a = np.arange(4_000_000, dtype="float32" if dtype == "bfloat16" else dtype)
    b = a + a.dtype.type(1)
    tracemalloc.start()
    try:
        measure_difference(
            a,
            b,
            ElementTolerances(),
            dtype_a=dtype,
            dtype_b="float32" if dtype == "bfloat16" else "",
        )
        compute_msaccucmp_measures(a, b)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * tensor_blocks.BLOCK_NUMBERS * 8


def test_measures_run_in_several_threads():
    """Each has memory of its own to work in."""
    numbers = np.random.default_rng(0).standard_normal((8, 50_000))

    def one(at: int) -> DifferenceMeasures:
        return measure_difference(numbers[at], numbers[at - 1], ElementTolerances()).measures

    with ThreadPoolExecutor(4, thread_name_prefix="rankdump-test") as pool:
        assert list(map(repr, pool.map(one, range(8)))) == [repr(one(at)) for at in range(8)]
