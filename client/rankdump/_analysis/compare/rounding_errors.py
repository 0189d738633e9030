"""Errors that rounding alone explains, for each pair of a comparison. Pure.

The least error that is expected of a tensor, relative to its size, is `k * C**depth` units of the
last place, with k = 4 and C = 1.03: the bound of Megatron-LM's comparison of gradients
(`test_optimizer_grads_match.py`), in which a gradient of layer l of L has the depth L + 1 - l. An
activation has the depth of its layer here. The bound does not grow beyond 32 layers, the depth
that the constants were chosen for.

A result is no more exact than what it was computed from, so the unit is that of the narrowest type
so far: of a gradient in float32 whose layers were computed in bfloat16, that of bfloat16. Types of
8 bits are taken as bfloat16 there, as Megatron-LM does: they occur in operands of products.

A parameter or gradient is measured against the largest one of its module: the gradient of a bias
is a sum over the batch that may cancel out almost completely, such as that of the keys of
attention, and its rounding errors are those of the terms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from rankdump._analysis.compare.call_names import parse_module_path
from rankdump._analysis.compare.report import ComparisonRow, TensorPair
from rankdump._analysis.compare.tensor_blocks import NARROW_HALF_UNITS
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

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
        if _is_from_backward(row):
            depth = count + 1 - (layer or 0)
        else:
            passed = depth = passed if layer is None else layer + 1
        growth = _LAYER_GROWTH ** min(depth, _MAX_GROWTH_LAYERS)
        widest = max(unit, carried) if unit else 0.0
        found.append(_ROUNDING_UNITS * growth * widest * sizes[_find_group(row)])
    return found


def find_unit(pair: TensorPair) -> float:
    """Return the unit of the last place, relative, of the narrower type of a pair; 0 for integers.
    A type that is not known counts as float32.
    """
    dtypes = [each.dtype or "float32" for each in (pair.a, pair.b) if each is not None]
    return max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def find_reference_size(row: ComparisonRow) -> float:
    """Return the root mean square of the reference of a row; 0 where it has no measures."""
    measures = row.outcome.measures
    if measures is None or not measures.relative_euclidean > 0:
        return 0.0
    size = measures.rmse / measures.relative_euclidean
    return size if math.isfinite(size) else 0.0


def _find_group(row: ComparisonRow) -> _RowGroup:
    """Return what rows have in common whose sizes are taken together."""
    name = row.name_b
    if row.op_type == PARAMETER_OP_TYPE:
        return row.rank, row.iteration, row.backward, name.rpartition(".")[0]
    return row.rank, row.iteration, row.position, row.slot_name


def _is_from_backward(row: ComparisonRow) -> bool:
    """Return whether a value comes from the backward pass, as a parameter after a step does."""
    return row.backward or row.op_type == PARAMETER_OP_TYPE


def _find_layer(row: ComparisonRow) -> int | None:
    """Return the number of the layer in the name of a call; None without one."""
    name = row.name_b or row.name_a
    parts: Iterable[str] = parse_module_path(name)
    if row.op_type == PARAMETER_OP_TYPE:
        parts = name.rpartition("/")[2].split(".")
    return next((int(part) for part in parts if part.isdecimal()), None)
