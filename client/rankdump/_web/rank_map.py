"""Map of ranks and iterations: the extreme of a statistic in each, as a picture and as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.plot.chart_data import choose_scale
from rankdump._analysis.plot.tensor_slice import MAX_CELLS, join_cells
from rankdump._analysis.table.table_schema import NONFINITE, STATISTIC_COLUMNS
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import PageKind
from rankdump._web.page_parameters import PageParameters
from rankdump._web.png_image import EMPTY_INDEX, color_cells, encode_png

_OF_ITERATIONS = {"dropped": "dropped", "stall": "stall_us / 1e3", "stored": "stored + linked"}
"""Statistics of a rank's iteration itself; the stall is in milliseconds."""
NONFINITE_COUNT = "nonfinite"
STATISTICS = (NONFINITE_COUNT, *STATISTIC_COLUMNS.values(), *_OF_ITERATIONS)
_MAX_TABLE_RANKS, _MAX_TABLE_ITERATIONS = 32, 24
_MAX_PLACES = 4096
"""Ranks, and iterations, that a page names so that a click on the picture leads on."""


class RankMapRequest(NamedTuple):
    """Which statistic, and the part of the numbers that is listed."""

    statistic: str
    search: str
    """Part of the names of the operators."""
    first_rank: int
    first_iteration: int


@dataclass(frozen=True, slots=True)
class RankValues:
    """A statistic in each iteration of each rank."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    values: npt.NDArray[np.float64]
    """Ranks by iterations; NaN also where there is nothing."""
    is_there: npt.NDArray[np.bool_]


class RankLine(NamedTuple):
    """Numbers of one rank."""

    rank: int
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RankMapPage:
    """Content of the page."""

    request: RankMapRequest
    statistics: tuple[str, ...]
    rank_count: int
    iteration_count: int
    low: float | None
    high: float | None
    is_log: bool
    ranks: tuple[int, ...]
    """Rows of the picture; empty where they are too many for a page."""
    all_iterations: tuple[int, ...]
    """Columns of the picture; empty where they are too many for a page."""
    columns: tuple[int, ...]
    """Iterations of the listed numbers."""
    lines: tuple[RankLine, ...]
    next_rank: int | None
    next_iteration: int | None
    previous_iteration: int | None


def parse_rank_map(parameters: PageParameters) -> RankMapRequest:
    """Return the request."""
    return RankMapRequest(
        statistic=parameters.read_choice("statistic", STATISTICS, "l2norm"),
        search=parameters.read_text("search", longest=1024),
        first_rank=parameters.read_number("first_rank", 0) or 0,
        first_iteration=parameters.read_number("first_iteration", 0) or 0,
    )


def build_rank_map(source: DumpSource, request: RankMapRequest) -> RankMapPage:
    """Return the numbers of a part of the map, and what the picture shows."""
    found = read_values(source, request)
    finite = found.values[np.isfinite(found.values)]
    ranks = [rank for rank in found.ranks if rank >= request.first_rank]
    shown = ranks[:_MAX_TABLE_RANKS]
    later = [at for at in found.iterations if at >= request.first_iteration]
    earlier = [at for at in found.iterations if at < request.first_iteration]
    columns = later[:_MAX_TABLE_ITERATIONS]
    return RankMapPage(
        request=request,
        statistics=STATISTICS,
        rank_count=len(found.ranks),
        iteration_count=len(found.iterations),
        low=float(finite.min()) if finite.size else None,
        high=float(finite.max()) if finite.size else None,
        is_log=choose_scale(found.values).name != "linear",
        ranks=found.ranks if len(found.ranks) <= _MAX_PLACES else (),
        all_iterations=found.iterations if len(found.iterations) <= _MAX_PLACES else (),
        columns=tuple(columns),
        lines=tuple(RankLine(rank, _list_values(found, rank, columns)) for rank in shown),
        next_rank=ranks[_MAX_TABLE_RANKS] if len(ranks) > _MAX_TABLE_RANKS else None,
        next_iteration=later[_MAX_TABLE_ITERATIONS] if len(later) > len(columns) else None,
        previous_iteration=earlier[-_MAX_TABLE_ITERATIONS:][0] if earlier else None,
    )


def _list_values(found: RankValues, rank: int, columns: list[int]) -> tuple[float | None, ...]:
    row = found.ranks.index(rank)
    places = [found.iterations.index(at) for at in columns]
    return tuple(float(found.values[row, at]) if found.is_there[row, at] else None for at in places)


def draw_rank_map(source: DumpSource, request: RankMapRequest) -> bytes:
    """Return the map as PNG: a row for each rank, a column for each iteration."""
    found = read_values(source, request)
    rows, columns = (-(-count // MAX_CELLS) or 1 for count in found.values.shape)
    cells = join_cells(np.where(found.is_there, found.values, 0.0), rows, columns)
    is_there = join_cells(found.is_there.astype(np.int64), rows, columns) > 0
    colors = color_cells(cells, is_log=choose_scale(found.values).name != "linear")
    return encode_png(np.where(is_there, colors, EMPTY_INDEX).astype(np.uint8))


def read_values(source: DumpSource, request: RankMapRequest) -> RankValues:
    """Return the extreme of each rank and iteration."""
    asked = request.statistic, request.search
    return source.keep_latest("rank map", asked, lambda: _read_values(source, *asked))


def _read_values(source: DumpSource, statistic: str, search: str) -> RankValues:
    values: list[object] = []
    if statistic in _OF_ITERATIONS:
        measure = f"sum({_OF_ITERATIONS[statistic]})"
        view, condition = "iterations", "true"
    else:
        view, condition = "tensors", "iteration IS NOT NULL"
        measure = f"arg_max({statistic}, abs({statistic}))"
        if statistic == NONFINITE_COUNT:
            measure = f"count(*) FILTER (WHERE {NONFINITE})"
        if search:
            condition += " AND contains(lower(CAST(name AS VARCHAR)), lower(?))"
            values.append(search)
    rows = source.read_table(
        f"SELECT rank, iteration, CAST({measure} AS DOUBLE) AS value FROM {view} "
        f"WHERE {condition} GROUP BY rank, iteration HAVING value IS NOT NULL",
        values,
    )
    columns = [rows.column(name).to_numpy() for name in ("rank", "iteration")]
    (ranks, row_of), (iterations, column_of) = (
        np.unique(column, return_inverse=True) for column in columns
    )
    cells = np.full((len(ranks), len(iterations)), np.nan)
    is_there = np.zeros(cells.shape, np.bool_)
    cells[row_of, column_of] = rows.column("value").to_numpy()
    is_there[row_of, column_of] = True
    return RankValues(tuple(ranks.tolist()), tuple(iterations.tolist()), cells, is_there)


RANK_MAP = PageKind(
    "/ranks", "ranks.html", "Ranks", parse_rank_map, build_rank_map, has_attempts=True
)
