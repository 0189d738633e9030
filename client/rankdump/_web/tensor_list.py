"""List of tensors in execution order, page by page. The next page begins after the last row of the
present one, so any page is as fast as the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._web.dump_source import EXECUTION_ORDER, DumpSource, TensorRow, match_rows, read_rows
from rankdump._web.page_kinds import PageKind, PageParameters, ParameterError

PAGE_ROWS = 100
_CONSTANT = (1 << 63) - 1
"""Number that stands for the iteration of constants, which come last."""
_PLACE = re.compile(r"([0-9]{1,19})-([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})")
_KEY = f"(coalesce(iteration, {_CONSTANT}), rank, attempt, position)"


class RowPlace(NamedTuple):
    """Place of a row in the order of all rows."""

    iteration: int
    rank: int
    attempt: int
    position: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


class TensorListRequest(NamedTuple):
    """Which tensors are listed."""

    search: str
    """Part of the operator's name, in upper or lower case."""
    rank: int | None
    iteration: int | None
    side: str
    nonfinite: bool
    after: RowPlace | None


@dataclass(frozen=True, slots=True)
class TensorListPage:
    """Content of the page."""

    request: TensorListRequest
    rows: tuple[TensorRow, ...]
    total: int
    """Number of matching rows on all pages."""
    next_after: str
    """Parameter `after` for the next page; empty on the last page."""


def parse_tensor_list(parameters: PageParameters) -> TensorListRequest:
    """Return the request that the parameters describe."""
    return TensorListRequest(
        search=parameters.read_text("search", longest=1024),
        rank=parameters.read_number("rank"),
        iteration=parameters.read_number("iteration"),
        side=parameters.read_choice("side", ("input", "output"), ""),
        nonfinite=parameters.read_flag("nonfinite"),
        after=_parse_place(parameters.read_text("after", longest=64)),
    )


def _parse_place(text: str) -> RowPlace | None:
    if not text:
        return None
    found = _PLACE.fullmatch(text)
    place = RowPlace(*map(int, found.groups())) if found else None
    if place is None or place.iteration > _CONSTANT:
        raise ParameterError("after", text, "iteration-rank-attempt-position of a row")
    return place


def build_tensor_list(source: DumpSource, request: TensorListRequest) -> TensorListPage:
    """Return the rows of one page."""
    conditions, values = _make_conditions(request)
    matching = " AND ".join(conditions)
    total = source.get_rows(f"SELECT count(*) AS n FROM tensors WHERE {matching}", values)[0]["n"]
    if request.after is not None:
        after = request.after
        # The first comparison lets DuckDB skip whole groups of rows.
        matching += f" AND coalesce(iteration, {_CONSTANT}) >= ? AND {_KEY} > (?, ?, ?, ?)"
        values = [*values, after.iteration, *after]
    rest = f"{matching} ORDER BY {EXECUTION_ORDER} LIMIT {PAGE_ROWS + 1}"
    found = read_rows(source, rest, values)
    rows, is_last = found[:PAGE_ROWS], len(found) <= PAGE_ROWS
    return TensorListPage(request, rows, total, "" if is_last else _place_of(rows[-1]))


def _make_conditions(request: TensorListRequest) -> tuple[list[str], Sequence[object]]:
    conditions, values = match_rows(
        search=request.search, rank=request.rank, iteration=request.iteration
    )
    if request.side:
        conditions.append("CAST(side AS VARCHAR) = ?")
        values.append(request.side)
    if request.nonfinite:
        conditions.append(f"({NONFINITE})")
    return conditions, values


def _place_of(row: TensorRow) -> str:
    iteration = _CONSTANT if row.iteration is None else row.iteration
    return str(RowPlace(iteration, row.rank, row.attempt, row.position))


TENSOR_LIST = PageKind(
    "/tensors", "tensors.html", "Tensors", parse_tensor_list, build_tensor_list, has_attempts=True
)
