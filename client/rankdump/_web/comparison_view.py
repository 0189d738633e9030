"""View of a comparison's report: its sentences, and its rows page by page. The report itself stays
in the process that made it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    DumpedTensor,
    ProgramPlace,
    TensorVerdict,
    get_dated_iteration,
)
from rankdump._analysis.compare.report_summary import (
    collect_suspect_keys,
    count_verdicts,
    format_kinds,
    make_call_key,
    max_absolute,
)
from rankdump._core.number_ranges import ranges
from rankdump._core.scope_names import format_scope_name
from rankdump._web.dump_source import EVERYTHING, JobAttempt
from rankdump._web.page_kinds import LineExcerpt, slice_page

PAGE_ROWS = 100
_MAX_LINES = 40
"""Largest number of sentences of one kind that are shown."""
_MAX_TEXT = 2000
_MAX_FILES = 4
"""Largest number of files of a joined tensor that are named."""
_JUDGED = TensorVerdict.NORMAL, TensorVerdict.DIFFERENT
_FAULTS = (TensorVerdict.NAN, TensorVerdict.SHAPE, TensorVerdict.DIFFERENT)


class VerdictCount(NamedTuple):
    """Number of pairs of tensors with one verdict."""

    verdict: str
    pairs: int
    agrees: bool


class ComparisonSummary(NamedTuple):
    """The whole report except for its rows."""

    a: str
    b: str
    level: str
    """`good`, `warning` or `fault`."""
    sentence: str
    """The first line about origins, as `rankdump diff` prints it."""
    origin_lines: tuple[str, ...]
    origin_row: int | None
    """Number of the first row of the call that `sentence` names; None if it names none."""
    card_differences: tuple[str, ...]
    """Differences before the first operator."""
    counts: tuple[VerdictCount, ...]
    """Counts by verdict, the worst verdict first."""
    kinds: tuple[str, ...]
    rank_origins: LineExcerpt
    settings: str
    card_remarks: LineExcerpt
    notes: LineExcerpt
    row_count: int
    seconds: float


class TensorPlace(NamedTuple):
    """Parameters of the page that shows the tensor of one side."""

    name: str
    side: str
    slot: int
    rank: int | None
    """Rank of the tensor; None if only the tensor of all ranks is known."""
    iteration: int | None
    job: str
    attempt: int | None
    layout: str
    """Part of the logical tensor that it is; empty if that is unknown."""


class SideFact(NamedTuple):
    """A fact about both tensors of a pair."""

    name: str
    a: str | float | None
    """The fact on side a; None if it is not known there."""
    b: str | float | None


class ComparedRow(NamedTuple):
    """One pair of tensors."""

    number: int
    """Number of the row in the report, from 0."""
    rank: int
    iteration: int | None
    name: str
    """Name of the call; both full names if they differ."""
    short_name: str
    name_a: str
    """Name of the call on side a, as a mapping uses it; empty if side a has none."""
    name_b: str
    place: str
    verdict: str
    agrees: bool
    is_suspect: bool
    """Whether the call may be the origin of the difference."""
    rule: str
    """Rule that paired the calls; empty if the call has no partner."""
    dtype_and_shape: str
    error_ratio: float | None
    judged_by: str
    """What decided about the pair: noise runs, a tolerance, rounding, or the limits for close
    elements; empty if nothing had to be judged.
    """
    max_absolute: float
    cosine: float | None
    close_share: str
    statistic_differences: str
    findings: tuple[str, ...]
    a: TensorPlace | None
    b: TensorPlace | None


class RowSelection(NamedTuple):
    """Selection of the rows to show."""

    verdicts: frozenset[str]
    row: int
    """Number of the first row, if it has one of the verdicts; else the next row that has."""
    opened: int | None = None
    """Number of the row for which facts of both sides are shown; None for no row."""


class RowExcerpt(NamedTuple):
    """Rows of one page, and the numbers at which the neighbouring pages begin; None if there are
    none.
    """

    rows: tuple[ComparedRow, ...]
    total: int
    """Number of rows with these verdicts on all pages."""
    previous_row: int | None
    next_row: int | None
    previous_difference: int | None
    next_difference: int | None
    facts: tuple[SideFact, ...]
    """Facts about both sides of the opened row."""


class ComparisonView:
    """A report, prepared for showing it in parts."""

    def __init__(
        self, report: ComparisonReport, parts: Sequence[JobAttempt] = (EVERYTHING, EVERYTHING)
    ) -> None:
        """`parts` contains the jobs or attempts of a and b that the report is about."""
        self._report, self._parts = report, parts
        self._suspects = collect_suspect_keys(report)
        self._verdicts = [row.outcome.verdict.value for row in report.rows]
        self._selected: tuple[frozenset[str], list[int], list[int]] = (frozenset(), [], [])

    def summarize(self) -> ComparisonSummary:
        """Return the whole report except for its rows."""
        report = self._report
        counts = count_verdicts(report.rows)
        first, *more = report_text.format_origins(report)
        level = "fault" if any(each in counts for each in _FAULTS) else "warning"
        return ComparisonSummary(
            a=report.a,
            b=report.b,
            level="good" if report.agrees else level,
            sentence=first[:_MAX_TEXT],
            origin_lines=_cut_lines(more).shown,
            origin_row=self._find_origin_row(),
            card_differences=_cut_lines(report_text.list_card_differences(report)[1:]).shown,
            counts=tuple(
                VerdictCount(verdict.value, count, verdict.agrees)
                for verdict, count in counts.items()
            ),
            kinds=_cut_lines(format_kinds(report.rows, format_scope_name)).shown,
            rank_origins=_cut_lines(report_text.format_rank_origins(report)),
            settings=report_text.describe_settings(report)[:_MAX_TEXT],
            card_remarks=_cut_lines(report_text.list_card_remarks(report)),
            notes=_cut_lines(report.notes),
            row_count=len(report.rows),
            seconds=report.seconds,
        )

    def select(self, wanted: RowSelection) -> RowExcerpt:
        """Return one page of rows."""
        numbers, known = self._list_numbers(wanted.verdicts)
        page = slice_page(numbers, wanted.row, PAGE_ROWS)
        first = page.shown[0] if page.shown else len(self._verdicts)
        before, after = bisect_left(known, first), bisect_right(known, first)
        return RowExcerpt(
            rows=tuple(self._make_row(at) for at in page.shown),
            total=len(numbers),
            previous_row=page.previous,
            next_row=page.next,
            previous_difference=known[before - 1] if before else None,
            next_difference=known[after] if after < len(known) else None,
            facts=self._list_facts(wanted.opened),
        )

    def _list_facts(self, opened: int | None) -> tuple[SideFact, ...]:
        if opened is None or opened >= len(self._report.rows):
            return ()
        pair = self._report.rows[opened].pair
        a, b = ({} if side is None else _describe_tensor(side) for side in (pair.a, pair.b))
        return tuple(SideFact(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)))

    def _find_judge(self, row: ComparisonRow) -> str:
        """Return what decided about a pair; empty if nothing had to be judged."""
        found, settings = row.outcome, self._report.settings.tolerances
        if found.judged_by or found.verdict not in _JUDGED:
            return found.judged_by
        return f"{settings.atol:g} + {settings.rtol:g} * |b|"

    def _find_origin_row(self) -> int | None:
        nonfinite, differences = report_text.list_leading_origins(self._report)
        suspects = (call for origin in (*nonfinite, *differences) for call in origin.suspects)
        first = next(suspects, None)
        if first is None:
            return None
        key = make_call_key(first)
        rows = enumerate(self._report.rows)
        return next((at for at, row in rows if make_call_key(row) == key), None)

    def _list_numbers(self, verdicts: frozenset[str]) -> tuple[list[int], list[int]]:
        """Return the numbers of the rows with these verdicts, and of the rows that do not agree."""
        if self._selected[0] != verdicts:
            bad = {each.value for each in TensorVerdict if not each.agrees}
            numbers = [at for at, verdict in enumerate(self._verdicts) if verdict in verdicts]
            differences = [at for at in numbers if self._verdicts[at] in bad]
            self._selected = verdicts, numbers, differences
        return self._selected[1:]

    def _make_row(self, number: int) -> ComparedRow:
        row = self._report.rows[number]
        found = row.outcome
        place = row.rank, row.iteration
        other = self._report.places_of_b.get(place, place)
        measures = found.measures
        return ComparedRow(
            number=number,
            rank=row.rank,
            iteration=get_dated_iteration(row.iteration),
            name=report_text.format_call_name(row, str)[:_MAX_TEXT],
            short_name=report_text.format_call_name(row, format_scope_name)[:_MAX_TEXT],
            name_a=row.name_a,
            name_b=row.name_b,
            place=row.place_name[:_MAX_TEXT],
            verdict=found.verdict.value,
            agrees=found.verdict.agrees,
            is_suspect=make_call_key(row) in self._suspects,
            rule=row.rule,
            dtype_and_shape=report_text.format_dtype_and_shape(row)[:_MAX_TEXT],
            error_ratio=found.error_ratio,
            judged_by=self._find_judge(row),
            max_absolute=max_absolute(row),
            cosine=None if measures is None else measures.cosine,
            close_share="" if measures is None else report_text.format_share(measures.close_share),
            statistic_differences=report_text.format_statistic_differences(row)[:_MAX_TEXT],
            findings=tuple(text[:_MAX_TEXT] for text in islice(found.findings, _MAX_LINES)),
            a=self._find_place(row.pair.a, row.name_a, place, self._parts[0]),
            b=self._find_place(row.pair.b, row.name_b, other, self._parts[1]),
        )

    def _find_place(
        self, tensor: DumpedTensor | None, name: str, place: ProgramPlace, part: JobAttempt
    ) -> TensorPlace | None:
        """Return the place of a tensor; if it is joined, the place of its first part."""
        if tensor is None:
            return None
        # The program of all ranks has the number of the lowest rank, which need not have the
        # tensor.
        rank = None if self._report.is_joined else place[0]
        entry = tensor.entry or next(iter(tensor.parts), None)
        if entry is not None:
            name, rank = entry.op_name, entry.key.rank
        elif tensor.record is not None:
            name = tensor.record.op_name
        layout = "" if tensor.layout is None else str(tensor.layout)
        where = name, tensor.side.value, tensor.slot, rank, get_dated_iteration(place[1])
        return TensorPlace(*where, part.job, part.attempt, layout)


def _describe_tensor(tensor: DumpedTensor) -> dict[str, str | float]:
    """Return the facts about a tensor in a report, by name."""
    found: dict[str, str | float] = {"type": tensor.dtype}
    if tensor.shape is not None:
        found["shape"] = " x ".join(map(str, tensor.shape)) or "scalar"
    if tensor.layout is not None:
        found["part"] = str(tensor.layout)
    files = (tensor.entry,) if tensor.entry is not None else tensor.parts
    if files:
        found["rank"] = ranges(sorted({each.key.rank for each in files}))
        found["file"] = ", ".join(each.relative for each in files[:_MAX_FILES])
    if tensor.digest:
        found["digest"] = tensor.digest
    found |= tensor.statistics
    return {
        name: value[:_MAX_TEXT] if isinstance(value, str) else value
        for name, value in found.items()
        if value != ""
    }


def _cut_lines(lines: Sequence[str]) -> LineExcerpt:
    shown = tuple(line[:_MAX_TEXT] for line in lines[:_MAX_LINES])
    return LineExcerpt(shown, len(lines))
