"""Verdicts by comparison with a normal error: the error of runs that should agree with the
reference, of rounding alone, or what the user allows by name. Pure.

An error is the root mean square of the difference, because at one place the reference is the same
for all runs, even where it is 0.

The smallest error that rounding explains, relative to the size of a tensor, is `k * C**depth` units
of the last place, with k = 4 and C = 1.03. This is the bound of Megatron-LM's comparison of
gradients (`test_optimizer_grads_match.py`), in which a gradient of layer l of L has the depth L + 1
- l. An activation has the depth of its layer here. The bound does not grow beyond 32 layers, the
depth that the constants were chosen for.

A result is no more exact than what it was computed from, so the unit is that of the narrowest type
so far: for a gradient in float32 whose layers were computed in bfloat16, it is the unit of
bfloat16. Types of 8 bits are treated as bfloat16, as in Megatron-LM, because they occur only in
operands of products.

A parameter or gradient is measured relative to the largest one of its module: the gradient of a
bias is a sum over the batch that may cancel out almost completely, such as that of the keys of
attention, and its rounding errors are those of the terms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from rankdump._analysis.compare.call_names import parse_module_path
from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    ComparisonSettings,
    NamedTolerance,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_blocks import NARROW_HALF_UNITS
from rankdump._analysis.reader.query import Query
from rankdump._core.tolerance_text import ROUNDING
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE
from rankdump.errors import ConfigError

NoisePlace: TypeAlias = "tuple[int, int, str, str]"
"""Rank, iteration, name of the call on side b, and slot of a tensor."""


class AllowedError(NamedTuple):
    """An error that is expected, and what it is expected from."""

    error: float
    text: str
    """Phrase for a multiple, as in `5 times that of the noise runs`."""
    source: str
    """Short phrase, as in `judged by noise runs`."""


NORMAL_RATIO = 4.0
"""Largest ratio of an error to the expected error at which the error counts as normal."""
SUSPICIOUS_RATIO = 10.0
"""Largest ratio at which an error counts as suspicious; with a larger one the tensor is
different.
"""
_BY_ROUNDING = f"that of {ROUNDING}"
_WITHOUT_RUN = "without a noise run of it"
_JUDGED = (TensorVerdict.NORMAL, TensorVerdict.DIFFERENT)


def collect_errors(rows: Iterable[ComparisonRow]) -> dict[NoisePlace, float]:
    """Return the errors of a noise run by place; 0 where the elements are equal."""
    found: dict[NoisePlace, float] = {}
    for row in rows:
        error = _find_error(row)
        if error is not None:
            place = _make_place(row)
            found[place] = max(error, found.get(place, 0.0))
    return found


def judge_rows(
    rows: Sequence[ComparisonRow],
    settings: ComparisonSettings,
    noises: Sequence[Mapping[NoisePlace, float]] = (),
) -> list[ComparisonRow]:
    """Return the rows, which are in execution order, with verdicts. The expected error is the
    largest one of the noise runs at the same place, or that of rounding if it is larger; a
    tolerance for the name has priority.

    ConfigError for a tolerance whose pattern matches no name.
    """
    if not (settings.by_rounding or settings.named or noises):
        return list(rows)
    for each in settings.named:
        if not any(_matches_name(row, each) for row in rows):
            raise ConfigError("compare", "tolerance", each.pattern, "a pattern of compared names")
    judged: list[ComparisonRow] = []
    for row, rounding in zip(rows, find_rounding_errors(rows), strict=True):
        # If several patterns match, the last tolerance applies.
        named = next((each for each in reversed(settings.named) if _matches_name(row, each)), None)
        if named is not None:
            judged.append(_judge_row(row, _allow_named(row, named, rounding)))
        elif noises:
            judged.append(_judge_row(row, _allow_noise(row, noises, rounding)))
        elif settings.by_rounding:
            judged.append(_judge_row(row, AllowedError(rounding, _BY_ROUNDING, ROUNDING)))
        else:
            judged.append(row)
    return judged


def _matches_name(row: ComparisonRow, tolerance: NamedTolerance) -> bool:
    query = Query(glob=tolerance.pattern)
    return any(query.keeps_operator(row.op_type, name) for name in (row.name_a, row.name_b) if name)


def _allow_named(row: ComparisonRow, named: NamedTolerance, rounding: float) -> AllowedError:
    if named.error is None:
        return AllowedError(rounding, _BY_ROUNDING, f"{ROUNDING} for {named.pattern}")
    source = f"tolerance {named.error:g} for {named.pattern}"
    allowed = named.error / NORMAL_RATIO * find_reference_size(row)
    return AllowedError(allowed, f"a quarter of the {source}", source)


def _allow_noise(
    row: ComparisonRow, noises: Sequence[Mapping[NoisePlace, float]], rounding: float
) -> AllowedError:
    known = [errors[place] for errors in noises if (place := _make_place(row)) in errors]
    if not known:
        return AllowedError(
            rounding, f"{_BY_ROUNDING}, {_WITHOUT_RUN}", f"{ROUNDING}, {_WITHOUT_RUN}"
        )
    return AllowedError(max(*known, rounding), "that of the noise runs", "noise runs")


def _judge_row(row: ComparisonRow, allowed: AllowedError) -> ComparisonRow:
    outcome, error = row.outcome, _find_error(row)
    is_drift = any(each.startswith(REPLICA_FINDING_PREFIX) for each in outcome.findings)
    if error is None or is_drift or outcome.verdict not in _JUDGED:
        return row
    expected, name, source = allowed
    ratio = error / expected if expected else math.inf if error else 0.0
    verdict, findings = TensorVerdict.NORMAL, outcome.findings
    if ratio > NORMAL_RATIO:
        is_suspicious = ratio <= SUSPICIOUS_RATIO
        verdict = TensorVerdict.SUSPICIOUS if is_suspicious else TensorVerdict.DIFFERENT
        times = f"{ratio:.3g} times {name}" if expected else f"not explained by {name}"
        findings = *findings, f"its error {error:.2g} is {times}"
    judged = replace(
        outcome, verdict=verdict, findings=findings, error_ratio=ratio, judged_by=source
    )
    return row._replace(outcome=judged)


def _find_error(row: ComparisonRow) -> float | None:
    """Return the error of a row; None if it has none, as for a row without elements."""
    if row.outcome.verdict is TensorVerdict.SAME:
        return 0.0
    measures = row.outcome.measures
    if measures is None or measures.nonfinite_apart or math.isnan(measures.rmse):
        return None
    return measures.rmse


def _make_place(row: ComparisonRow) -> NoisePlace:
    return row.rank, row.iteration, row.name_b, row.slot_name


_ROUNDING_UNITS = 4
_LAYER_GROWTH = 1.03
_MAX_GROWTH_LAYERS = 32
_UNITS: Mapping[str, float] = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    **{name: 2 * half for name, half in NARROW_HALF_UNITS.items()},
}
_MAX_CARRIED_UNIT = _UNITS["bfloat16"]

_RowGroup: TypeAlias = "tuple[object, ...]"


def find_rounding_errors(rows: Sequence[ComparisonRow]) -> list[float]:
    """Return the error that rounding explains for each row of a report, which are in execution
    order; 0 where it explains none, as for integers.
    """
    sizes: defaultdict[_RowGroup, float] = defaultdict(float)
    for row in rows:
        group = _find_group(row)
        sizes[group] = max(sizes[group], find_reference_size(row))
    layers = [_find_layer(row) for row in rows]
    count = max((layer for layer in layers if layer is not None), default=-1) + 1
    found: list[float] = []
    carried = passed = 0.0
    iteration: int | None = None
    for row, layer in zip(rows, layers, strict=True):
        if row.iteration != iteration:
            iteration, passed = row.iteration, 0
        unit = find_unit(row.pair)
        carried = max(carried, min(unit, _MAX_CARRIED_UNIT))
        # A parameter is read after the step, so it has the depth of a gradient.
        if row.backward or row.op_type == PARAMETER_OP_TYPE:
            depth = count + 1 - (layer or 0)
        else:
            passed = depth = passed if layer is None else layer + 1
        growth = _LAYER_GROWTH ** min(depth, _MAX_GROWTH_LAYERS)
        widest = max(unit, carried) if unit else 0.0
        found.append(_ROUNDING_UNITS * growth * widest * sizes[_find_group(row)])
    return found


def find_unit(pair: TensorPair) -> float:
    """Return the relative unit of the last place for the narrower type of a pair; 0 for integers.
    An unknown type counts as float32.
    """
    dtypes = [each.dtype or "float32" for each in (pair.a, pair.b) if each is not None]
    return max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def find_reference_size(row: ComparisonRow) -> float:
    """Return the root mean square of the reference tensor of a row; 0 for a row without
    measures.
    """
    measures = row.outcome.measures
    if measures is None or not measures.relative_euclidean > 0:
        return 0.0
    size = measures.rmse / measures.relative_euclidean
    return size if math.isfinite(size) else 0.0


def _find_group(row: ComparisonRow) -> _RowGroup:
    """Return the key of the group of rows whose sizes are compared with each other."""
    name = row.name_b
    if row.op_type == PARAMETER_OP_TYPE:
        return row.rank, row.iteration, row.backward, name.rpartition(".")[0]
    return row.rank, row.iteration, row.position, row.slot_name


def _find_layer(row: ComparisonRow) -> int | None:
    """Return the number of the layer in the name of a call; None if the name has no number."""
    name = row.name_b or row.name_a
    parts: Iterable[str] = parse_module_path(name)
    if row.op_type == PARAMETER_OP_TYPE:
        parts = name.rpartition("/")[2].split(".")
    return next((int(part) for part in parts if part.isdecimal()), None)
