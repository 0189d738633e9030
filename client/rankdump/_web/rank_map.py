"""Map of ranks and iterations: for each, the extreme of a statistic, its duration, or how many
tensors differ from those of another rank or tree; as a picture and as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankdump._analysis.plot.chart_data import choose_scale
from rankdump._analysis.plot.tensor_slice import MAX_CELLS, join_cells
from rankdump._analysis.table.table_schema import NONFINITE, STATISTIC_COLUMNS
from rankdump._web.dump_source import DumpSource, match_rows, read_tree_stamp
from rankdump._web.page_kinds import PageKind, PageParameters, slice_page
from rankdump._web.png_image import EMPTY_INDEX, color_cells, encode_png
from rankdump._web.rank_values import (
    DifferenceRequest,
    RankValues,
    arrange_values,
    count_differences,
    read_times,
)

_OF_ITERATIONS = {"dropped": "dropped", "stall": "stall_us / 1e3", "stored": "stored + linked"}
"""Statistics of a rank's iteration as a whole, with their SQL; the stall is in milliseconds."""
NONFINITE_COUNT = "nonfinite"
TIME, DIFFERENCES = "time", "fingerprint_differences"
STATISTICS = (NONFINITE_COUNT, *STATISTIC_COLUMNS.values(), *_OF_ITERATIONS, TIME, DIFFERENCES)
_TENSOR_SETS = ("copies", "all")
_MAX_TABLE_RANKS, _MAX_TABLE_ITERATIONS = 32, 24
_MAX_RANK = (1 << 31) - 1
_MAX_PLACES = 4096
"""Largest number of ranks, and of iterations, that a page names, so that a click on the picture can
lead to one.
"""


class RankMapRequest(NamedTuple):
    """Which statistic the map shows, and which part of its numbers is listed."""

    statistic: str
    search: str
    """Part of the operators' names."""
    first_rank: int
    first_iteration: int
    base: int | None
    """Rank that others are compared with; None for the lowest one, or if another tree
    is compared.
    """
    against: int | None
    """Number of the tree that is compared with; None for the same tree."""
    tensors: str
    """`copies` for parameters and gradients only, `all` for all tensors; empty for the useful
    choice.
    """

    @property
    def only_copies(self) -> bool:
        """Whether only parameters and gradients are compared, which all ranks have in common."""
        return self.tensors == "copies" if self.tensors else self.against is None

    def get_values(self) -> dict[str, object]:
        """Return the parameters of the map, without those that select the listed numbers."""
        left = "first_rank", "first_iteration"
        return {name: value for name, value in self._asdict().items() if name not in left}


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
    """Ranks of the picture's rows; empty if there are too many for a page."""
    all_iterations: tuple[int, ...]
    """Iterations of the picture's columns; empty if there are too many for a page."""
    columns: tuple[int, ...]
    """Iterations of the listed numbers."""
    lines: tuple[RankLine, ...]
    next_rank: int | None
    next_iteration: int | None
    previous_iteration: int | None
    title: str
    note: str
    """What the numbers are, if the name of the statistic does not tell it."""
    trees: tuple[str, ...]
    base: int | None
    """Rank that others are compared with; None if there is none."""


def _parse_rank_map(parameters: PageParameters, trees: int) -> RankMapRequest:
    return RankMapRequest(
        statistic=parameters.read_choice("statistic", STATISTICS, "l2norm"),
        search=parameters.read_text("search", longest=1024),
        first_rank=parameters.read_number("first_rank") or 0,
        first_iteration=parameters.read_number("first_iteration") or 0,
        base=parameters.read_number("base", high=_MAX_RANK),
        against=parameters.read_number("against", high=max(0, trees - 1)),
        tensors=parameters.read_choice("tensors", _TENSOR_SETS, ""),
    )


def make_rank_map_page(sources: Sequence[DumpSource]) -> PageKind[RankMapRequest]:
    """Return the page; tensors can be compared with those of all `sources`."""
    return PageKind(
        *("/ranks", "ranks.html", "Ranks"),
        lambda parameters: _parse_rank_map(parameters, len(sources)),
        lambda source, request: build_rank_map(source, request, sources),
        has_attempts=True,
    )


