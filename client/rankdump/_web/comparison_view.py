"""What the page of a comparison shows of a report: its sentences, and rows page by page. The report
itself stays in the process that made it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.origin_text import format_origins, format_rank_origins
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    ComparisonReport,
    ComparisonRow,
    DumpedTensor,
    ProgramPlace,
    TensorVerdict,
)
from rankdump._analysis.compare.report_summary import (
    collect_suspect_keys,
    count_verdicts,
    format_kinds,
    make_call_key,
    max_absolute,
)
from rankdump._core.scope_names import format_scope_name

PAGE_ROWS = 100
_MAX_LINES = 40
"""Sentences of one kind that are shown."""
_MAX_TEXT = 2000
_FAULTS = (TensorVerdict.NAN, TensorVerdict.SHAPE, TensorVerdict.DIFFERENT)


class LineExcerpt(NamedTuple):
    """The first of some sentences."""

    shown: tuple[str, ...]
    total: int


class VerdictCount(NamedTuple):
    """Pairs of tensors with one verdict."""

    verdict: str
    pairs: int
    agrees: bool


class ComparisonSummary(NamedTuple):
    """All of a report but its rows."""

    a: str
    b: str
    level: str
    """`good`, `warning` or `fault`."""
    sentence: str
    """The first line about origins, as `rankdump diff` prints it."""
    origin_lines: tuple[str, ...]
    origin_row: int | None
    """Number of the first row of the call that they name first; None without one."""
    card_differences: tuple[str, ...]
    """What differs before the first operator."""
    counts: tuple[VerdictCount, ...]
    """The worst verdict first."""
    kinds: tuple[str, ...]
    rank_origins: LineExcerpt
    settings: str
    card_remarks: LineExcerpt
    notes: LineExcerpt
    row_count: int
    seconds: float


class TensorPlace(NamedTuple):
    """Where the page of a tensor of one side is."""

    name: str
    side: str
    slot: int
    rank: int
    iteration: int | None
    layout: str
    """Which part of a logical tensor it is; empty where that is not known."""


class ComparedRow(NamedTuple):
    """One pair of tensors."""

    number: int
    """Of the row in the report, from 0."""
    rank: int
    iteration: int | None
    name: str
    """Both names in full where they differ."""
    short_name: str
    place: str
    verdict: str
    agrees: bool
    is_suspect: bool
    """Whether the call may be the origin."""
    rule: str
    """Which paired the calls; empty without a partner."""
    dtype_and_shape: str
    error_ratio: float | None
    max_absolute: float
    cosine: float | None
    close_share: str
    statistic_differences: str
    findings: tuple[str, ...]
    a: TensorPlace | None
    b: TensorPlace | None


class RowSelection(NamedTuple):
    """Which rows are shown."""

    verdicts: frozenset[str]
    row: int
    """Number of the first row, if it has one of the verdicts; else the next that has."""


class RowExcerpt(NamedTuple):
    """Rows of one page, and where others begin; None where there are none."""

    rows: tuple[ComparedRow, ...]
    total: int
    """Rows with these verdicts, on all pages."""
    previous_row: int | None
    next_row: int | None
    previous_difference: int | None
    next_difference: int | None


class ComparisonView:
    """A report, ready to be shown in parts."""

    def __init__(self, report: ComparisonReport) -> None:
        self._report = report
        self._suspects = collect_suspect_keys(report)
        self._verdicts = [row.outcome.verdict.value for row in report.rows]
        self._selected: tuple[frozenset[str], list[int], list[int]] = (frozenset(), [], [])

    def summarize(self) -> ComparisonSummary:
        """Return all but the rows."""
        report = self._report
        counts = count_verdicts(report.rows)
        first, *more = format_origins(report)
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
            rank_origins=_cut_lines(format_rank_origins(report)),
            settings=report_text.describe_settings(report)[:_MAX_TEXT],
            card_remarks=_cut_lines(report_text.list_card_remarks(report)),
            notes=_cut_lines(report.notes),
            row_count=len(report.rows),
            seconds=report.seconds,
        )

    def select(self, wanted: RowSelection) -> RowExcerpt:
        """Return one page of rows."""
        numbers, known = self._list_numbers(wanted.verdicts)
        begin = bisect_left(numbers, wanted.row)
        end = min(begin + PAGE_ROWS, len(numbers))
        first = numbers[begin] if begin < len(numbers) else len(self._verdicts)
        before, after = bisect_left(known, first), bisect_right(known, first)
        return RowExcerpt(
            rows=tuple(self._make_row(at) for at in numbers[begin:end]),
            total=len(numbers),
            previous_row=numbers[max(0, begin - PAGE_ROWS)] if begin else None,
            next_row=numbers[end] if end < len(numbers) else None,
            previous_difference=known[before - 1] if before else None,
            next_difference=known[after] if after < len(known) else None,
        )

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
        """Return the numbers of the rows with some verdicts, and of those that do not agree."""
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
            iteration=_convert_iteration(row.iteration),
            name=report_text.format_call_name(row, str)[:_MAX_TEXT],
            short_name=report_text.format_call_name(row, format_scope_name)[:_MAX_TEXT],
            place=row.place_name[:_MAX_TEXT],
            verdict=found.verdict.value,
            agrees=found.verdict.agrees,
            is_suspect=make_call_key(row) in self._suspects,
            rule=row.rule,
            dtype_and_shape=report_text.format_dtype_and_shape(row)[:_MAX_TEXT],
            error_ratio=found.error_ratio,
            max_absolute=max_absolute(row),
            cosine=None if measures is None else measures.cosine,
            close_share="" if measures is None else report_text.format_share(measures.close_share),
            statistic_differences=report_text.format_statistic_differences(row)[:_MAX_TEXT],
            findings=tuple(text[:_MAX_TEXT] for text in islice(found.findings, _MAX_LINES)),
            a=_find_place(row, row.pair.a, row.name_a, place),
            b=_find_place(row, row.pair.b, row.name_b, other),
        )


def _find_place(
    row: ComparisonRow, tensor: DumpedTensor | None, name: str, place: ProgramPlace
) -> TensorPlace | None:
    """Return where a tensor is: the first of its parts, where it is joined."""
    if tensor is None:
        return None
    rank, iteration = place
    entry = tensor.entry or next(iter(tensor.parts), None)
    if entry is not None:
        name, rank = entry.op_name, entry.key.rank
    elif tensor.record is not None:
        name = tensor.record.op_name
    layout = "" if tensor.layout is None else str(tensor.layout)
    side, slot = tensor.side.value, tensor.slot
    return TensorPlace(name, side, slot, rank, _convert_iteration(iteration), layout)


def _convert_iteration(number: int) -> int | None:
    return None if number == CONSTANTS_ITERATION else number


def _cut_lines(lines: Sequence[str]) -> LineExcerpt:
    shown = tuple(line[:_MAX_TEXT] for line in lines[:_MAX_LINES])
    return LineExcerpt(shown, len(lines))
