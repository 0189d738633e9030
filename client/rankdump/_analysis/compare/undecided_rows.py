"""Rows of joined ranks whose difference says nothing: their verdict becomes `unknown`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rankdump._analysis.compare.coverage_findings import SideCoverage
from rankdump._analysis.compare.joined_tensors import ActivationKind, find_activation_kind
from rankdump._analysis.compare.report import ComparisonRow, TensorPair, TensorVerdict
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import LayoutSource

_PARTIAL_GRADIENT = (
    "one side may have the gradient for this operator alone, the other that of all uses of its "
    "input"
)
_APART = (TensorVerdict.DIFFERENT, TensorVerdict.SUSPICIOUS)


def mark_undecided_rows(
    rows: Iterable[ComparisonRow], a: SideCoverage, b: SideCoverage
) -> list[ComparisonRow]:
    """Return rows; of joined ranks, those are unknown that have another shape where elements may be
    missing, or a gradient that may be of other uses of a tensor.
    """
    if not (a.is_joined or b.is_joined):
        return list(rows)
    lacking = [name for name, side in (("a", a), ("b", b)) if side.may_lack_parts]
    why = f"{' and '.join(lacking)} may lack parts of it: ranks or files are missing or damaged"
    marked: list[ComparisonRow] = []
    for row in rows:
        verdict = row.outcome.verdict
        if verdict is TensorVerdict.SHAPE and lacking:
            marked.append(_mark_unknown(row, why))
        elif verdict in _APART and _may_have_other_uses(row.pair):
            marked.append(_mark_unknown(row, _PARTIAL_GRADIENT))
        else:
            marked.append(row)
    return marked


def _mark_unknown(row: ComparisonRow, why: str) -> ComparisonRow:
    outcome = row.outcome
    findings = (why, *outcome.findings)
    return row._replace(outcome=replace(outcome, verdict=TensorVerdict.UNKNOWN, findings=findings))


def _may_have_other_uses(pair: TensorPair) -> bool:
    """Return whether a pair is of gradients of an input that a side has as a DTensor: which
    operators share it depends on where it was made.
    """
    sides = [each for each in (pair.a, pair.b) if each is not None]
    if any(each.side is not TensorSide.OUTPUT for each in sides):
        return False
    named = next(filter(None, (each.entry or each.row_record for each in sides)), None)
    if find_activation_kind(named) is not ActivationKind.GRADIENT:
        return False
    layouts = (each.layout for each in sides)
    return any(each is not None and each.source is LayoutSource.DTENSOR for each in layouts)
