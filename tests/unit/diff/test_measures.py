"""Measures of two arrays beside the same in plain float64, for every element type."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.diff.measures import measure
from rankdump.diff.values import Measures, Tolerances

PLAIN = [name for name, each in ELEMENT_TYPES.items() if not each.widened]
WIDENED = [name for name, each in ELEMENT_TYPES.items() if each.widened]


def plainly(a, b, tolerances: Tolerances) -> Measures:
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
    return Measures(
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


def check(found: Measures, expected: Measures) -> None:
    for each in fields(Measures):
        got, wanted = getattr(found, each.name), getattr(expected, each.name)
        # Terms of a divergence cancel each other.
        slack = 1e-9 if each.name in ("kl_divergence", "cosine") else 0.0
        assert got == pytest.approx(wanted, rel=1e-9, abs=slack, nan_ok=True), each.name


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
    Tolerances,
    rtol=st.sampled_from([0.0, 1e-4, 0.5]),
    atol=st.sampled_from([0.0, 1e-4, 2.0]),
    equal_nan=st.booleans(),
)


@pytest.mark.parametrize("dtype", PLAIN)
@given(data=st.data())
def test_every_type_as_in_float64(dtype, data):
    a, b = data.draw(pairs(dtype, dtype))
    if data.draw(st.booleans()):
        b = np.where(np.arange(b.size) % 2, a, b)
    wanted = data.draw(tolerances)
    with np.errstate(all="ignore"):
        expected = plainly(a, b, wanted)
    check(measure(a, b, wanted).measures, expected)


@given(st.data(), st.sampled_from(PLAIN), st.sampled_from(PLAIN))
def test_types_that_differ(data, dtype_a, dtype_b):
    """Whichever two meet: as numbers, not as bytes."""
    a, b = data.draw(pairs(dtype_a, dtype_b))
    with np.errstate(all="ignore"):
        expected = plainly(a, b, Tolerances())
    check(measure(a, b, Tolerances()).measures, expected)
