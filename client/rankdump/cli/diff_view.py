"""A comparison as lines: where it starts, counts, rows, what has no partner. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rankdump.cli.table import Column, numbers, table
from rankdump.cli.text import counted, label, shortened
from rankdump.diff import wording
from rankdump.diff.summary import accused, call_key, lonely, max_absolute, other_origins
from rankdump.diff.values import CONSTANTS, Origin, Report, Row, Suspect
from rankdump.reader import ranges

_MOST_CANDIDATES = 5
_MOST_LONELY = 4
_MOST_REMARKS = 5
_MARK = ">"
_MEASURES = numbers("max abs", "mean abs", "cosine", "close")


def lead(report: Report) -> list[str]:
    """Return where it starts, in lines; the operator of the whole first, then other ranks'."""
    lines = [line for origin in report.origins for line in _origin(origin, report)]
    if not any(origin.kind == "difference" for origin in report.origins):
        lines = [wording.outline(report), *lines]
    for origin in other_origins(report):
        lines += _of_rank(origin)
    types = wording.types(report)
    return [*lines, *([types] if types else [])]


def totals(report: Report) -> list[str]:
    """Return what was compared and what came of it, a sentence each."""
    return [
        f"a: {report.a}",
        f"b: {report.b}",
        wording.tally(report.rows),
        wording.tolerances(report),
    ]


def rows_table(rows: Sequence[Row], report: Report, *, width: int) -> list[str]:
    """Return rows as a table, with rank and iteration where several were compared.

    Those of the operators where it may start have a mark.
    """
    suspects = accused(report)
    marked = any(call_key(row) in suspects for row in rows)
    ranked = len({row.rank for row in report.rows}) > 1
    dated = len({row.iteration for row in report.rows}) > 1
    measured = any(row.outcome.measures for row in rows)
    figured = any(row.outcome.figures for row in rows)
    columns = (
        *([Column("")] if marked else []),
        *(numbers("rank") if ranked else ()),
        *(numbers("iteration") if dated else ()),
        *(Column("operator", flexible=True), Column("place"), Column("verdict")),
        *(_MEASURES if measured else ()),
        *([Column("figures apart")] if figured else []),
    )
    cells = [
        [
            *([_MARK if call_key(row) in suspects else ""] if marked else []),
            *([str(row.rank)] if ranked else []),
            *(["-" if row.iteration == CONSTANTS else str(row.iteration)] if dated else []),
            *(wording.name(row, label), row.place, row.outcome.verdict.value),
            *(_measures(row) if measured else []),
            *([wording.apart(row)] if figured else []),
        ]
        for row in rows
    ]
    return table(columns, cells, width=width) if rows else []


def remarks(rows: Sequence[Row], *, everything: bool = False) -> list[str]:
    """Return what was found in those rows beside numbers, a sentence each."""
    told = [
        f"{wording.name(row, label)}, rank {row.rank}, {row.place}: {wording.findings(row)}"
        for row in rows
        if row.outcome.findings
    ]
    shown = told if everything else told[:_MOST_REMARKS]
    left = len(told) - len(shown)
    return [*shown, *([f"... and {counted(left, 'more finding')}: --all"] if left else [])]


def extras(rows: Sequence[Row]) -> list[str]:
    """Return msaccucmp's measures of those rows, a sentence each."""
    return [
        f"{wording.name(row, label)}, rank {row.rank}, {row.place}: "
        + ", ".join(f"{name} {wording.rounded(value)}" for name, value in row.outcome.extra.items())
        for row in rows
        if row.outcome.extra
    ]


def unmatched(report: Report, *, everything: bool = False) -> list[str]:
    """Return the calls that have no partner, in short: a sentence for each side."""
    return [
        f"only in {side}: {_listed(calls, None if everything else _MOST_LONELY)}"
        for side, calls in lonely(report.rows).items()
        if calls
    ]


def _origin(origin: Origin, report: Report) -> list[str]:
    if not origin.certain or len(origin.suspects) != 1:
        lines = [wording.title(origin)]
        for each in origin.suspects[:_MOST_CANDIDATES]:
            lines += [f"  {_named(each)}: {wording.when(each, [each.rank])}", *_because(each, 4)]
        left = len(origin.suspects) - _MOST_CANDIDATES
        return [*lines, *([f"  ... and {counted(left, 'more candidate')}"] if left > 0 else [])]
    (found,) = origin.suspects
    ranks = wording.ranks_of(origin, found, report)
    return [
        f"{wording.title(origin)} {_named(found)}",
        f"  {wording.when(found, ranks)}",
        *_because(found, 2),
    ]


def _because(suspect: Suspect, indent: int) -> list[str]:
    said = (suspect.reason, wording.line_of(suspect.source))
    return [f"{'':{indent}}{line}" for line in said if line]


def _of_rank(origin: Origin) -> list[str]:
    if not origin.suspects:
        return []
    first = origin.suspects[0]
    what = "" if origin.kind == "difference" else f", what is not finite in {origin.side}"
    starts = "starts at" if origin.certain else "may start at"
    return [
        f"on rank {first.rank} alone{what}: {starts} {_named(first)}, {wording.moment(first)}",
        *_because(first, 2),
    ]


def _named(suspect: Suspect) -> str:
    return wording.name(suspect, label)


def _measures(row: Row) -> list[str]:
    found = row.outcome.measures
    if found is None:
        return [wording.rounded(max_absolute(row)), *[wording.NONE] * (len(_MEASURES) - 1)]
    return [
        wording.rounded(found.max_absolute),
        wording.rounded(found.mean_absolute),
        wording.likeness(found.cosine),
        wording.percent(found.close_share),
    ]


def _listed(calls: Sequence[Row], most: int | None) -> str:
    told: list[str] = []
    by_name = sorted(calls, key=lambda row: (row.name_a, row.name_b))
    groups = [list(group) for _, group in groupby(by_name, key=lambda r: (r.name_a, r.name_b))]
    groups.sort(key=lambda group: (group[0].iteration, group[0].position))
    for group in groups[:most]:
        own = group[0]
        where = f"rank {ranges(row.rank for row in group)}"
        iterations = wording.iterations(row.iteration for row in group)
        told.append(f"{shortened(label(own.name_a or own.name_b), 60)} ({where}, {iterations})")
    left = len(groups) - len(told)
    more = [f"{left:,} more"] if left else []
    return f"{counted(len(calls), 'call')}: {'; '.join([*told, *more])}"
