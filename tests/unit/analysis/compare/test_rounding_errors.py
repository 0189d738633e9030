"""Errors that rounding alone explains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankdump._analysis.compare.error_tolerance import find_rounding_errors, find_unit
from rankdump._analysis.compare.report import (
    ComparisonRow,
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._core.record import TensorSide
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

MEASURES = measure_difference(np.ones(8), np.ones(8), ElementTolerances()).measures
UNIT = 2.0**-23


def make_pair(*dtypes: str) -> TensorPair:
    a, b = (DumpedTensor(TensorSide.OUTPUT, 0, "", dtype, (8,)) for dtype in dtypes)
    return TensorPair(a, b)


def make_row(
    name: str, position: int, *, dtype: str = "float32", size: float = 1.0, backward: bool = False
) -> ComparisonRow:
    measures = replace(MEASURES, rmse=0.25 * size, relative_euclidean=0.25)
    outcome = PairOutcome(TensorVerdict.DIFFERENT, (), measures)
    op_type = "Linear" if "/" in name else PARAMETER_OP_TYPE
    pair = make_pair(dtype, dtype)
    return ComparisonRow(0, 0, position, "exact", op_type, name, name, backward, pair, outcome)


@pytest.mark.parametrize(
    ("dtypes", "unit"),
    [
        (("float32", "float32"), UNIT),
        (("float64", "float16"), 2.0**-10),
        (("bfloat16", "float32"), 2.0**-7),
        (("float8_e4m3fn", "float8_e4m3fn"), 2.0**-3),
        (("complex64", "complex64"), UNIT),
        (("int64", "int64"), 0.0),
        (("", ""), UNIT),
    ],
)
def test_unit_is_that_of_the_narrower_type(dtypes, unit):
    assert find_unit(make_pair(*dtypes)) == unit


def test_unit_of_a_narrow_type_is_carried_on_but_not_to_integers():
    dtypes = ("float32", "bfloat16", "float32", "int64")
    rows = [
        make_row(f"Default/fc{at}/Linear-op0", at, dtype=each) for at, each in enumerate(dtypes)
    ]
    assert find_rounding_errors(rows) == [4 * UNIT, 4 * 2.0**-7, 4 * 2.0**-7, 0.0]


def test_types_of_eight_bits_are_carried_on_as_bfloat16():
    dtypes = ("float8_e5m2", "float32")
    rows = [
        make_row(f"Default/fc{at}/Linear-op0", at, dtype=each) for at, each in enumerate(dtypes)
    ]
    assert find_rounding_errors(rows) == [4 * 2.0**-2, 4 * 2.0**-7]


def test_error_grows_with_layers_up_to_a_limit():
    names = ["embed", "layers/0", "layers/1", "norm", "layers/99"]
    rows = [make_row(f"Default/{name}/Linear-op0", at) for at, name in enumerate(names)]
    expected = [4 * UNIT * 1.03**depth for depth in (0, 1, 2, 2, 32)]
    assert find_rounding_errors(rows) == pytest.approx(expected)


def test_gradients_have_the_depth_of_the_layers_behind_them():
    names = ["layers.0.fc.weight", "layers.1.fc.weight", "embed.weight"]
    rows = [make_row(name, at, backward=True) for at, name in enumerate(names)]
    rows.append(make_row("Gradients/Default/layers/1/Linear-op0", 3, backward=True))
    expected = [4 * UNIT * 1.03**depth for depth in (3, 2, 3, 2)]
    assert find_rounding_errors(rows) == pytest.approx(expected)


def test_gradient_that_cancels_out_is_measured_against_the_others_of_its_module():
    sizes = {"key.weight": 1e-3, "key.bias": 1e-10, "value.bias": 1e-10}
    rows = [
        make_row(name, at, size=size, backward=True)
        for at, (name, size) in enumerate(sizes.items())
    ]
    weight, bias, other = find_rounding_errors(rows)
    assert bias == weight == pytest.approx(4 * UNIT * 1.03 * 1e-3)
    assert other == pytest.approx(4 * UNIT * 1.03 * 1e-10)
