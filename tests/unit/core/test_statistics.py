"""Statistics of a tensor against golden values of MindSpore and a float64 reference."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rankdump._core import element_types, statistics
from rankdump._core.element_types import get_element_type
from rankdump._core.statistics import (
    STATISTIC_TITLES,
    compute_statistic_texts,
)
from rankdump._kernels import numpy_twin
from rankdump._kernels.element_moments import ELEMENT_CODES
from rankdump._kernels.kernel_functions import KERNELS, KernelFunctions
from rankdump.errors import UnsupportedError

ALL = tuple(STATISTIC_TITLES)
COUNTABLE = tuple(item for item in ALL if item != "md5")
TEN = tuple(item for item in STATISTIC_TITLES if item not in ("md5", "l2norm"))
INF, NAN = math.inf, math.nan


def raw(array: np.ndarray) -> memoryview:
    return memoryview(array.tobytes())


def unsigned_zeros(found: dict[str, str]) -> dict[str, str]:
    """Zeros of both signs are equal: which one is the extreme depends on the order of comparing."""
    return {item: "0" if text == "-0" else text for item, text in found.items()}


def of(items: tuple[str, ...], array: np.ndarray) -> tuple[str, ...]:
    return compute_statistic_texts(items, array.dtype.name, raw(array))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # The rows of Add in MindSpore's own test
        ([[1, 2, 3], [4, 5, 6]], ("6", "1", "9.53939")),
        ([[7, 8, 9], [10, 11, 12]], ("12", "7", "23.6432")),
        ([[8, 10, 12], [14, 16, 18]], ("18", "8", "32.9242")),
    ],
)
def test_default_statistics_equal_those_of_mindspores_test(values: list, expected: tuple[str, ...]):
    assert of(("max", "min", "l2norm"), np.array(values, "f4")) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # max, min, avg, count, neg, pos, nan, -inf, +inf, zero
        ([[7.5, 8.56, -9.78], [10, -11, 0]], "10 -11 0.88 6 2 3 0 0 0 1"),
        (
            [[1, -INF, INF, -INF, INF], [INF, 1, -INF, INF, INF]],
            "inf -inf nan 10 3 7 0 3 5 0",
        ),
        ([-2.175, 1.990, NAN, NAN, -1.809], "nan nan nan 5 2 1 2 0 0 0"),
    ],
)
def test_ten_statistics_equal_those_of_mindspores_golden_file(values: list, expected: str):
    assert of(TEN, np.array(values, "f4")) == tuple(expected.split())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.539392, "9.53939"),
        (1e6, "1e+06"),
        (999999.0, "999999"),
        (1.17549435e-38, "1.17549e-38"),
        (0.0, "0"),
        (-0.0, "-0"),
        (INF, "inf"),
        (-INF, "-inf"),
        (-NAN, "nan"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
    ],
)
def test_statistic_numbers_are_written_as_by_cpp_streams(value: float, text: str):
    assert statistics.format_statistic_number(value) == text


def test_statistics_of_booleans_count_zeros_and_ones():
    found = dict(zip(ALL, of(ALL, np.array([True, False, True])), strict=True))
    assert (found["max"], found["min"], found["avg"]) == ("1", "0", "0.666667")
    assert (found["positive zero count"], found["zero count"]) == ("2", "1")


def test_md5_is_that_of_the_frameworks_elements():
    """Of bfloat16 two bytes each, although the file holds four."""
    data = np.array([1.0, -2.0], "f4").view(np.uint16)[1::2].copy()
    found = compute_statistic_texts(("md5", "max", "min"), "bfloat16", raw(data))
    assert found == (hashlib.md5(data.tobytes()).hexdigest(), "1", "-2")


def test_statistics_of_complex_types_are_rejected():
    assert not statistics.has_statistics("complex64")
    with pytest.raises(UnsupportedError, match="complex128"):
        compute_statistic_texts(("max",), "complex128", raw(np.zeros(2, "c16")))


@pytest.mark.parametrize("name", [n for n in element_types.ELEMENT_TYPES if n.startswith("float8")])
def test_statistics_of_8_bit_floats_use_their_values(name: str):
    data = np.arange(256, dtype=np.uint8)
    wide = np.frombuffer(element_types.convert_to_stored(name, raw(data)), "f4").astype("f8")
    nans = int(np.isnan(wide).sum())
    items = ("nan count", "positive zero count", "count")
    assert compute_statistic_texts(items, name, raw(data)) == (
        str(nans),
        str(int((wide > 0).sum())),
        "256",
    )


NUMERIC = [
    n
    for n in element_types.ELEMENT_TYPES
    if statistics.has_statistics(n) and not element_types.get_element_type(n).is_widened
]


@pytest.mark.parametrize("name", NUMERIC)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_statistics_equal_a_float64_reference(name: str, data: st.DataObject):
    """For every type, with NaN and infinities where it has them."""
    array = data.draw(hnp.arrays(np.dtype(name), hnp.array_shapes(max_dims=3, max_side=8)))
    found = dict(zip(ALL, of(ALL, array), strict=True))
    with np.errstate(all="ignore"):
        wide = array.astype("f8").reshape(-1)
        expected = {
            "max": f"{wide.max():g}",
            "min": f"{wide.min():g}",
            "count": str(wide.size),
            "negative zero count": str(sum(x < 0 for x in wide.tolist())),
            "positive zero count": str(sum(x > 0 for x in wide.tolist())),
            "nan count": str(sum(x != x for x in wide.tolist())),
            "negative inf count": str(wide.tolist().count(-INF)),
            "positive inf count": str(wide.tolist().count(INF)),
            "zero count": str(wide.tolist().count(0)),
            "md5": hashlib.md5(array.tobytes()).hexdigest(),
        }
        mean, norm = wide.sum() / wide.size, math.sqrt(np.square(wide).sum())
    seen = {item: found[item] for item in expected}
    assert unsigned_zeros(seen) == unsigned_zeros(expected)
    # Sums may differ in their last bit with the order of addition, so they are compared as numbers.
    for item, value in (("avg", mean), ("l2norm", norm)):
        scale = float(np.abs(wide).max()) if np.isfinite(wide).all() else 0.0
        assert float(found[item]) == pytest.approx(value, rel=1e-5, abs=1e-12 * scale, nan_ok=True)


def test_statistic_row_is_the_texts_joined_by_commas():
    data = raw(np.array([1, -2, 2], "f4"))
    assert statistics.compute_statistic_row(("max", "min", "l2norm"), "float32", data) == "2,-2,3"
    assert compute_statistic_texts((), "float32", data) == ()
    assert statistics.compute_statistic_row((), "float32", data) == ""
    assert compute_statistic_texts(("count", "max"), "float32", bytes(data)) == ("3", "2")


@pytest.mark.parametrize("items", [(), ("max", "l2norm"), COUNTABLE])
@pytest.mark.parametrize("kernels", [KERNELS.functions, numpy_twin])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int16", "bool"])
def test_statistic_rows_of_packed_moments_are_those_of_each_tensor(
    name: str, kernels: KernelFunctions, items: tuple[str, ...]
):
    tensors = [bytes(range(4 * count)) for count in (0, 1, 5, 5, 60)]
    width = get_element_type(name).item_bytes
    for exact in (False, True):
        form = statistics.make_statistics_form(items, exact=exact)
        packed = [
            kernels.pack_moments(data, len(data) // width, ELEMENT_CODES[name], form.parts)
            for data in tensors
        ]
        assert statistics.write_statistic_rows(form, packed) == [
            statistics.compute_statistic_row(items, name, data, exact=exact) for data in tensors
        ]


def test_statistics_of_an_empty_tensor_are_defined():
    found = compute_statistic_texts(ALL, "float32", memoryview(b""))
    zeros = dict(zip(ALL, found, strict=True))
    assert (zeros["max"], zeros["min"], zeros["avg"]) == ("-inf", "inf", "nan")
    assert (zeros["count"], zeros["l2norm"]) == ("0", "0")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [3, 1 << 14, (1 << 16) + 5])
@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int64", "bool"])
def test_sum_squares_adds_rows_and_rest(name: str, size: int):
    """The products of whole rows and of the rest add up; an overflow of float64 is infinity."""
    ones = np.ones(size, name)
    assert of(("l2norm", "avg"), ones) == (f"{math.sqrt(size):g}", "1")
    if name == "float64":
        assert of(("l2norm", "max"), ones * 1e200) == ("inf", "1e+200")


def test_statistics_of_several_threads_are_independent():
    """Law: figures taken by several threads at once are those of one."""
    rng = np.random.default_rng(5)
    arrays = [rng.normal(size=300_000, scale=i + 1).astype("f4") for i in range(8)]
    items = ("l2norm", "avg")
    expected = [of(items, array) for array in arrays]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda array: of(items, array), arrays)) == expected


def test_statistics_are_independent_of_block_ends():
    """Law: where blocks and chunks end changes no figure; a NaN in any of them is seen."""
    values = np.random.default_rng(7).normal(size=(1 << 18) + 77).astype("f4")
    wide = values.astype("f8")
    found = of(("max", "min", "l2norm", "avg", "count"), values)
    norm, mean = f"{np.linalg.norm(wide):g}", f"{wide.mean():g}"
    assert found == (f"{wide.max():g}", f"{wide.min():g}", norm, mean, str(values.size))
    for at in (0, 1 << 17, values.size - 1):
        spoilt = values.copy()
        spoilt[at] = NAN
        assert of(("max", "min", "l2norm", "nan count"), spoilt) == ("nan", "nan", "nan", "1")
