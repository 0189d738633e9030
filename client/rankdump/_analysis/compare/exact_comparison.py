"""Comparison of two runs that should have the same bits, such as two runs of one job with the same
seed. Tensors agree when their digests do; if a tree has only statistics, when the digests of their
fingerprints do. Elements are read only for tensors that differ, to measure the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rankdump._analysis.compare.card_findings import CardFinding
from rankdump._analysis.compare.compare_pool import compare_pairs
from rankdump._analysis.compare.comparison import (
    DumpSide,
    build_report,
    measure_programs,
    sort_rows,
)
from rankdump._analysis.compare.programs import add_fingerprints, read_programs
from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    ComparisonSettings,
    DivergenceOrigin,
    DumpedTensor,
    ElementTolerances,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_pairs import pair_programs
from rankdump._analysis.reader.dump import Dump, open_dump
from rankdump._analysis.reader.tree_walk import collector_paused

BITS_FINDING = "only its bits differ, as those of 0 and -0, or of two NaN"
_EXACT = ComparisonSettings(ElementTolerances(0.0, 0.0, equal_nan=True), ("exact",))
_SEED_SUBJECTS = ("random", "batch", "parameters", "learning_rate", "models", "settings")
"""Subjects of findings that differ in the first iteration if the two runs do not begin alike."""


@dataclass(frozen=True, slots=True)
class ExactReport:
    """Differences between two runs that should have the same bits."""

    report: ComparisonReport
    start_findings: tuple[CardFinding, ...]
    """What differed before the first operator of the first iteration. The runs were not started
    alike then, as with another seed, and later differences do not tell whether the job is
    deterministic.
    """
    compared: int
    """Number of compared pairs of tensors."""
    differing: int
    """Number of pairs that do not have the same bits, including tensors that only one run has."""
    by_statistics: int
    """Number of equal pairs of which only statistics are known."""
    dropped: tuple[int, int] = (0, 0)
    """Number of tensors of each run that were dropped, and therefore not compared."""

    @property
    def is_deterministic(self) -> bool:
        """Whether both runs have all tensors with the same bits; in that case the start does not
        matter.
        """
        return bool(self.compared) and not (self.differing or self.report.notes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were compared."""
        return tuple(sorted({row.rank for row in self.report.rows}))

    def find_rank_origin(self, rank: int) -> DivergenceOrigin | None:
        """Return the first operator of a rank that differs; None if none differs."""
        return next(
            (
                each
                for each in self.report.rank_origins
                if each.kind == "difference" and each.suspects[0].rank == rank
            ),
            None,
        )


def compare_exactly(a: Path, b: Path) -> ExactReport:
    """Compare the bits of two trees; CorruptedError for a path that is not a tree."""
    notes: list[str] = []
    first, second = open_dump(a), open_dump(b)
    with collector_paused():
        left, right = _read_side(a, first, notes), _read_side(b, second, notes)
        programs = pair_programs(left.programs, right.programs, notes)
    rows = list(map(_judge_bits, measure_programs(programs, _EXACT, compare_pairs)))
    sort_rows(rows)
    report = build_report((left, right), _EXACT, rows, programs)
    earliest = min((own.iteration for own, _ in programs if own.iteration >= 0), default=0)
    return ExactReport(
        replace(report, notes=tuple(dict.fromkeys(notes))),
        tuple(
            each
            for each in report.card_findings
            if each.is_difference
            and each.subject in _SEED_SUBJECTS
            and each.iteration in (None, earliest)
        ),
        len(rows),
        sum(not row.agrees for row in rows),
        sum(row.outcome.verdict is TensorVerdict.SAME and not _has_digest(row) for row in rows),
        (first.dropped_count, second.dropped_count),
    )


def _judge_bits(row: ComparisonRow) -> ComparisonRow:
    """Return a row that is equal only if the digests are equal or no digests are known."""
    outcome, a, b = row.outcome, row.pair.a, row.pair.b
    if not outcome.verdict.agrees or a is None or b is None:
        return row
    has_equal = _have_equal_digests(a, b)
    if has_equal is None and outcome.verdict is TensorVerdict.SAME:
        return row
    if has_equal:
        return row._replace(outcome=replace(outcome, verdict=TensorVerdict.SAME))
    findings = outcome.findings
    if outcome.verdict is TensorVerdict.SAME:
        findings = (*findings, BITS_FINDING)
    return row._replace(
        outcome=replace(outcome, verdict=TensorVerdict.DIFFERENT, findings=findings)
    )


def _have_equal_digests(a: DumpedTensor, b: DumpedTensor) -> bool | None:
    """Return whether digests, or digests of fingerprints, are equal; None if they are not known on
    both sides.
    """
    if a.digest and b.digest:
        return a.digest == b.digest
    own, other = (each.fingerprint.digest if each.fingerprint else None for each in (a, b))
    return None if own is None or other is None else own == other


def _read_side(path: Path, dump: Dump, notes: list[str]) -> DumpSide:
    notes.extend(dump.problems)
    programs = add_fingerprints(read_programs(dump, notes), dump.read_fingerprints(notes))
    return DumpSide(str(path), dump, programs)


def _has_digest(row: ComparisonRow) -> bool:
    a, b = row.pair.a, row.pair.b
    return a is not None and b is not None and _have_equal_digests(a, b) is not None
