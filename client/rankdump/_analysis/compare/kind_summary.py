"""One line for each kind of tensor in a comparison: parameters, buffers, gradients, activations.
Pure.

Two runs with batches of different sizes have no activation in common, while parameters and
gradients still show whether they compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rankdump._analysis.compare.report import (
    ComparisonRow,
    TensorVerdict,
)
from rankdump._analysis.compare.report_summary import count_verdicts, get_row_error
from rankdump._core.record import BUFFER_ARGUMENT
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

TENSOR_KINDS = ("parameters", "buffers", "gradients", "activations", "activation gradients")
"""Kinds in the order in which they are listed; `gradients` are those of parameters."""


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Tensors of one kind."""

    kind: str
    """One of TENSOR_KINDS."""
    rows: tuple[ComparisonRow, ...]

    @property
    def first_bad(self) -> ComparisonRow | None:
        """First pair, in the order of the report, whose values do not agree."""
        bad = (TensorVerdict.DIFFERENT, TensorVerdict.NAN)
        return next((row for row in self.rows if row.outcome.verdict in bad), None)

    @property
    def widest(self) -> ComparisonRow | None:
        """Pair with the largest error that does not agree; None where no error is known."""
        apart = [
            row
            for row in self.rows
            if row.outcome.verdict is TensorVerdict.DIFFERENT and not math.isnan(get_row_error(row))
        ]
        return max(apart, key=get_row_error, default=None)

    @property
    def batch_sizes(self) -> tuple[int, int] | None:
        """First extents of a and b, if all pairs of other shapes differ in these alone."""
        found = {
            (a.shape, b.shape)
            for row in self.rows
            if row.outcome.verdict is TensorVerdict.SHAPE
            for a, b in [(row.pair.a, row.pair.b)]
            if a is not None and b is not None
        }
        return _find_batch_sizes([shapes for shapes in found if shapes != (None, None)])


def _find_batch_sizes(
    pairs: Sequence[tuple[tuple[int, ...] | None, tuple[int, ...] | None]],
) -> tuple[int, int] | None:
    sizes: set[tuple[int, int]] = set()
    for a, b in pairs:
        if not a or not b or a[1:] != b[1:]:
            return None
        sizes.add((a[0], b[0]))
    return sizes.pop() if len(sizes) == 1 else None


def find_tensor_kind(row: ComparisonRow) -> str:
    """Return the kind of the tensors of a row, one of TENSOR_KINDS."""
    if row.op_type != PARAMETER_OP_TYPE:
        return "activation gradients" if row.backward else "activations"
    if row.backward:
        return "gradients"
    sides = (row.pair.a, row.pair.b)
    is_buffer = any(each is not None and each.argument == BUFFER_ARGUMENT for each in sides)
    return "buffers" if is_buffer else "parameters"


def summarize_kinds(rows: Iterable[ComparisonRow]) -> list[KindSummary]:
    """Return the kinds that occur, in the order of TENSOR_KINDS."""
    found: dict[str, list[ComparisonRow]] = {kind: [] for kind in TENSOR_KINDS}
    for row in rows:
        found[find_tensor_kind(row)].append(row)
    return [KindSummary(kind, tuple(of_kind)) for kind, of_kind in found.items() if of_kind]


def format_kinds(rows: Iterable[ComparisonRow], spelt: Callable[[str], str]) -> list[str]:
    """Return one line for each kind: `parameters  24 pairs: 2 different, 22 equal; ...`."""
    found = summarize_kinds(rows)
    width = max((len(each.kind) for each in found), default=0)
    return [f"{each.kind:<{width}}  {_describe_kind(each, spelt)}" for each in found]


def _describe_kind(found: KindSummary, spelt: Callable[[str], str]) -> str:
    counts = count_verdicts(found.rows)
    parts = ", ".join(f"{count:,} {verdict.value}" for verdict, count in counts.items())
    noun = "pair" if len(found.rows) == 1 else "pairs"
    details: list[str] = []
    widest, first = found.widest, found.first_bad
    if widest is not None:
        error = get_row_error(widest)
        details.append(f"by at most {error:.4g} ({_name_place(widest, spelt)})")
    if first is not None and first is not widest:
        details.append(f"first {_name_place(first, spelt)}")
    sizes = found.batch_sizes if TensorVerdict.SHAPE in counts else None
    if sizes is not None:
        details.append(
            f"first extent {sizes[0]:,} in a and {sizes[1]:,} in b, as with other batches"
        )
    return "; ".join((f"{len(found.rows):,} {noun}: {parts}", *details))


def _name_place(row: ComparisonRow, spelt: Callable[[str], str]) -> str:
    when = f"iteration {row.iteration}" if row.iteration >= 0 else "constants"
    slot = "" if row.op_type == PARAMETER_OP_TYPE else f" {row.place_name}"
    name = spelt(row.name_a or row.name_b).removeprefix("Gradients/")
    return f"{name}{slot}, rank {row.rank}, {when}"
