"""Page with a box for SQL over the views of the tree, and with statements to begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import PageKind, PageParameters, make_body
from rankdump._web.query_process import QueryAnswer
from rankdump.errors import ExhaustedError, QueryError

_MAX_SQL = 4096
_MAX_CELL = 300
_MAX_PAGE_CHARACTERS = 150_000
_MAX_PLOT_COLUMNS = 8


class QueryRecipe(NamedTuple):
    """A statement to begin with."""

    title: str
    sql: str


RECIPES = (
    QueryRecipe(
        "Gradient norms over iterations",
        "SELECT iteration, max(l2norm) AS norm\nFROM tensors\n"
        "WHERE name LIKE 'Gradients/%'\nGROUP BY iteration ORDER BY iteration",
    ),
    QueryRecipe(
        "Tensors that are not finite",
        "SELECT iteration, rank, name, side, slot, nan_count\nFROM tensors\n"
        "WHERE nan_count > 0 OR NOT isfinite(max) OR NOT isfinite(min)\n"
        "ORDER BY iteration, rank, position LIMIT 50",
    ),
    QueryRecipe(
        "The rank that differs most",
        "SELECT rank, max(difference) AS difference, arg_max(name, difference) AS name\n"
        "FROM (\n  SELECT rank, name, abs(l2norm - middle) / nullif(middle, 0) AS difference\n"
        "  FROM (SELECT *, median(l2norm) OVER (PARTITION BY iteration, name, side, slot) "
        "AS middle\n        FROM tensors WHERE isfinite(l2norm))\n)\n"
        "GROUP BY rank ORDER BY difference DESC",
    ),
    QueryRecipe(
        "Operators that took longest",
        "SELECT name, count(*) AS calls, sum(end_us - start_us) / 1000 AS ms\nFROM events\n"
        "GROUP BY name ORDER BY ms DESC LIMIT 10",
    ),
    QueryRecipe(
        "Largest tensors",
        "SELECT name, side, slot, dtype, any_value(shape) AS shape, max(bytes) AS bytes\n"
        "FROM tensors\nGROUP BY ALL ORDER BY bytes DESC LIMIT 10",
    ),
    QueryRecipe(
        "Dropped tensors by reason",
        "SELECT d.key AS reason, sum(d.value) AS tensors\n"
        "FROM (SELECT unnest(map_entries(dropped_by)) AS d FROM iterations)\n"
        "GROUP BY reason ORDER BY tensors DESC",
    ),
)


class QueryRequest(NamedTuple):
    """The statement of a request."""

    sql: str
    """The statement; empty to show only the box."""


@dataclass(frozen=True, slots=True)
class QueryPage:
    """Content of the page."""

    request: QueryRequest
    recipes: tuple[QueryRecipe, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    row_count: int
    is_number: tuple[bool, ...]
    """Whether each column contains numbers."""
    has_plot: bool
    """Whether the first column and at least one other contain numbers, so that they can
    be plotted.
    """
    error: str
    """Why there are no rows; empty if there is no error."""


def parse_query(parameters: PageParameters) -> QueryRequest:
    """Return the request that the parameters describe."""
    return QueryRequest(parameters.read_text("sql", longest=_MAX_SQL).strip())


def make_query_page(run: Callable[[Path, str], QueryAnswer]) -> PageKind[QueryRequest]:
    """Return the page; `run` returns the rows of a statement over a tree."""

    def build_query(source: DumpSource, request: QueryRequest) -> QueryPage:
        if not request.sql:
            return _make_page(request, QueryAnswer((), (), 0))
        try:
            found = source.keep(("query", request.sql), lambda: run(source.root, request.sql))
        except (QueryError, ExhaustedError) as error:
            return _make_page(request, QueryAnswer((), (), 0), str(error))
        return _make_page(request, found)

    return PageKind("/query", "query.html", "Query", parse_query, build_query)


def _make_page(request: QueryRequest, found: QueryAnswer, error: str = "") -> QueryPage:
    rows: list[tuple[Any, ...]] = []
    left = _MAX_PAGE_CHARACTERS
    for row in found.rows:
        cells = tuple(map(_make_cell, row))
        left -= sum(len(str(cell)) + 10 for cell in cells)
        if left < 0:
            break
        rows.append(cells)
    is_number = tuple(
        bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(found.columns))
    )
    has_plot = (
        len(rows) > 1
        and 1 < len(is_number) <= _MAX_PLOT_COLUMNS
        and sum(is_number) > 1
        and is_number[0]
    )
    return QueryPage(
        *(request, RECIPES, found.columns, tuple(rows), found.row_count, is_number, has_plot), error
    )


def _make_cell(value: Any) -> Any:
    if isinstance(value, float):
        return value
    plain: object = make_body(value)
    if isinstance(plain, int | float | None):
        return plain
    text = str(plain)
    return f"{text[:_MAX_CELL]}..." if len(text) > _MAX_CELL else text


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or is_plain
