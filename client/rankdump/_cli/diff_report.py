"""Work of `rankdump diff`: finding the parts of trees that paths name, the comparison, its output
and its files. Imported on use, because importing a comparison takes longer than printing the help.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from rankdump import reader
from rankdump._analysis.compare import report_json, report_text
from rankdump._analysis.compare.api_tables import build_api_tables, write_api_tables
from rankdump._analysis.compare.comparison import compare
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, ComparisonReport, ComparisonRow
from rankdump._analysis.compare.report_summary import (
    collect_suspect_keys,
    find_unmatched_calls,
    format_kinds,
    get_own_place,
    make_call_key,
    max_absolute,
    select_excerpt,
)
from rankdump._analysis.reader.dump import Dump
from rankdump._cli.output import (
    TableColumn,
    format_table,
    measure_width,
    number_columns,
    print_lines,
    print_table,
    shorten_text,
    show_progress,
)
from rankdump._core.number_ranges import ranges
from rankdump._core.plan import IterationSelection
from rankdump._core.scope_names import format_scope_name
from rankdump._core.units import format_count
from rankdump._layout.dump_folders import MAX_TREE_DEPTH, RANK_FOLDER_PATTERN, find_folder

_MAX_UNMATCHED_SHOWN = 4
_MAX_REMARKS_SHOWN = 5
_SUSPECT_MARK = ">"
_MEASURE_COLUMNS = number_columns("max abs", "mean abs", "cosine", "close")
_DEFAULT_ROWS = 20


@dataclass(frozen=True, slots=True)
class TreePart:
    """A tree, with the part of it that a path names."""

    root: Path
    rank: int | None = None
    graph: int | None = None
    iteration: int | None = None


def find_tree_part(path: Path) -> TreePart:
    """Return the part that a path names; a path that is neither a rank nor an iteration names a
    tree.
    """
    full = path.absolute()
    if full.is_file():
        return TreePart(path)
    if any(
        RANK_FOLDER_PATTERN.fullmatch(inner.name) and inner.is_dir() for inner in full.iterdir()
    ):
        return TreePart(path)
    for above in (full, *full.parents)[:MAX_TREE_DEPTH]:
        folder = find_folder(full.relative_to(above.parent).as_posix())
        if folder is not None and RANK_FOLDER_PATTERN.fullmatch(above.name):
            if folder.iteration is not None:
                return TreePart(above.parent, folder.rank, folder.graph, folder.iteration)
            # The folder of a net or graph contains only a part of each iteration.
            return TreePart(above.parent, folder.rank) if full == above else TreePart(path)
    return TreePart(path)


def format_report_totals(report: ComparisonReport) -> list[str]:
    """Return the lines about the two sides, the counts by verdict and the settings."""
    return [
        f"a: {report.a}",
        f"b: {report.b}",
        report_text.format_verdict_counts(report.rows),
        report_text.describe_settings(report),
        *report_text.list_card_remarks(report),
    ]


def format_rows(
    rows: Sequence[ComparisonRow], report: ComparisonReport, *, width: int
) -> list[str]:
    """Return rows as a table, with rank and iteration if several were compared.

    Rows of calls that may be the origin are marked.
    """
    suspects = collect_suspect_keys(report)
    marked = any(make_call_key(row) in suspects for row in rows)
    ranked = len({row.rank for row in report.rows}) > 1
    dated = len({row.iteration for row in report.rows}) > 1
    measured = any(row.outcome.measures for row in rows)
    has_statistics = any(row.outcome.statistic_differences for row in rows)
    columns = (
        *([TableColumn("")] if marked else []),
        *(number_columns("rank") if ranked else ()),
        *(number_columns("iteration") if dated else ()),
        *(
            TableColumn("operator", is_flexible=True),
            TableColumn("place", is_flexible=True),
            TableColumn("verdict"),
        ),
        *(_MEASURE_COLUMNS if measured else ()),
        *([TableColumn("statistic differences")] if has_statistics else []),
    )
    iterations = {CONSTANTS_ITERATION: "-"}
    cells = [
        [
            *([_SUSPECT_MARK if make_call_key(row) in suspects else ""] if marked else []),
            *([str(row.rank)] if ranked else []),
            *([iterations.get(row.iteration, str(row.iteration))] if dated else []),
            *(_name_call(row), row.place_name, row.outcome.verdict.value),
            *(_format_measures(row) if measured else []),
            *([report_text.format_statistic_differences(row)] if has_statistics else []),
        ]
        for row in rows
    ]
    return format_table(columns, cells, width=width) if rows else []


def format_remarks(rows: Sequence[ComparisonRow], *, everything: bool = False) -> list[str]:
    """Return one sentence for each row that has findings."""
    remarks = [
        f"{_name_place(row)}: {report_text.join_findings(row)}"
        for row in rows
        if row.outcome.findings
    ]
    shown = remarks if everything else remarks[:_MAX_REMARKS_SHOWN]
    left = len(remarks) - len(shown)
    return [*shown, *([f"... and {format_count(left, 'more finding')}: --all"] if left else [])]


def format_extra_measures(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return one sentence with msaccucmp's measures for each row that has them."""
    number = report_text.format_number
    return [
        f"{_name_place(row)}: "
        + ", ".join(f"{name} {number(value)}" for name, value in row.outcome.extra.items())
        for row in rows
        if row.outcome.extra
    ]


