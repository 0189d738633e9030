"""Rows of the tensors that a chart shows, from the same views as `rankdump query`: the table of
statistics if the tree has one, else the tensors of the tree. Filters are part of the SQL; only
names of operators are matched here, each name once. Needs pyarrow and DuckDB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rankdump._analysis.reader.dump import Dump, open_dump
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.table_views import find_views
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.table_query import TENSORS, TableViews, run_query
from rankdump._analysis.table.table_schema import STATISTIC_COLUMNS
from rankdump._core.number_ranges import ranges
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError

STATISTICS = tuple(STATISTIC_COLUMNS.values())
"""Statistics that a chart can show."""
_CHOSEN = "chosen_operators"
_CHOSEN_SCHEMA = pa.schema([("name", pa.string()), ("op_type", pa.string())])
_ALL = Query()
_TEXTS = ("job", "name", "op_type", "side", "argument")
_NUMBERS = ("attempt", "rank", "iteration", "slot", "position")
_MAX_NAMES = 3
_MAX_RANGES_LENGTH = 40


@dataclass(frozen=True, slots=True)
class ChartSelection:
    """Selection of the tensors that a chart shows."""

    query: Query = _ALL
    job_id: str = ""
    attempt: int | None = None
    slot: int | None = None


class ChartRefusal(NamedTuple):
    """Reason why there is no chart, as one sentence."""

    reason: str


class TensorOverview(NamedTuple):
    """Overview of the tensors in some rows."""

    tensors: int
    attempts: list[int]
    ranks: list[int]
    iterations: list[int]
    operators: int
    names: list[str]
    """Names of the first operators, in alphabetical order."""

    def describe(self, spell: Callable[[str], str]) -> str:
        """Return a part of a sentence that says where the tensors are and which operators they
        belong to.
        """
        names = [*map(spell, self.names), *(["..."] if self.operators > len(self.names) else [])]
        attempt = f"attempt {format_numbers(self.attempts)}, " if any(self.attempts) else ""
        return (
            f"{attempt}rank {format_numbers(self.ranks)}, "
            f"iteration {format_numbers(self.iterations)}, "
            f"{format_count(self.operators, 'operator')}: {', '.join(names)}"
        )


class ChartRows:
    """Runs SQL over the selected tensors of a tree."""

    def __init__(self, root: Path, selection: ChartSelection) -> None:
        self.root, self.selection = root, selection
        self._dump, self._views = _find_views(root, selection)
        self._join = ""
        query = selection.query
        if query.glob is not None or query.pattern is not None:
            chosen = self._choose_operators()
            self._views = TableViews(
                self._views.files, {**self._views.made, _CHOSEN: lambda: chosen}
            )
            self._join = f"SEMI JOIN {_CHOSEN} USING (name, op_type)"

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each part of the tree that could not be read so far."""
        return self._dump.walked_problems

    def run(self, sql: str, *, columns: str = "") -> pa.Table:
        """Return the rows of a SELECT over `selected`.

        `selected` has the columns that identify a row's tensor and its place, and the expressions
        `columns` over the view `tensors`. QueryError and ExhaustedError as in `run_query`.
        """
        selected = f"SELECT * FROM ({_select(self.selection, columns)}) {self._join}"
        return run_query(f"WITH selected AS ({selected}) {sql}", self._views)

    def survey_tensors(self) -> TensorOverview:
        """Return an overview of the selected tensors."""
        return TensorOverview(**self.run(f"SELECT {_OVERVIEW} FROM selected").to_pylist()[0])

    def explain_no_match(self, spell: Callable[[str], str]) -> str:
        """Return why no tensor is selected, with what the tree has instead.

        CorruptedError if the tree does not have the selected attempt, as for a tree without a
        table.
        """
        everything = ChartSelection()
        sql = f"WITH selected AS ({_select(everything, '')}) SELECT {_OVERVIEW} FROM selected"
        _, views = _find_views(self.root, everything)
        there = TensorOverview(**run_query(sql, views).to_pylist()[0])
        if not there.tensors:
            return f"{self.root}: no tensor is in the tree"
        if self.selection.attempt not in (None, *there.attempts):
            known = format_numbers(there.attempts)
            raise CorruptedError(
                f"{self.root}: the tree has no attempt {self.selection.attempt}; known: {known}"
            )
        return f"{self.root}: no tensor matches; the tree has {there.describe(spell)}"

    def _choose_operators(self) -> pa.Table:
        """Return the operators whose names match the patterns."""
        sql = f"SELECT DISTINCT name, op_type FROM ({_select(self.selection, '')})"
        there = run_query(sql, self._views).to_pylist()
        query = self.selection.query
        kept = [row for row in there if query.keeps_operator(row["op_type"], row["name"])]
        return pa.Table.from_pylist(kept, _CHOSEN_SCHEMA)


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as ranges; if there are many ranges, as first, last and count."""
    listed = ranges(numbers)
    if len(listed) <= _MAX_RANGES_LENGTH:
        return listed or "-"
    return f"{min(numbers)} to {max(numbers)} ({len(set(numbers)):,} of them)"


_OVERVIEW = (
    "count(*) AS tensors, coalesce(list(DISTINCT attempt), []) AS attempts, "
    "coalesce(list(DISTINCT rank), []) AS ranks, "
    "coalesce(list(DISTINCT iteration) FILTER (iteration IS NOT NULL), []) AS iterations, "
    "count(DISTINCT name) AS operators, "
    f"coalesce(list_sort(list(DISTINCT name))[:{_MAX_NAMES}], []) AS names"
)


def _find_views(root: Path, selection: ChartSelection) -> tuple[Dump, TableViews]:
    """Return a tree and its views; for a tree without a table, the tensors are read once."""
    dump = open_dump(root).of_job(selection.job_id)
    if selection.attempt is not None:
        dump = dump.where(attempt=selection.attempt)
    views = find_views(
        root,
        get_tree=lambda: walk(root),
        make_table=dump.matching(selection.query).table,
        # The table has no column for graphs, so this filter needs the tensors of the tree.
        is_filtered=selection.query.graph is not None,
    )
    made = {name: cache(make) for name, make in views.made.items()}
    return dump, TableViews(views.files, made)


def _select(selection: ChartSelection, columns: str) -> str:
    """Return a SELECT for the rows whose place is selected, before names are matched."""
    texts = [f"coalesce(CAST({name} AS VARCHAR), '') AS {name}" for name in _TEXTS]
    listed = ", ".join([*texts, *_NUMBERS, *([columns] if columns else [])])
    return f"SELECT {listed} FROM {TENSORS} WHERE {_make_condition(selection)}"


def _make_condition(selection: ChartSelection) -> str:
    query = selection.query
    equal = {
        "rank": query.rank,
        "attempt": selection.attempt,
        "slot": selection.slot,
    }
    parts = [f"{name} = {value:d}" for name, value in equal.items() if value is not None]
    if query.side is not None:
        parts.append(f"CAST(side AS VARCHAR) = '{query.side.value}'")
    if selection.job_id:
        quoted = selection.job_id.replace("'", "''")
        parts.append(f"CAST(job AS VARCHAR) = '{quoted}'")
    if query.iterations is not None:
        spans = query.iterations.spans
        within = [f"iteration BETWEEN {low:d} AND {high:d}" for low, high in spans or ()]
        parts.append(f"({' OR '.join(within)})" if spans is not None else "iteration IS NOT NULL")
    return " AND ".join(parts) or "true"
