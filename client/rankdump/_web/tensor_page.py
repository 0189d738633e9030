"""Page of one tensor: its statistics over iterations and ranks, its elements, the operators that
produced and used it, and the line of the script, with neighbouring lines if the script is on this
host.

A tree may come from anyone, and the tree itself names the file of the script. So lines of the file
are shown only if the file has the line that the tree recorded, at the same place; then it is the
script.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.plot.chart_data import ElementHistogram, count_elements
from rankdump._analysis.plot.chart_rows import ChartRefusal
from rankdump._analysis.plot.tensor_slice import TensorSlice, cut_slice
from rankdump._analysis.reader.source_lines import (
    Frame,
    OperatorNames,
    find_backward_name,
    graph_files,
    read_operators,
)
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tree import Entry
from rankdump._analysis.reader.tree_walk import locate
from rankdump._analysis.table.table_schema import NONFINITE, STATISTIC_COLUMNS
from rankdump._core.scope_names import format_scope_name
from rankdump._core.units import format_bytes
from rankdump._web.dump_source import EXECUTION_ORDER, DumpSource, TensorRow, match_rows, read_rows
from rankdump._web.page_kinds import (
    MAX_NUMBER,
    AbsentPageError,
    PageKind,
    PageParameters,
    ParameterError,
    slice_page,
)
from rankdump._web.png_image import color_cells, encode_png
from rankdump.errors import ExhaustedError, RankdumpError

MAX_ELEMENT_BYTES = 128 << 20
"""Largest size in bytes of a tensor whose elements a page reads; larger tensors are left to
`rankdump show`.
"""


class SliceChoice(NamedTuple):
    """Dimensions and place of a slice, as an address gives them."""

    row_axis: int | None
    column_axis: int | None
    at: tuple[int, ...]
    """Index in each dimension; empty for the first element in all dimensions."""
    is_joined: bool
    """Whether shards are joined into the logical tensor."""


class ElementView(NamedTuple):
    """Elements of a tensor as a page shows them."""

    shape: tuple[int, ...]
    dtype: str
    slice: TensorSlice | None
    """Slice of the elements; None if they are not numbers, and for a tensor without elements."""
    histogram: ElementHistogram | None
    note: str
    """Why there is no histogram; empty if there is one."""


def find_entry(source: DumpSource, row: TensorRow) -> Entry:
    """Return the file of a row; AbsentPageError if only statistics were kept.

    The path comes from a table, so it is checked not to lead out of the tree.
    """
    if not row.path:
        raise AbsentPageError("the tree has statistics of this tensor, and no elements")
    root = source.root.resolve()
    path = (root / row.path).resolve()
    if not path.is_relative_to(root):
        raise AbsentPageError(f"the path {row.path[:60]!r} of the table leads out of the tree")
    found = [each for each in locate(root / row.path) if each.member == row.member]
    if not found:
        raise AbsentPageError(f"the file {row.path} is not in the tree any more")
    return found[0]


def load_elements(source: DumpSource, row: TensorRow, *, is_joined: bool) -> npt.NDArray[Any]:
    """Return the elements of a row; ExhaustedError if there are more than a page reads."""
    entry = find_entry(source, row)
    record = entry.record
    size = row.bytes
    if is_joined and record is not None and record.layout is not None:
        size = row.bytes * len(record.layout.mesh.list_ranks())
    if size > MAX_ELEMENT_BYTES:
        raise ExhaustedError(
            f"the tensor has {format_bytes(size)}, and a page reads at most "
            f"{format_bytes(MAX_ELEMENT_BYTES)}: rankdump show {entry.path}"
        )
    if is_joined:
        return source.dump.load(entry, full=True)
    return load(entry, limit_bytes=2 * MAX_ELEMENT_BYTES)


def view_elements(source: DumpSource, row: TensorRow, choice: SliceChoice) -> ElementView:
    """Return the slice and the histogram of a tensor; ParameterError for a slice that the tensor
    does not have.
    """
    tensor = load_elements(source, row, is_joined=choice.is_joined)
    is_numeric = tensor.dtype.kind in "biufc" and tensor.size > 0
    cut = choose_slice(tensor, choice) if is_numeric else None
    if not is_numeric or tensor.dtype.kind == "c":
        note = (
            "no elements" if not tensor.size else f"elements of type {tensor.dtype} have no order"
        )
        return ElementView(tensor.shape, str(tensor.dtype), cut, None, note)
    found = count_elements(tensor, "this tensor")
    if isinstance(found, ChartRefusal):
        return ElementView(tensor.shape, str(tensor.dtype), cut, None, found.reason)
    return ElementView(tensor.shape, str(tensor.dtype), cut, found, "")


def choose_slice(tensor: npt.NDArray[Any], choice: SliceChoice) -> TensorSlice:
    """Return a slice; if an address does not choose one, the last two dimensions at the first index
    of all others.
    """
    count = tensor.ndim
    rows = max(0, count - 2) if choice.row_axis is None else choice.row_axis
    columns = max(0, count - 1) if choice.column_axis is None else choice.column_axis
    for name, axis in (("rows", rows), ("columns", columns)):
        if axis >= max(1, count):
            raise ParameterError(name, str(axis), f"a dimension from 0 to {max(0, count - 1)}")
    if count > 1 and rows == columns:
        raise ParameterError("columns", str(columns), f"another dimension than rows, {rows}")
    at = choice.at or (0,) * count
    _check_place(at, tensor.shape)
    return cut_slice(tensor, rows, columns, at)


def _check_place(at: Sequence[int], shape: Sequence[int]) -> None:
    text = ",".join(map(str, at))
    if len(at) != len(shape):
        raise ParameterError("at", text, f"{len(shape)} numbers, one for each dimension")
    for index, extent in zip(at, shape, strict=True):
        if index >= extent:
            limits = ", ".join(str(extent - 1) for extent in shape)
            raise ParameterError("at", text, f"indices up to {limits}")


def draw_slice(source: DumpSource, row: TensorRow, choice: SliceChoice) -> bytes:
    """Return a slice as PNG."""
    tensor = load_elements(source, row, is_joined=choice.is_joined)
    if tensor.dtype.kind not in "biufc" or not tensor.size:
        raise AbsentPageError("the tensor has no elements that can be drawn")
    return encode_png(color_cells(choose_slice(tensor, choice).cells))


def make_npy(source: DumpSource, row: TensorRow, *, is_joined: bool) -> bytes:
    """Return the elements as an npy file; bfloat16 as float32."""
    file = io.BytesIO()
    np.save(file, load_elements(source, row, is_joined=is_joined))
    return file.getvalue()


STATISTICS = tuple(STATISTIC_COLUMNS.values())
_MAX_SERIES_ITERATIONS = 200
_MAX_SERIES_RANKS = 12
_NEIGHBOURS = 4
_MAX_RELATED = 20
_MAX_DIMENSIONS = 32
_PLACE = re.compile(r"[0-9]{1,15}(?:,[0-9]{1,15})*")
_SAME_RUN = "iteration = ? AND rank = ? AND attempt = ?"
_IDENTITY = "CAST(name AS VARCHAR) = ? AND CAST(side AS VARCHAR) = ? AND slot = ?"


class TensorRequest(NamedTuple):
    """Which tensor the page shows, at which place, and which part of it."""

    name: str
    side: str
    slot: int
    rank: int | None
    iteration: int | None
    statistic: str
    first_iteration: int
    """First iteration whose statistics are listed."""
    choice: SliceChoice


class SeriesLine(NamedTuple):
    """A statistic in one iteration, on several ranks."""

    iteration: int
    values: tuple[float | None, ...]


class StatisticSeries(NamedTuple):
    """A statistic of a tensor over iterations."""

    statistic: str
    ranks: tuple[int, ...]
    """Ranks of the columns; if there are many, the lowest ones."""
    rank_count: int
    lines: tuple[SeriesLine, ...]
    next_iteration: int | None
    previous_iteration: int | None
    runs: int
    """Largest number of rows of one rank and iteration, as with micro-batches; the extreme value is
    shown.
    """


@dataclass(frozen=True, slots=True)
class TensorPage:
    """Content of the page."""

    request: TensorRequest
    row: TensorRow
    statistics: tuple[str, ...]
    """Names of the statistics that were recorded of this tensor."""
    series: StatisticSeries
    elements: ElementView | None
    elements_note: str
    """Why no elements are shown; empty if they are shown."""
    frames: tuple[SourceFrame, ...]
    frames_note: str
    producers: tuple[TensorRow, ...]
    consumers: tuple[TensorRow, ...]
    neighbours: tuple[TensorRow, ...]


def parse_tensor(parameters: PageParameters) -> TensorRequest:
    """Return the request that the parameters describe."""
    name = parameters.read_text("name")
    if not name:
        raise ParameterError("name", name, "the full name of an operator")
    return TensorRequest(
        name=name,
        side=parameters.read_choice("side", ("input", "output"), "output"),
        slot=parameters.read_number("slot", high=1 << 30) or 0,
        rank=parameters.read_number("rank", high=1 << 30),
        iteration=parameters.read_number("iteration"),
        statistic=parameters.read_choice("statistic", STATISTICS, "l2norm"),
        first_iteration=parameters.read_number("first_iteration") or 0,
        choice=_parse_slice(parameters),
    )


def _parse_slice(parameters: PageParameters) -> SliceChoice:
    place = parameters.read_text("at", longest=512)
    if place and not _PLACE.fullmatch(place):
        raise ParameterError("at", place, "numbers joined by commas, one for each dimension")
    return SliceChoice(
        row_axis=parameters.read_number("rows", high=_MAX_DIMENSIONS),
        column_axis=parameters.read_number("columns", high=_MAX_DIMENSIONS),
        at=tuple(map(int, place.split(","))) if place else (),
        is_joined=parameters.read_flag("joined"),
    )


def find_row(source: DumpSource, request: TensorRequest) -> TensorRow:
    """Return the row of a tensor; if the request names no place, the earliest row that is not
    finite, or else the first row with elements. AbsentPageError if there is no row.
    """
    conditions, values = match_rows(rank=request.rank, iteration=request.iteration)
    rows = read_rows(
        source,
        f"{_IDENTITY} AND {' AND '.join(conditions)} "
        f"ORDER BY ({NONFINITE}) DESC, path = '', {EXECUTION_ORDER} LIMIT 1",
        (*_get_identity(request), *values),
    )
    if not rows:
        place = (("rank", request.rank), ("iteration", request.iteration))
        where = "".join(f", {name} {value}" for name, value in place if value is not None)
        raise AbsentPageError(
            f"no tensor {request.side} {request.slot} of {request.name[:200]}{where}"
        )
    return rows[0]


def build_tensor(source: DumpSource, request: TensorRequest) -> TensorPage:
    """Return the content of the page for a tensor."""
    row = find_row(source, request)
    extent = _find_extent(source, request)
    if extent.statistics and request.statistic not in extent.statistics:
        request = request._replace(statistic=extent.statistics[0])
    elements, elements_note = _view_elements(source, row, request)
    frames, frames_note = _find_frames(source, row)
    neighbours = _find_neighbours(source, row)
    producers, consumers = _find_related(source, row)
    return TensorPage(
        request=request,
        row=row,
        statistics=extent.statistics,
        series=_read_series(source, request, extent),
        elements=elements,
        elements_note=elements_note,
        frames=frames,
        frames_note=frames_note,
        producers=producers,
        consumers=consumers,
        neighbours=neighbours,
    )


def _get_identity(request: TensorRequest) -> tuple[object, ...]:
    return request.name, request.side, request.slot


class _TensorExtent(NamedTuple):
    """Places at which a tensor exists, and the statistics that it has."""

    statistics: tuple[str, ...]
    ranks: list[int]
    iterations: list[int]


def _find_extent(source: DumpSource, request: TensorRequest) -> _TensorExtent:
    counts = ", ".join(f"count({name}) AS {name}" for name in STATISTICS)
    found = source.get_rows(
        f"SELECT {counts}, list(DISTINCT rank) AS ranks, list(DISTINCT iteration) AS iterations "
        f"FROM tensors WHERE {_IDENTITY}",
        _get_identity(request),
    )[0]
    iterations = sorted(at for at in found["iterations"] if at is not None)
    known = tuple(name for name in STATISTICS if found[name])
    return _TensorExtent(known, sorted(found["ranks"]), iterations)


def _read_series(
    source: DumpSource, request: TensorRequest, extent: _TensorExtent
) -> StatisticSeries:
    statistic = request.statistic
    ranks = extent.ranks[:_MAX_SERIES_RANKS]
    if request.rank is not None and request.rank not in ranks:
        ranks[-1] = request.rank
    page = slice_page(extent.iterations, request.first_iteration, _MAX_SERIES_ITERATIONS)
    shown = page.shown
    rows = source.get_rows(
        f"SELECT rank, iteration, CAST(arg_max({statistic}, abs({statistic})) AS DOUBLE) AS value, "
        f"count(*) AS runs FROM tensors WHERE {_IDENTITY} AND iteration BETWEEN ? AND ? "
        f"AND rank IN ({', '.join(map(str, ranks))}) GROUP BY rank, iteration",
        (*_get_identity(request), *((shown[0], shown[-1]) if shown else (0, -1))),
    )
    by_place = {(row["iteration"], row["rank"]): row["value"] for row in rows}
    lines = (SeriesLine(at, tuple(by_place.get((at, rank)) for rank in ranks)) for at in shown)
    return StatisticSeries(
        *(statistic, tuple(ranks), len(extent.ranks), tuple(lines)),
        *(page.next, page.previous),
        max((row["runs"] for row in rows), default=0),
    )


def _view_elements(
    source: DumpSource, row: TensorRow, request: TensorRequest
) -> tuple[ElementView | None, str]:
    try:
        return view_elements(source, row, request.choice), ""
    except ParameterError:
        raise
    except RankdumpError as error:
        return None, str(error)


def _find_frames(source: DumpSource, row: TensorRow) -> tuple[tuple[SourceFrame, ...], str]:
    try:
        frames = find_source(source, row.rank, row.name)
    except RankdumpError as error:
        return (), str(error)
    return frames, "" if frames else "the tree has no source line of this operator"


def _find_neighbours(source: DumpSource, row: TensorRow) -> tuple[TensorRow, ...]:
    if row.iteration is None:
        return ()
    span = max(0, row.position - _NEIGHBOURS), min(MAX_NUMBER, row.position + _NEIGHBOURS)
    return read_rows(
        source,
        f"{_SAME_RUN} AND position BETWEEN ? AND ? ORDER BY position",
        (row.iteration, row.rank, row.attempt, *span),
    )


def _find_related(
    source: DumpSource, row: TensorRow
) -> tuple[tuple[TensorRow, ...], tuple[TensorRow, ...]]:
    """Return the earlier outputs that have the same bytes as a tensor, and the later inputs that
    have.
    """
    if not row.digest or row.iteration is None:
        return (), ()
    found = read_rows(
        source,
        f"{_SAME_RUN} AND digest = ? AND position <> ? ORDER BY position LIMIT {4 * _MAX_RELATED}",
        (row.iteration, row.rank, row.attempt, row.digest, row.position),
    )
    before = [each for each in found if each.side == "output" and each.position < row.position]
    after = [each for each in found if each.side == "input" and each.position > row.position]
    return tuple(before[-_MAX_RELATED:]), tuple(after[:_MAX_RELATED])


def name_tensor(row: TensorRow) -> str:
    """Return a name for a tensor's file, made of characters that are safe in file names."""
    parts: Sequence[object] = (
        *(format_scope_name(row.name), row.side, row.slot, f"rank{row.rank}"),
        f"iteration{row.iteration}" if row.iteration is not None else "constant",
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "_", ".".join(map(str, parts)))[-150:].lstrip(".")


