"""Findings about what a side of a comparison lacks: ranks, files that manifests name, and
micro-batches that some ranks left out; and which rows of joined ranks have differences without
meaning. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from rankdump._analysis.compare.card_findings import CardFinding
from rankdump._analysis.compare.joined_tensors import ActivationKind, find_activation_kind
from rankdump._analysis.compare.report import (
    ComparisonRow,
    DumpedProgram,
    TensorPair,
    TensorVerdict,
)
from rankdump._core.number_ranges import ranges
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import LayoutSource
from rankdump._core.units import format_count
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_PassDirection: TypeAlias = Literal["forward", "backward"]
UnevenMicrobatches: TypeAlias = "Mapping[tuple[_PassDirection, int], Mapping[int, int]]"
"""Number of micro-batches of each rank, by direction and iteration."""
MISSING_FILE_ENDING = "but missing"
"""End of the text about a missing file that a manifest, or the table of another tool, names."""
_DIRECTIONS: tuple[_PassDirection, ...] = ("forward", "backward")
_PARTIAL_GRADIENT = (
    "one side may have the gradient for this operator alone, the other that of all uses of its "
    "input"
)
_APART = (TensorVerdict.DIFFERENT, TensorVerdict.SUSPICIOUS)


@dataclass(frozen=True, slots=True)
class SideCoverage:
    """Parts that one side of a comparison lacks."""

    microbatches: UnevenMicrobatches = field(
        default_factory=dict[tuple[_PassDirection, int], Mapping[int, int]]
    )
    missing_files: tuple[str, ...] = ()
    """One text for each missing file."""
    damages: tuple[str, ...] = ()
    """Texts of other problems in the tree, such as a manifest that cannot be read."""
    is_joined: bool = False
    """Whether the tensors of the side's ranks are joined."""
    missing_ranks: tuple[int, ...] = ()
    """Missing ranks among those that the job had; only if ranks are joined."""
    world_size: int = 0

    @property
    def may_lack_parts(self) -> bool:
        """Whether a joined tensor may lack elements."""
        return self.is_joined and bool(self.missing_files or self.missing_ranks or self.damages)


def list_coverage_findings(a: SideCoverage, b: SideCoverage) -> list[CardFinding]:
    """Return findings about what both sides lack, missing ranks first."""
    found: list[CardFinding] = []
    for name, side in (("a", a), ("b", b)):
        if side.missing_ranks:
            ranks = ranges(side.missing_ranks)
            text = f"{name} has no rank {ranks}, and its job had {side.world_size} ranks"
            found.append(CardFinding("ranks", text, ranks=side.missing_ranks))
    for name, side in (("a", a), ("b", b)):
        lists = (("has", side.damages, "problem"), ("lacks", side.missing_files, "file"))
        for verb, texts, noun in lists:
            if texts:
                count = format_count(len(texts), noun)
                found.append(CardFinding("files", f"{name} {verb} {count}; first {texts[0]}"))
    return [*found, *list_microbatch_findings(a.microbatches, b.microbatches)]


def find_uneven_microbatches(programs: Iterable[DumpedProgram]) -> UnevenMicrobatches:
    """Return how many micro-batches each rank ran, if not all ranks ran the same number.

    Passes without a micro-batch number count as one micro-batch, because a single pass has no
    number.
    """
    programs = list(programs)
    if len({program.rank for program in programs}) < 2:
        return {}
    seen: defaultdict[tuple[_PassDirection, int], dict[int, set[int | None]]] = defaultdict(dict)
    for program in programs:
        for call in program.calls:
            if call.op_type != PARAMETER_OP_TYPE:
                place = _DIRECTIONS[call.backward], program.iteration
                seen[place].setdefault(program.rank, set()).add(call.microbatch)
    found = {
        place: {rank: len(numbers - {None}) or 1 for rank, numbers in sorted(of_ranks.items())}
        for place, of_ranks in seen.items()
    }
    return {place: counts for place, counts in found.items() if len({*counts.values()}) > 1}


def list_microbatch_findings(a: UnevenMicrobatches, b: UnevenMicrobatches) -> list[CardFinding]:
    """Return a finding for the first iteration of each side in which ranks left out micro-batches,
    unless the other side has the same numbers.
    """
    return [*_list_side_findings("a", a, b), *_list_side_findings("b", b, a)]


def _list_side_findings(
    side: str, own: UnevenMicrobatches, other: UnevenMicrobatches
) -> Iterator[CardFinding]:
    told: Mapping[int, int] | None = None
    for direction in _DIRECTIONS:
        iteration = min((step for way, step in own if way == direction), default=None)
        if iteration is None:
            continue
        counts = own[direction, iteration]
        # Micro-batches without a forward pass have no backward pass, which is not reported again.
        if counts != told and counts != other.get((direction, iteration)):
            yield _make_finding(side, direction, iteration, counts)
        told = counts


def _make_finding(
    side: str, direction: str, iteration: int, counts: Mapping[int, int]
) -> CardFinding:
    most = max(counts.values())
    texts = [
        f"rank {ranges(rank for rank, count in counts.items() if count == fewer)} ran {fewer}"
        for fewer in sorted({*counts.values()} - {most})
    ]
    text = (
        f"micro-batches of {side} were left out from iteration {iteration} on: {', '.join(texts)} "
        f"of {most} {direction}"
    )
    ranks = tuple(rank for rank, count in counts.items() if count < most)
    return CardFinding("microbatches", text, ranks=ranks, iteration=iteration)


def mark_undecided_rows(
    rows: Iterable[ComparisonRow], a: SideCoverage, b: SideCoverage
) -> list[ComparisonRow]:
    """Return the rows. Among rows of joined ranks, a row becomes unknown if its shape differs where
    elements may be missing, or if it is a gradient that may include other uses of its tensor.
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
    """Return whether a pair consists of gradients of an input that is a DTensor on one side: it
    depends on where that DTensor was created which operators share it.
    """
    sides = [each for each in (pair.a, pair.b) if each is not None]
    if any(each.side is not TensorSide.OUTPUT for each in sides):
        return False
    named = next(filter(None, (each.entry or each.row_record for each in sides)), None)
    if find_activation_kind(named) is not ActivationKind.GRADIENT:
        return False
    layouts = (each.layout for each in sides)
    return any(each is not None and each.source is LayoutSource.DTENSOR for each in layouts)