def format_unmatched(report: ComparisonReport, *, everything: bool = False) -> list[str]:
    """Return one sentence for each side that has calls without a partner."""
    return [
        f"only in {side}: "
        f"{_list_calls(calls, report, None if everything else _MAX_UNMATCHED_SHOWN)}"
        for side, calls in find_unmatched_calls(report.rows).items()
        if calls
    ]


def _name_call(row: ComparisonRow) -> str:
    return report_text.format_call_name(row, format_scope_name)


def _name_place(row: ComparisonRow) -> str:
    return f"{_name_call(row)}, rank {row.rank}, {row.place_name}"


def _format_measures(row: ComparisonRow) -> list[str]:
    found = row.outcome.measures
    if found is None:
        return [
            report_text.format_number(max_absolute(row)),
            *[report_text.NO_VALUE] * (len(_MEASURE_COLUMNS) - 1),
        ]
    return [
        report_text.format_number(found.max_absolute),
        report_text.format_number(found.mean_absolute),
        report_text.format_cosine(found.cosine),
        report_text.format_share(found.close_share),
    ]


def _list_calls(calls: Sequence[ComparisonRow], report: ComparisonReport, most: int | None) -> str:
    names: list[str] = []
    by_name = sorted(calls, key=lambda row: (row.name_a, row.name_b))
    groups = [list(group) for _, group in groupby(by_name, key=lambda r: (r.name_a, r.name_b))]
    groups.sort(key=lambda group: (group[0].iteration, group[0].position))
    for group in groups[:most]:
        own = group[0]
        places = [get_own_place(row, report) for row in group]
        where = f"rank {ranges(rank for rank, _ in places)}"
        iterations = report_text.format_iterations(iteration for _, iteration in places)
        names.append(
            f"{shorten_text(format_scope_name(own.name_a or own.name_b), 60)} ({where}, "
            f"{iterations})"
        )
    left = len(groups) - len(names)
    more = [f"{left:,} more"] if left else []
    return f"{format_count(len(calls), 'call')}: {'; '.join([*names, *more])}"


def compare_paths(a: Path, b: Path, arguments: Mapping[str, Any]) -> ComparisonReport:
    """Compare the parts of trees that two paths and the options of the command select."""
    places = find_tree_part(a), find_tree_part(b)
    arguments = dict(arguments)
    iterations: IterationSelection | None = arguments.pop("iterations")
    own = {
        f"{name}_{side}": _choose_number(
            name, side, getattr(place, name), arguments | {"iteration": iterations}
        )
        for side, place in zip("ab", places, strict=True)
        for name in ("rank", "iteration")
    }
    dumps = _open_dumps(places, arguments)
    options: dict[str, Any] = {
        **arguments,
        **own,
        "iteration": iterations.text if iterations else None,
    }
    with show_progress("comparing") as report_progress:
        return compare(*dumps, **options, progress=report_progress)


