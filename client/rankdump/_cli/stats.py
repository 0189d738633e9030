"""Command `rankdump stats`: shows statistics of the tensors of a tree, and the first cause of
tensors that are not finite, with its consequences.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump import reader
from rankdump._analysis.reader.debug_log_tree import DEBUG_MODE
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.table_rows import iterate_named
from rankdump._analysis.reader.tensor_statistics import Survey, Surveyed
from rankdump._analysis.reader.tree import Tree
from rankdump._analysis.reader.tree_status import count_tree_drops, describe_tree_drops
from rankdump._cli.options import DUMP_PATH, FILTER_HINT, add_query_options
from rankdump._cli.output import (
    TableColumn,
    number_columns,
    print_json,
    print_lines,
    print_rows,
    to_json_value,
    without_attempts,
)
from rankdump._cli.tree_contents import (
    describe_jobs,
    describe_key,
    explain_no_match,
    format_operator,
    format_place,
    name_tables,
    read_tree,
)
from rankdump._core.record import format_slot, name_argument
from rankdump._core.scope_names import format_scope_name
from rankdump._core.statistics import format_statistic_number
from rankdump._core.units import format_count

if TYPE_CHECKING:
    from rankdump._analysis.compare.report import DivergenceOrigin

_DEFAULT_TENSORS = 100
_DEFAULT_CONSEQUENCES = 20
_MAX_CAUSES = 5
_MORE_SENTENCE = f"... and more: {FILTER_HINT}; --limit 0 shows all"
_STATISTIC_COLUMNS = number_columns("min", "max", "mean", "l2norm", "nan", "inf")
_L1NORM_COLUMN = number_columns("l1norm")
"""Column that replaces the others for a dump that has only the L1 norm."""
_COLUMNS = (TableColumn("operator", is_flexible=True), TableColumn("tensor"), TableColumn("dtype"))
_SORTED_COLUMNS = (*number_columns("rank", "attempt", "iteration"), *_COLUMNS[:2])
_SORT_KEYS: dict[str, Callable[[Surveyed], float | None]] = {
    "min": lambda row: None if row.minimum is None else -row.minimum,
    "max": lambda row: row.maximum,
    "mean": lambda row: row.mean,
    "l2norm": lambda row: row.l2norm,
    "l1norm": lambda row: row.l1norm,
    "nan": lambda row: row.nans,
    "inf": lambda row: row.infinities,
}
"""Sort keys, largest first; the minimum is negated, because its lowest value comes first."""


@dataclass(slots=True)
class _SurveyCounts:
    """Counts of the rows that were iterated so far."""

    rows_from_tables: int = 0
    rows_computed: int = 0
    sample_rows: int = 0
    """Number of rows whose tensors have only their first elements in the tree."""
    undecided_rows: int = 0
    """Number of rows whose statistics do not show whether the tensor is finite."""
    nonfinite_rows: int = 0
    first_nonfinite: Surveyed | None = None
    """The first tensor, in execution order, that is not finite."""
    first_iteration: int | None = None
    """First iteration with a tensor that is not finite; None when only constants are not."""
    damages: list[str] = field(default_factory=list[str])

    @property
    def count(self) -> int:
        """Number of all tensors."""
        return self.rows_from_tables + self.rows_computed

    def count_rows(self, survey: Survey) -> Iterator[Surveyed]:
        """Yield the rows unchanged while counting them, and count the rows that the survey leaves
        out.
        """
        for row in survey:
            self.rows_from_tables += not row.computed
            self.rows_computed += row.computed
            self.sample_rows += row.is_sample
            self.undecided_rows += row.finite is None and not (row.damage or row.is_sample)
            if row.damage:
                self.damages.append(row.damage)
            if row.finite is False:
                self.nonfinite_rows += 1
                if not row.key.constant:
                    known = self.first_iteration
                    at = row.key.iteration
                    self.first_iteration = at if known is None else min(known, at)
                earliest = self.first_nonfinite or row
                self.first_nonfinite = min(earliest, row, key=_execution_sort_key)
            yield row
        self.rows_from_tables += survey.skipped_rows


@click.command()
@click.argument("tree", type=DUMP_PATH, default=".")
@add_query_options
@click.option("--nonfinite", is_flag=True, help="Only tensors with NaN or infinities.")
@click.option(
    "--sort",
    "by",
    type=click.Choice(["order", *_SORT_KEYS]),
    default="order",
    help="Sort in execution order, or by a statistic: NaN first, then the most extreme values.",
)
@click.option(
    "--limit", type=click.IntRange(min=0), help="Maximum number of tensors shown; 0 shows all."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def stats(
    *,
    tree: Path,
    query: Query,
    job_id: str,
    attempt: int | None,
    nonfinite: bool,
    by: str,
    limit: int | None,
    as_json: bool,
) -> int:
    """Show statistics of the tensors of a tree.

    Statistics are read from a table where there is one, and computed from the tensors otherwise.
    With --nonfinite, the origin of NaN and infinities comes first: the first operator whose inputs
    are finite and whose output is not, with rank, iteration and source line. The other tensors that
    are not finite follow in execution order. Exit code 1 when something is damaged or there is no
    tree, but not for NaN and infinities.
    """
    found = read_tree(tree, query, job_id, attempt)
    survey = Survey(found, query, decide=nonfinite, skip_finite=nonfinite)
    seen = _SurveyCounts()
    rows = (row for row in seen.count_rows(survey) if row.finite is False or not nonfinite)
    every = limit == 0 or (limit is None and as_json)
    # One more than the limit, to find out whether there are more.
    shown = None if every else (limit or _DEFAULT_TENSORS) + 1
    ordered = rows if by == "order" else _sort_rows(rows, by, shown)
    if as_json:
        listed = [_row_as_json(row, found) for row in islice(ordered, limit or None)]
        deque(ordered, maxlen=0)  # counts the rows that are not listed
        totals = _totals_as_json(found, survey, seen)
        cause = _find_cause(found, query, seen) if nonfinite else None
        print_json(totals | _cause_as_json(cause) | {"tensors": listed})
    elif nonfinite:
        _print_nonfinite(found, ordered, seen, limit, query, by=by)
        print_lines(_format_sentences(found, seen, whole=True))
        print_lines([*seen.damages, *survey.problems, *found.problems], err=True)
    else:
        _print_tables(found, ordered, _DEFAULT_TENSORS if limit is None else limit or None, by=by)
        passed = replace(seen)  # the next line reads one more row
        cut = next(ordered, None) is not None
        whole = not cut or by != "order"
        counts = seen if whole else passed
        print_lines(
            [*_format_sentences(found, counts, whole=whole), *([_MORE_SENTENCE] if cut else [])]
        )
        print_lines([*seen.damages, *survey.problems, *found.problems], err=True)
    return 1 if seen.damages or survey.problems or found.problems else 0


def _sort_rows(rows: Iterator[Surveyed], by: str, limit: int | None) -> Iterator[Surveyed]:
    """Return the most extreme rows, of which only `limit` are in memory; all without a limit."""
    key = partial(_extreme_sort_key, by=by)
    return iter(sorted(rows, key=key) if limit is None else heapq.nsmallest(limit, rows, key))


def _extreme_sort_key(row: Surveyed, by: str) -> tuple[bool, bool, float]:
    value = _SORT_KEYS[by](row)
    if value is None or math.isnan(value):
        return value is None, value is None, 0.0
    return False, True, -value


def _find_cause(tree: Tree, query: Query, seen: _SurveyCounts) -> DivergenceOrigin | None:
    """Return where NaN or infinity starts among the selected tensors; None if all are finite."""
    if seen.first_iteration is None:
        return None
    # Imported on use, because importing a comparison takes longer than reading a small tree.
    from rankdump._analysis.compare.origin_search import find_first_cause

    dump = reader.open(tree.root).of_job(tree.job_id).matching(query)
    dump = dump.where(iteration=seen.first_iteration)
    if tree.attempt is not None:
        dump = dump.where(attempt=tree.attempt)
    return find_first_cause(dump)


def _print_nonfinite(
    tree: Tree,
    rows: Iterator[Surveyed],
    seen: _SurveyCounts,
    limit: int | None,
    query: Query,
    *,
    by: str,
) -> None:
    """Print the first cause, then the first tensors that are not finite, and how many more there
    are.
    """
    most = _DEFAULT_CONSEQUENCES if limit is None else limit
    if by != "order":
        shown = list(islice(rows, most or None))
        deque(rows, maxlen=0)  # counts the remaining rows
    elif most:
        shown = heapq.nsmallest(most, rows, key=_execution_sort_key)
    else:
        shown = sorted(rows, key=_execution_sort_key)
    if not shown:
        return
    cause = _find_cause(tree, query, seen)
    if cause is not None:
        print_lines([*_format_cause(cause), ""])
    _print_sorted(tree, shown)
    left = seen.nonfinite_rows - len(shown)
    more = f"... {format_count(left, 'more tensor')} not finite: --limit 0 lists all"
    print_lines([*([more] if left else []), ""])


def _format_cause(cause: DivergenceOrigin) -> list[str]:
    from rankdump._analysis.compare import report_text

    suspects = cause.suspects[:_MAX_CAUSES]
    starts = "NaN or infinity starts at" if cause.certain else "NaN or infinity may start at"
    lines: list[str] = []
    for each in suspects:
        lines += [
            f"{starts} {format_scope_name(each.name_a)}",
            f"  {report_text.format_ranks_and_moment(each, [each.rank])}",
            f"  {each.reason}",
        ]
        line = report_text.format_innermost_line(each.source)
        lines += [f"  {line}"] if line else []
    left = len(cause.suspects) - len(suspects)
    lines += [f"... and {format_count(left, 'more candidate')}"] if left else []
    return [*lines, *([f"  not certain: {cause.ambiguity}"] if cause.ambiguity else [])]


def _cause_as_json(cause: DivergenceOrigin | None) -> dict[str, object]:
    if cause is None:
        return {"first_cause": None}
    suspects = [
        {
            "rank": each.rank,
            "iteration": each.iteration,
            "op_type": each.op_type,
            "op_name": each.name_a,
            "backward": each.backward,
            "reason": each.reason,
            "source": [
                {"file": line.file, "line": line.line, "code": line.code} for line in each.source
            ],
        }
        for each in cause.suspects
    ]
    return {"first_cause": {"certain": cause.certain, "why": cause.ambiguity, "suspects": suspects}}


def _execution_sort_key(row: Surveyed) -> tuple[int, int, int]:
    return row.key.iteration, row.key.timestamp_us, row.key.rank


def _print_tables(tree: Tree, rows: Iterator[Surveyed], limit: int | None, *, by: str) -> None:
    """Print tables, each followed by a blank line; only one group of the tree is in memory at a
    time.
    """
    if by != "order":
        shown = list(islice(rows, limit))
        if shown:
            _print_sorted(tree, shown)
            print_lines([""])
        return
    columns = (*_COLUMNS, *_select_columns(tree))
    places = groupby(islice(rows, limit), key=lambda row: format_place(row.key, tree))
    for where, group in places:
        print_lines([where])
        print_rows(columns, [_row_cells(row, tree) for row in group])
        print_lines([""])


def _print_sorted(tree: Tree, rows: Iterable[Surveyed]) -> None:
    """Print one table of tensors, each with its place."""
    columns = (*_SORTED_COLUMNS, *_select_columns(tree))
    cells = [_sorted_cells(row, tree) for row in rows]
    print_rows(*without_attempts(columns, cells, tree.attempts))


def _select_columns(tree: Tree) -> tuple[TableColumn, ...]:
    return _L1NORM_COLUMN if tree.tool == DEBUG_MODE else _STATISTIC_COLUMNS


def _row_cells(row: Surveyed, tree: Tree) -> list[str]:
    tensor = f"{row.key.side.value} {format_slot(row.key)} {name_argument(row.argument)}"
    return [
        format_operator(row.op_type, row.op_name, row.argument),
        tensor.rstrip(),
        row.dtype or "damaged",
        *_statistic_cells(row, tree),
    ]


def _sorted_cells(row: Surveyed, tree: Tree) -> list[str]:
    when = "-" if row.key.constant else str(row.key.iteration)
    attempt = str(tree.find_attempt(row.key))
    named = _row_cells(row, tree)[:2]
    return [str(row.key.rank), attempt, when, *named, *_statistic_cells(row, tree)]


def _statistic_cells(row: Surveyed, tree: Tree) -> list[str]:
    if tree.tool == DEBUG_MODE:
        return ["-" if row.l1norm is None else format_statistic_number(row.l1norm)]
    values = (row.minimum, row.maximum, row.mean, row.l2norm)
    counts = (row.nans, row.infinities)
    return [
        *("-" if value is None else format_statistic_number(value) for value in values),
        *("-" if count is None else str(count) for count in counts),
    ]


def _format_sentences(tree: Tree, seen: _SurveyCounts, *, whole: bool) -> list[str]:
    if not seen.count:
        whole_tree = read_tree(tree.root, job_id=tree.job_id, attempt=tree.attempt)
        if not (whole_tree.entries or whole_tree.tables):
            return [f"{tree.root}: no tensors"]
        return [explain_no_match(iterate_named(whole_tree, lambda tensor: True))]
    source = f"from {name_tables(tree)}s"
    sources = (seen.rows_from_tables, source), (seen.rows_computed, "computed from the tensors")
    counts_by_source = ", ".join(f"{count:,} {source}" for count, source in sources if count)
    lines = [f"{tree.root}: statistics of {format_count(seen.count, 'tensor')}: {counts_by_source}"]
    if seen.first_nonfinite is not None and whole:
        lines.append(
            f"{format_count(seen.nonfinite_rows, 'tensor')} not finite; "
            f"{_describe_first_nonfinite(seen.first_nonfinite, tree)}"
        )
    elif whole and not (seen.undecided_rows or seen.sample_rows or seen.damages):
        lost = count_tree_drops(tree)
        lines.append("all of them are finite")
        if lost:
            lines[-1] += f", but {format_count(lost, 'tensor')} of the plan are not in the tree:"
            lines += describe_tree_drops(tree)
    if seen.sample_rows:
        lines.append(
            f"of {format_count(seen.sample_rows, 'tensor')} the tree has the first elements only, "
            "and their statistics are not those of the whole tensor"
        )
    if seen.undecided_rows:
        lines.append(
            f"{format_count(seen.undecided_rows, 'tensor')} may not be finite: "
            "the table has no column that decides it"
        )
    return lines + describe_jobs(tree)


def _describe_first_nonfinite(row: Surveyed, tree: Tree) -> str:
    when = "constant" if row.key.constant else f"iteration {row.key.iteration}"
    attempt = f", attempt {tree.find_attempt(row.key)}" if any(tree.attempts) else ""
    counts = ((row.nans, "NaN"), (row.infinities, "infinite"))
    parts = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    return (
        f"first non-finite: rank {row.key.rank}{attempt}, {when}, {row.key.side.value} "
        f"{format_slot(row.key)} of {row.op_name}" + (f" ({parts})" if parts else "")
    )


def _totals_as_json(tree: Tree, survey: Survey, seen: _SurveyCounts) -> dict[str, object]:
    first = seen.first_nonfinite
    return {
        "root": str(tree.root),
        "tensor_count": seen.count,
        "nonfinite_count": seen.nonfinite_rows,
        "undecided_count": seen.undecided_rows,
        "first_nonfinite": None if first is None else _row_as_json(first, tree),
        "problems": [*seen.damages, *survey.problems, *tree.problems],
    }


def _row_as_json(row: Surveyed, tree: Tree) -> dict[str, object]:
    values = {
        "max": row.maximum,
        "min": row.minimum,
        "mean": row.mean,
        "l2norm": row.l2norm,
        "nan_count": row.nans,
        "inf_count": row.infinities,
    }
    return {
        "path": row.path,
        **describe_key(row, tree),
        "dtype": row.dtype,
        "shape": row.shape,
        "source": "tensor" if row.computed else "statistic.csv",
        "finite": row.finite,
        **({"first_elements_only": True} if row.is_sample else {}),
        **({} if row.l1norm is None else {"l1norm": to_json_value(row.l1norm)}),
        **{name: to_json_value(value) for name, value in values.items()},
        "damage": row.damage,
    }