def build_rank_map(
    source: DumpSource, request: RankMapRequest, sources: Sequence[DumpSource]
) -> RankMapPage:
    """Return the numbers in a part of the map, and the labels of the picture."""
    base = _find_base(source, request)
    found = read_values(source, request, sources)
    finite = found.values[np.isfinite(found.values)]
    ranks = slice_page(found.ranks, request.first_rank, _MAX_TABLE_RANKS)
    page = slice_page(found.iterations, request.first_iteration, _MAX_TABLE_ITERATIONS)
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
        columns=tuple(page.shown),
        lines=tuple(RankLine(rank, _list_values(found, rank, page.shown)) for rank in ranks.shown),
        next_rank=ranks.next,
        next_iteration=page.next,
        previous_iteration=page.previous,
        title=_make_title(request, base, sources),
        note=found.note,
        trees=tuple(str(each.root) for each in sources),
        base=base,
    )


def _find_base(source: DumpSource, request: RankMapRequest) -> int | None:
    """Return the rank that others are compared with: the lowest one, unless the request names
    another.
    """
    if request.statistic != DIFFERENCES or request.against is not None:
        return None
    if request.base is not None:
        return request.base
    lowest = source.get_rows("SELECT min(rank) AS rank FROM tensors")[0]["rank"]
    return 0 if lowest is None else lowest


def _make_title(request: RankMapRequest, base: int | None, sources: Sequence[DumpSource]) -> str:
    if request.statistic == TIME:
        return "Milliseconds of each iteration"
    if request.statistic != DIFFERENCES:
        return f"Extreme {request.statistic.replace('_', ' ')}"
    what = "Parameters and gradients" if request.only_copies else "Tensors"
    other = f"rank {base}" if request.against is None else str(sources[request.against].root)
    return f"{what} that differ from those of {other}"


def _list_values(found: RankValues, rank: int, columns: Sequence[int]) -> tuple[float | None, ...]:
    row = found.ranks.index(rank)
    places = [found.iterations.index(at) for at in columns]
    return tuple(float(found.values[row, at]) if found.is_there[row, at] else None for at in places)


def draw_rank_map(
    source: DumpSource, request: RankMapRequest, sources: Sequence[DumpSource]
) -> bytes:
    """Return the map as PNG, with a row for each rank and a column for each iteration."""
    found = read_values(source, request, sources)
    rows, columns = (-(-count // MAX_CELLS) or 1 for count in found.values.shape)
    cells = join_cells(np.where(found.is_there, found.values, 0.0), rows, columns)
    is_there = join_cells(found.is_there.astype(np.int64), rows, columns) > 0
    colors = color_cells(cells, is_log=choose_scale(found.values).name != "linear")
    return encode_png(np.where(is_there, colors, EMPTY_INDEX).astype(np.uint8))


def read_values(
    source: DumpSource, request: RankMapRequest, sources: Sequence[DumpSource]
) -> RankValues:
    """Return the number for each rank and iteration."""
    statistic, search = request.statistic, request.search
    if statistic == TIME:
        return source.keep_latest("rank times", None, lambda: read_times(source))
    if statistic != DIFFERENCES:
        asked = statistic, search
        return source.keep_latest("rank map", asked, lambda: _read_statistic(source, *asked))
    base = _find_base(source, request)
    compared = DifferenceRequest(base, request.only_copies, search)
    other = source if request.against is None else sources[request.against]
    # The key includes the state of the other tree, which may change while this one does not.
    key = compared, request.against, read_tree_stamp(other.root)
    return source.keep_latest(
        "rank differences", key, lambda: count_differences(source, other, compared)
    )


def _read_statistic(source: DumpSource, statistic: str, search: str) -> RankValues:
    if statistic in _OF_ITERATIONS:
        view, conditions, values = "iterations", ["true"], list[object]()
        measure = f"sum({_OF_ITERATIONS[statistic]})"
    else:
        view, (conditions, values) = "tensors", match_rows(search=search)
        conditions.append("iteration IS NOT NULL")
        measure = f"arg_max({statistic}, abs({statistic}))"
        if statistic == NONFINITE_COUNT:
            measure = f"count(*) FILTER (WHERE {NONFINITE})"
    rows = source.read_table(
        f"SELECT rank, iteration, CAST({measure} AS DOUBLE) AS value FROM {view} "
        f"WHERE {' AND '.join(conditions)} GROUP BY rank, iteration HAVING value IS NOT NULL",
        values,
    )
    return arrange_values(
        *(rows.column(name).to_numpy() for name in ("rank", "iteration", "value"))
    )