def _open_dumps(places: Sequence[TreePart], arguments: dict[str, Any]) -> list[Dump]:
    """Open the trees, each once; the options that are applied here are removed from `arguments`."""
    opened = {place.root: reader.open(place.root) for place in places}
    glob, pattern, job_id = (arguments.pop(name) for name in ("op", "op_regex", "job_id"))
    arguments["operator"] = glob or pattern
    dumps: list[Dump] = []
    for side, place in zip("ab", places, strict=True):
        dump = opened[place.root].of_job(arguments.pop(f"job_{side}") or job_id)
        dump = dump if place.graph is None else dump.where(graph=place.graph)
        dumps.append(dump.where(operator=pattern) if glob and pattern else dump)
    return dumps


def _choose_number(
    name: str, side: str, of_path: int | None, arguments: Mapping[str, Any]
) -> int | None:
    """Return the rank or iteration of a side; UsageError if a path contradicts an option."""
    given: int | None = arguments[f"{name}_{side}"]
    common: int | IterationSelection | None = arguments[name]
    if of_path is None:
        return given
    wanted = common if given is None else given
    if not (
        wanted in (None, of_path) or (isinstance(wanted, IterationSelection) and of_path in wanted)
    ):
        raise click.UsageError(f"{side.upper()} is the folder of {name} {of_path} alone")
    return of_path


def check_html_page(page: Path) -> None:
    """Raise a UsageError before the comparison if the page could not be written after it."""
    try:
        import rankdump._analysis.compare.html_page  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise click.UsageError(
            f"--html needs bokeh, pip install 'rankdump[report]': {error}"
        ) from None
    if not page.absolute().parent.is_dir():
        raise click.UsageError(f"--html {page}: its folder does not exist")


def print_report_json(report: ComparisonReport) -> None:
    """Print a report as one JSON object."""
    sys.stdout.writelines(report_json.serialize_report(report))


def print_report(report: ComparisonReport, *, everything: bool, limit: int | None) -> None:
    """Print a report: origins, kinds of tensors, counts, the selected rows, then
    remarks and notes.
    """
    most = (None if everything else _DEFAULT_ROWS) if limit is None else limit or None
    rows = select_excerpt(report, most, everything=everything)
    kinds = format_kinds(report.rows, format_scope_name)
    alone = report_text.format_rank_origins(report)
    causes = report_text.list_card_differences(report)
    parts = (causes, report_text.format_origins(report), kinds, alone, format_report_totals(report))
    print_lines([line for part in parts for line in (*part, "") if part][:-1])
    if rows:
        print_lines([""])
        print_table(format_rows(rows, report, width=measure_width()))
    left = len(select_excerpt(report, None, everything=everything)) - len(rows)
    more = f"... {format_count(left, 'more row')}: --limit 0 lists all that differ, --all every one"
    print_lines([more] if left else [])
    remarks = [
        *format_extra_measures(rows),
        *format_remarks(rows, everything=everything),
        *format_unmatched(report, everything=everything),
        *report.notes,
    ]
    print_lines(["", *remarks] if remarks else [])


def write_report_files(
    report: ComparisonReport, tables: Path | None, page: Path | None
) -> list[str]:
    """Write the requested tables and the page; return one sentence for each kind of file."""
    sentences: list[str] = []
    if tables is not None:
        steps = build_api_tables(report).items()
        files = [
            path for step, of_step in steps for path in write_api_tables(of_step, tables, step)
        ]
        sentences.append(f"{format_count(len(files), 'table')} written to {tables}")
    if page is not None:
        from rankdump._analysis.compare import html_page

        try:
            page.write_text(html_page.render_page(report, format_scope_name), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{page}: cannot be written: {error.strerror}") from None
        sentences.append(f"{page} written")
    return sentences
