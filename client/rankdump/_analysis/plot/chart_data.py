"""Data of a chart: lines over iterations or ranks, a map of ranks and iterations, or the counts of
a tensor's elements. If the selection has no data, the reason is returned instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankdump._analysis.plot.chart_rows import (
    STATISTICS,
    ChartRefusal,
    ChartRows,
)
from rankdump._analysis.plot.tensor_slice import reduce_blocks
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tree_walk import locate
from rankdump._core.record import name_argument, sanitize_line
from rankdump._core.units import format_count

NameSpelling: TypeAlias = Callable[[str], str]
MAX_LINES = 2000
"""Largest number of lines; more take too long to draw and cannot be told apart."""
MAX_CELL_ROWS, MAX_CELL_COLUMNS = 256, 400
"""Largest number of rows and columns of a map that a picture has room for."""
FINITE, INFINITE, NOT_A_NUMBER = 0, 1, 2
"""Flags for the worst value in a cell."""
_MIN_BARS, _MAX_BARS = 10, 100
_BLOCK_ELEMENTS = 1 << 20
_WIDE_RATIO = 1e3
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
_KEY = ("job", "attempt", "name", "side", "slot", "argument")
_TENSOR = "name, side, slot, argument"
_DATED = "WHERE value IS NOT NULL AND iteration IS NOT NULL"
_NARROWING_OPTIONS = "--op, --rank, --iteration, --side, --slot, --attempt and --job select"


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line: values at ascending iterations or ranks, including values that are not finite."""

    label: str
    places: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LineChart:
    """A statistic of tensors over iterations or ranks."""

    title: str
    notes: tuple[str, ...]
    statistic: str
    over: str
    """Horizontal axis: `iteration` or `rank`."""
    lines: tuple[ChartLine, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A statistic over ranks (rows) and iterations (columns)."""

    title: str
    notes: tuple[str, ...]
    statistic: str
    ranks: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    """The finite value of each cell with the largest magnitude; NaN if the cell has none."""
    flags: npt.NDArray[np.int64]
    """FINITE, INFINITE or NOT_A_NUMBER for each cell."""


@dataclass(frozen=True, slots=True)
class ElementHistogram:
    """Histogram of the elements of a tensor."""

    title: str
    notes: tuple[str, ...]
    edges: npt.NDArray[np.float64]
    """Limits of the bars; there is one more of them than counts."""
    counts: npt.NDArray[np.int64]


class AxisScale(NamedTuple):
    """Scale of an axis: `linear`, `log` or `symlog`."""

    name: str
    threshold: float = 0.0
    """With `symlog`, the scale is linear between minus this value and this value."""


def choose_scale(values: npt.NDArray[np.float64], asked: str = "auto") -> AxisScale:
    """Return the scale for values: logarithmic if requested, or if they spread over 3 decades.

    Zeros and negative values have no logarithm; with them, the scale is linear around 0. With
    negative values, a logarithmic scale is used only if requested.
    """
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite[finite != 0])
    if asked == "linear" or not len(sizes):
        return AxisScale("linear")
    smallest, largest = float(sizes.min()), float(sizes.max())
    is_wide = largest / smallest > _WIDE_RATIO and bool((finite >= 0).all())
    if asked != "log" and not is_wide:
        return AxisScale("linear")
    return AxisScale("log") if bool((finite > 0).all()) else AxisScale("symlog", smallest)


def find_lines(
    rows: ChartRows, statistic: str, over: str, spell: NameSpelling
) -> LineChart | ChartRefusal:
    """Return a line over iterations for each tensor and rank, or over ranks for each tensor and
    iteration.

    If a tensor has several values at one place, as with micro-batches, the extreme one is used.
    """
    other = "rank" if over == "iteration" else "iteration"
    found = _read_lines(rows, statistic, over, other)
    if not len(found):
        return _explain_nothing(rows, statistic, spell, needs_iteration=over == "iteration")
    count = found.column("lines")[0].as_py()
    if count > MAX_LINES:
        return ChartRefusal(
            f"{count:,} lines match, and at most {MAX_LINES:,} are drawn: --kind heatmap shows the "
            f"extreme of all tensors, and {_NARROWING_OPTIONS} fewer"
        )
    keys = found.select([*_KEY, other]).to_pylist()
    labels, title = _name_lines(keys, other, spell)
    places, values = found.column("places"), found.column("values")
    lines = tuple(
        ChartLine(label, places[n].values.to_numpy(), values[n].values.to_numpy())
        for n, label in enumerate(labels)
    )
    runs = max(found.column("runs").to_pylist())
    word = _name_extreme(statistic)
    notes = [f"{word} of up to {runs:,} values of a tensor at one {over}"] if runs > 1 else []
    notes += _note_left_out(rows, statistic, needs_iteration=over == "iteration")
    return LineChart(f"{statistic} of {title}", tuple(notes), statistic, over, lines)


def find_heat_map(rows: ChartRows, statistic: str, spell: NameSpelling) -> HeatMap | ChartRefusal:
    """Return the extreme value of the selected tensors for each rank and iteration."""
    found = _read_cells(rows, statistic)
    if not len(found):
        return _explain_nothing(rows, statistic, spell, needs_iteration=True)
    title, notes = _describe_cells(rows, statistic, spell)
    notes += _note_left_out(rows, statistic, needs_iteration=True)
    ranks, row = np.unique(found.column("rank").to_numpy(), return_inverse=True)
    iterations, column = np.unique(found.column("iteration").to_numpy(), return_inverse=True)
    values = np.full((len(ranks), len(iterations)), np.nan)
    flags = np.full(values.shape, FINITE, np.int64)
    values[row, column] = found.column("value").to_numpy()
    flags[row, column] = found.column("flag").to_numpy()
    return HeatMap(
        f"{statistic} of {title}", tuple(notes), statistic, ranks, iterations, values, flags
    )


def _describe_cells(rows: ChartRows, statistic: str, spell: NameSpelling) -> tuple[str, list[str]]:
    """Return the title of a map and, if a cell stands for several values, a text about what it
    shows.
    """
    (held,) = rows.run(
        f"""SELECT count(*) AS tensors, count(DISTINCT name) AS operators, max(runs) AS runs,
          any_value(name) AS name, any_value(side) AS side, any_value(slot) AS slot,
          any_value(argument) AS argument
        FROM (
          SELECT {_TENSOR}, max(runs) AS runs FROM (
            SELECT {_TENSOR}, count(*) AS runs
            FROM selected {_DATED} GROUP BY {_TENSOR}, rank, iteration
          ) GROUP BY {_TENSOR}
        )""",
        columns=_cast(statistic),
    ).to_pylist()
    word = _name_extreme(statistic)
    if held["tensors"] == 1:
        several = [f"a cell has the {word} of up to {held['runs']:,} values"]
        return _name_tensor(held, spell), several if held["runs"] > 1 else []
    operators = held["operators"]
    of = spell(held["name"]) if operators == 1 else format_count(operators, "operator")
    tensors = format_count(held["tensors"], "tensor")
    return f"{tensors} of {of}", [f"a cell has the {word} of {tensors}"]


def shrink_heat_map(chart: HeatMap) -> HeatMap:
    """Return a map that has at most as many cells as a picture has room for; each cell keeps the
    extreme of the cells that it replaces.

    A cell gets the first of the ranks and iterations that it stands for.
    """
    rows, columns = chart.values.shape
    steps = (-(-rows // MAX_CELL_ROWS), -(-columns // MAX_CELL_COLUMNS))
    if max(steps) == 1:
        return chart
    reduce = np.fmin if _name_function(chart.statistic) == "min" else np.fmax
    note = (
        f"each drawn cell has the {_name_extreme(chart.statistic)} of "
        f"{format_count(steps[0], 'rank')} and {format_count(steps[1], 'iteration')}"
    )
    return replace(
        chart,
        notes=(*chart.notes, note),
        ranks=chart.ranks[:: steps[0]],
        iterations=chart.iterations[:: steps[1]],
        values=reduce_blocks(reduce, chart.values, *steps),
        flags=reduce_blocks(np.maximum, chart.flags, *steps),
    )


def find_elements(rows: ChartRows, spell: NameSpelling) -> ElementHistogram | ChartRefusal:
    """Return the histogram of the only selected tensor; CorruptedError for a damaged file.

    If there are several runs in one iteration, as with micro-batches, the last one is used.
    """
    key = ", ".join((*_KEY, "rank", "iteration"))
    found = rows.run(
        f"""SELECT {key}, arg_max(path, timestamp_us) AS path,
          arg_max(member, timestamp_us) AS member, count(*) AS runs
        FROM selected GROUP BY {key} LIMIT 2""",
        columns="coalesce(path, '') AS path, coalesce(CAST(member AS VARCHAR), '') AS member, "
        "timestamp_us",
    ).to_pylist()
    if not found:
        return ChartRefusal(rows.explain_no_match(spell))
    if len(found) > 1:
        there = rows.survey_tensors()
        return ChartRefusal(
            f"a histogram shows one tensor, and {there.tensors:,} match: {there.describe(spell)}; "
            f"{_NARROWING_OPTIONS} one"
        )
    (row,) = found
    title = ", ".join((_name_tensor(row, spell), f"rank {row['rank']}", _name_when(row)))
    if not row["path"]:
        return ChartRefusal(f"{title}: the tree has statistics of it only, and no elements")
    entries = locate(rows.root / row["path"])
    entry = next((each for each in entries if each.member == row["member"]), None)
    if entry is None:
        return ChartRefusal(f"{title}: its file {row['path']} is not in the tree any more")
    elements = load(entry)
    if elements.dtype.kind not in "biuf":
        return ChartRefusal(f"{title}: its elements are {elements.dtype}, which have no order")
    notes = [f"last of {row['runs']:,} runs"] if row["runs"] > 1 else []
    layout = entry.record.layout if entry.record is not None else None
    notes += ["the tree has its first elements only"] if layout and layout.is_sample else []
    return count_elements(elements, title, notes)


def count_elements(
    elements: npt.NDArray[Any], title: str, notes: Sequence[str] = ()
) -> ElementHistogram | ChartRefusal:
    """Return the histogram of numbers; the notes tell how many are not finite."""
    flat = elements.reshape(-1)
    blocks = [flat[n : n + _BLOCK_ELEMENTS] for n in range(0, len(flat), _BLOCK_ELEMENTS)]
    nans = infinities = 0
    low, high = np.inf, -np.inf
    for block in blocks:
        wide = block.astype(np.float64)
        nans += int(np.isnan(wide).sum())
        infinities += int(np.isinf(wide).sum())
        finite = wide[np.isfinite(wide)]
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    lost = [f"{nans:,} NaN"] * bool(nans) + [f"{infinities:,} infinite"] * bool(infinities)
    if low > high:
        what = "has no elements" if not len(flat) else f"has no finite element: {', '.join(lost)}"
        return ChartRefusal(f"{title}: it {what}")
    edges = _make_edges(low, high, len(flat), is_whole=elements.dtype.kind in "biu")
    counts = np.zeros(len(edges) - 1, np.int64)
    for block in blocks:
        wide = block.astype(np.float64)
        counts += np.histogram(wide[np.isfinite(wide)], edges)[0]
    sizes = f"{format_count(len(flat), 'element')} from {low:.6g} to {high:.6g}"
    outside = [f"{' and '.join(lost)} not in the bars"] if lost else []
    return ElementHistogram(f"elements of {title}", (sizes, *outside, *notes), edges, counts)


def _make_edges(low: float, high: float, count: int, *, is_whole: bool) -> npt.NDArray[np.float64]:
    """Return the limits of the bars; a small number of whole numbers gets one bar each."""
    if is_whole and high - low < _MAX_BARS:
        return np.arange(low, high + 2) - 0.5
    bars = int(np.clip(np.ceil(np.sqrt(count)), _MIN_BARS, _MAX_BARS))
    # Halves are used, because the difference of two numbers may overflow.
    edges = np.linspace(low / 2, high / 2, bars + 1) * 2
    edges[0], edges[-1] = low, high
    distinct = np.unique(edges)
    if len(distinct) > 1:
        return distinct
    margin = max(abs(low) / 1000, np.finfo(np.float32).tiny) if low else 0.5
    return np.array([low - margin, low + margin])


def _read_lines(rows: ChartRows, statistic: str, over: str, other: str) -> pa.Table:
    """Return a row for each line, with lists of its places and values."""
    key = ", ".join((*_KEY, other))
    return rows.run(
        f"""SELECT {key}, list(place ORDER BY place) AS places,
          list(value ORDER BY place) AS values, max(runs) AS runs, count(*) OVER () AS lines
        FROM (
          SELECT {key}, {over} AS place, min(position) AS position, count(*) AS runs,
            {_reduce(statistic)} AS value
          FROM selected WHERE value IS NOT NULL AND {over} IS NOT NULL GROUP BY {key}, {over}
        )
        GROUP BY {key} ORDER BY job, attempt, min(position), {other}, name, side, slot
        LIMIT {MAX_LINES}""",
        columns=_cast(statistic),
    )


def _read_cells(rows: ChartRows, statistic: str) -> pa.Table:
    """Return a row for each rank and iteration that has a value."""
    return rows.run(
        f"""SELECT rank, iteration,
          {_name_function(statistic)}(value) FILTER (isfinite(value)) AS value,
          max(CASE WHEN isnan(value) THEN {NOT_A_NUMBER} WHEN isinf(value) THEN {INFINITE}
            ELSE {FINITE} END) AS flag
        FROM selected {_DATED} GROUP BY rank, iteration""",
        columns=_cast(statistic),
    )


def _cast(statistic: str) -> str:
    return f"CAST({statistic} AS DOUBLE) AS value"


def _reduce(statistic: str) -> str:
    """Return the SQL expression for the extreme of several values; a single NaN makes the result
    NaN.
    """
    function = _name_function(statistic)
    return f"CASE WHEN bool_or(isnan(value)) THEN 'nan'::DOUBLE ELSE {function}(value) END"


def _name_function(statistic: str) -> str:
    return "min" if statistic == "min" else "max"


def _name_extreme(statistic: str) -> str:
    return "smallest" if _name_function(statistic) == "min" else "largest"


def _note_left_out(rows: ChartRows, statistic: str, *, needs_iteration: bool) -> list[str]:
    """Return notes about what of the selection is not in the chart."""
    dated = "iteration IS NOT NULL" if needs_iteration else "true"
    found = rows.run(
        f"""SELECT count(*) FILTER (NOT ({dated})) AS constants,
          count(*) FILTER (({dated}) AND value IS NULL) AS unrecorded,
          count(*) FILTER (({dated}) AND isnan(value)) AS nans,
          count(*) FILTER (({dated}) AND isinf(value)) AS infinities
        FROM selected""",
        columns=_cast(statistic),
    ).to_pylist()[0]
    texts = {
        "nans": "NaN",
        "infinities": "infinite",
        "unrecorded": f"without {statistic}",
        "constants": "of constants, which have no iteration",
    }
    return [
        f"{format_count(found[name], 'value')} {text}"
        for name, text in texts.items()
        if found[name]
    ]


def _explain_nothing(
    rows: ChartRows, statistic: str, spell: NameSpelling, *, needs_iteration: bool
) -> ChartRefusal:
    """Return why no value of the statistic is selected."""
    there = rows.survey_tensors()
    if not there.tensors:
        return ChartRefusal(rows.explain_no_match(spell))
    counted = ", ".join(f"count({name}) AS {name}" for name in STATISTICS)
    known = rows.run(f"SELECT {counted} FROM selected", columns=", ".join(STATISTICS))
    recorded = [name for name, count in known.to_pylist()[0].items() if count]
    of_all = f"{rows.root}: of {format_count(there.tensors, 'tensor')}"
    if needs_iteration and statistic in recorded and not there.iterations:
        return ChartRefusal(f"{of_all}, each is a constant without iteration: see --over rank")
    if recorded:
        return ChartRefusal(f"{of_all}, none has {statistic}; recorded: {', '.join(recorded)}")
    return ChartRefusal(f"{of_all}, none has statistics: saved_data was neither full nor statistic")


def _name_lines(
    keys: Sequence[dict[str, Any]], other: str, spell: NameSpelling
) -> tuple[list[str], str]:
    """Return a label for each line with what differs between the lines, and a title with what is
    equal.
    """
    parts: list[tuple[list[str], str]] = [
        ([spell(key["name"]) for key in keys], "operators"),
        ([_name_place(key) for key in keys], "inputs and outputs"),
    ]
    if other == "rank":
        parts.append(([f"rank {key['rank']}" for key in keys], "ranks"))
    else:
        parts.append(([_name_when(key) for key in keys], "iterations"))
    if any(key["attempt"] for key in keys):
        parts.append(([f"attempt {key['attempt']}" for key in keys], "attempts"))
    if len({key["job"] for key in keys}) > 1:
        parts.append(([f"job {sanitize_line(key['job'])}" for key in keys], "jobs"))
    differing = [texts for texts, _ in parts if len(set(texts)) > 1]
    labels = [", ".join(texts) for texts in zip(*(differing or [parts[0][0]]), strict=True)]
    title = [
        texts[0] if len(set(texts)) == 1 else f"{len(set(texts)):,} {noun}" for texts, noun in parts
    ]
    return labels, ", ".join(title)


def _name_tensor(key: dict[str, Any], spell: NameSpelling) -> str:
    return f"{spell(key['name'])}, {_name_place(key)}"


def _name_place(key: dict[str, Any]) -> str:
    argument = sanitize_line(name_argument(key["argument"]))
    return f"{key['side']} {key['slot']} {argument}".rstrip()


def _name_when(key: dict[str, Any]) -> str:
    return "constant" if key["iteration"] is None else f"iteration {key['iteration']}"