TENSOR = PageKind("/tensor", "tensor.html", "Tensor", parse_tensor, build_tensor)


_CONTEXT = 4
"""Number of lines that are shown before and after a line."""
_MAX_FILE_BYTES = 4 << 20
_MAX_FRAMES = 12
_SUFFIX = ".py"


class ContextLine(NamedTuple):
    """A line of a script."""

    number: int
    text: str
    is_line: bool
    """Whether the line is the recorded one."""


class SourceFrame(NamedTuple):
    """A frame of the stack of an operator."""

    file: str
    line: int
    code: str
    context: tuple[ContextLine, ...]
    """Lines of the script; empty if the script is not on this host, or has changed."""


def find_source(source: DumpSource, rank: int, name: str) -> tuple[SourceFrame, ...]:
    """Return the stack of an operator, innermost line first; empty if none was recorded.

    CorruptedError if the file of stacks is damaged.
    """
    frames = source.keep(("frames", rank, name), lambda: _list_recorded_frames(source, rank, name))
    return tuple(
        SourceFrame(each.file, each.line, each.code, read_context(each))
        for each in reversed(frames[-_MAX_FRAMES:])
    )


def _list_recorded_frames(source: DumpSource, rank: int, name: str) -> tuple[Frame, ...]:
    names = OperatorNames([name])
    likely: tuple[Frame, ...] = ()
    for file in graph_files(source.root, (rank,)):
        for operator in read_operators(file):
            if name in (operator.op_name, find_backward_name(operator.op_name)):
                return operator.frames
            if not likely and names.may_be(operator.op_name):
                likely = operator.frames
    return likely


def read_context(frame: Frame) -> tuple[ContextLine, ...]:
    """Return the lines around a frame; none unless the file has the recorded line."""
    path = Path(frame.file)
    if not frame.code or path.suffix != _SUFFIX or not path.is_absolute():
        return ()
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return ()
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ()
    at = frame.line - 1
    if not 0 <= at < len(lines) or lines[at].strip() != frame.code:
        return ()
    first = max(0, at - _CONTEXT)
    return tuple(
        ContextLine(first + offset + 1, text, first + offset == at)
        for offset, text in enumerate(lines[first : at + _CONTEXT + 1])
    )
