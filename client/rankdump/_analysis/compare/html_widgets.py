"""Charts and tables of the HTML page: errors by operator in execution order, histograms of errors,
and tables that can be sorted by a column and filtered by words; with the columns for them and the
axes of the charts. Imports bokeh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    BoxAnnotation,
    CDSView,
    CellFormatter,
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    DataTable,
    HoverTool,
    HTMLTemplateFormatter,
    IndexFilter,
    LayoutDOM,
    NumberFormatter,
    Range1d,
    ScientificFormatter,
    Span,
    StringFormatter,
    TableColumn,
    TextInput,
)
from bokeh.plotting import figure
from bokeh.transform import factor_mark

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, ComparisonRow, TensorVerdict
from rankdump._analysis.compare.report_summary import (
    CallKey,
    OperatorSummary,
    get_row_error,
    get_severity,
    make_call_key,
    max_absolute,
)

ColumnCells: TypeAlias = "list[str] | list[int] | list[float]"
PageColumns: TypeAlias = "Mapping[str, ColumnCells]"
NameShortener: TypeAlias = "Callable[[str], str]"
"""Function that shortens a name for display."""

NO_NUMBER = "no number"
_RANK_SPREAD = 0.6
"""Width over which the points of all ranks at one position are spread."""

_MEASURE_TITLES = {
    "mean abs": "mean_absolute",
    "max rel": "max_relative",
    "mean rel": "mean_relative",
    "cosine": "cosine",
    "rmse": "rmse",
    "rel euclidean": "relative_euclidean",
    "kl": "kl_divergence",
    "close share": "close_share",
    "unequal": "unequal",
    "not finite a": "nonfinite_a",
    "not finite b": "nonfinite_b",
}


@dataclass(frozen=True, slots=True)
class ErrorScale:
    """The vertical axis of errors, in decades; one level below them stands for 0, one above for an
    unknown error.
    """

    low: int
    """Exponent of the smallest error, rounded down."""
    high: int
    """Exponent of the largest error, rounded up."""

    @property
    def zero_level(self) -> int:
        """Level of an error that is 0."""
        return self.low - 1

    @property
    def unknown_level(self) -> int:
        """Level of errors without a number: shapes differ, no partner, nothing finite."""
        return self.high + 1

    @property
    def labels(self) -> dict[int, str]:
        """Labels of the axis: both special levels at the ends, and at most a dozen decades between
        them.
        """
        step = max(1, math.ceil((self.high - self.low) / 12))
        decades = {power: f"1e{power}" for power in range(self.low, self.high + 1, step)}
        return {self.zero_level: "0", **decades, self.unknown_level: NO_NUMBER}

    def get_y(self, error: float) -> float:
        """Return the level of an error."""
        if not math.isfinite(error):
            return self.unknown_level
        return math.log10(error) if error > 0 else self.zero_level


@dataclass(frozen=True, slots=True)
class ExecutionAxis:
    """The horizontal axis of calls: their positions, one iteration after the other."""

    iteration_starts: Mapping[int, int]
    """Position at which each iteration starts."""
    rank_offsets: Mapping[int, float]
    """Horizontal offset of the points of each rank, so that no rank hides another one."""

    def get_x(self, row: ComparisonRow) -> float:
        """Return the position of a pair of calls on the axis."""
        return self.iteration_starts[row.iteration] + row.position + self.rank_offsets[row.rank]


def build_error_scale(errors: Sequence[float]) -> ErrorScale:
    """Return the axis that fits all errors."""
    powers = [math.log10(error) for error in errors if error > 0 and math.isfinite(error)]
    if not powers:
        return ErrorScale(-6, 0)
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return ErrorScale(low, max(high, low + 1))


def build_row_columns(rows: Sequence[ComparisonRow], shorten: NameShortener) -> PageColumns:
    """Return one table line per row, with exact measures; a missing measure is NaN."""
    extra = dict.fromkeys(name for row in rows for name in row.outcome.extra)
    return {
        **_build_call_columns(rows, shorten),
        "place": [row.place_name for row in rows],
        "verdict": [row.outcome.verdict.value for row in rows],
        "max abs": [max_absolute(row) for row in rows],
        **{
            title: [_get_measure(row, name) for row in rows]
            for title, name in _MEASURE_TITLES.items()
        },
        **{name: [row.outcome.extra.get(name, math.nan) for row in rows] for name in extra},
        "type and shape": [report_text.format_dtype_and_shape(row) for row in rows],
        "matched by": [row.rule or report_text.NO_VALUE for row in rows],
        "statistic differences": [report_text.format_statistic_differences(row) for row in rows],
        "findings": [report_text.join_findings(row) for row in rows],
    }


def build_operator_columns(
    operators: Sequence[OperatorSummary], shorten: NameShortener
) -> PageColumns:
    """Return one table line per pair of calls."""
    worst = [each.worst for each in operators]
    return {
        **_build_call_columns(worst, shorten),
        "worst verdict": [row.outcome.verdict.value for row in worst],
        "at": [row.place_name for row in worst],
        "tensors": [each.tensors for each in operators],
        "differing": [each.differing for each in operators],
        "error": [each.error for each in operators],
        "lowest cosine": [each.cosine for each in operators],
        "lowest close": [each.close_share for each in operators],
    }


def build_point_columns(
    operators: Sequence[OperatorSummary], scale: ErrorScale, axis: ExecutionAxis
) -> PageColumns:
    """Return one chart point per pair of calls, with its coordinates and the fields of
    its tooltip.
    """
    worst = [each.worst for each in operators]
    return {
        "x": list(map(axis.get_x, worst)),
        "y": [scale.get_y(each.error) for each in operators],
        "rank": [row.rank for row in worst],
        "when": [report_text.format_iterations([row.iteration]) for row in worst],
        "operator": [
            f"{report_text.format_call_name(row, str)}, {_format_direction(row)}" for row in worst
        ],
        "place": [row.place_name for row in worst],
        "verdict": [row.outcome.verdict.value for row in worst],
        "error": [report_text.format_number(each.error) for each in operators],
        "cosine": [report_text.format_cosine(each.cosine) for each in operators],
        "close": [report_text.format_share(each.close_share) for each in operators],
        "extents": [report_text.format_dtype_and_shape(row) for row in worst],
    }


def build_execution_axis(operators: Sequence[OperatorSummary]) -> ExecutionAxis:
    """Return the horizontal axis that fits all pairs of calls."""
    lengths: dict[int, int] = {}
    for row in (each.worst for each in operators):
        lengths[row.iteration] = max(lengths.get(row.iteration, 0), row.position + 1)
    begins, at = dict[int, int](), 0
    for iteration in sorted(lengths):
        begins[iteration] = at
        at += lengths[iteration]
    ranks = sorted({each.worst.rank for each in operators})
    step = _RANK_SPREAD / len(ranks) if ranks else 0.0
    return ExecutionAxis(begins, {rank: at * step for at, rank in enumerate(ranks)})


def _get_measure(row: ComparisonRow, name: str) -> float:
    measures = row.outcome.measures
    return math.nan if measures is None else float(getattr(measures, name))


def _build_call_columns(rows: Sequence[ComparisonRow], shorten: NameShortener) -> PageColumns:
    return {
        "rank": [row.rank for row in rows],
        "iteration": [
            math.nan if row.iteration == CONSTANTS_ITERATION else float(row.iteration)
            for row in rows
        ],
        "position": [row.position for row in rows],
        "direction": [_format_direction(row) for row in rows],
        "operator": [report_text.format_call_name(row, shorten) for row in rows],
    }


def _format_direction(row: ComparisonRow) -> str:
    return "backward" if row.backward else "forward"


_VERDICT_LOOKS = (
    (TensorVerdict.SAME, "#9aa5b1", "circle"),
    (TensorVerdict.NORMAL, "#4c8bb8", "circle"),
    (TensorVerdict.SUSPICIOUS, "#e0a458", "triangle"),
    (TensorVerdict.DIFFERENT, "#d9622b", "diamond"),
    (TensorVerdict.NAN, "#8e3fa8", "star"),
    (TensorVerdict.SHAPE, "#8a5a2b", "square"),
    (TensorVerdict.UNMATCHED, "#c9a227", "inverted_triangle"),
    (TensorVerdict.UNREADABLE, "#222222", "asterisk"),
    (TensorVerdict.UNKNOWN, "#c9ced6", "circle"),
)
VERDICT_COLOURS = {verdict.value: colour for verdict, colour, _ in _VERDICT_LOOKS}
VERDICT_MARKERS = {verdict.value: marker for verdict, _, marker in _VERDICT_LOOKS}
RANK_COLOURS = (
    "#1f6f8b",
    "#d9822b",
    "#3a7d44",
    "#a23b72",
    "#6b5b95",
    "#8c6d31",
    "#2f4b7c",
    "#e05263",
    "#509e9a",
    "#7a7a7a",
)
"""Colours of ranks, used in rotation."""


_COLUMN_WIDTHS = {
    "operator": 380,
    "findings": 420,
    "statistic differences": 260,
    "type and shape": 180,
    "verdict": 100,
    "direction": 80,
}
_INTEGER_COLUMNS = ("rank", "iteration", "position", "tensors", "differing", "unequal")
_SHARE_COLUMNS = ("cosine", "lowest cosine", "close share", "lowest close")
_NARROW_WIDTH, _WIDE_WIDTH, _WIDEST_WIDTH = 66, 92, 124
_LONG_TITLE = 12
_LINE_HEIGHT, _MAX_TABLE_HEIGHT = 26, 560
# The script shows a line if it contains all words.
_FILTER_SCRIPT = """
const words = asked.value_input.toLowerCase().split(/\\s+/).filter((word) => word);
const kept = [];
const columns = names.map((name) => source.data[name]);
for (let at = 0; at < source.get_length(); at++) {
  const text = columns.map((column) => column[at]).join(" ").toLowerCase();
  if (words.every((word) => text.includes(word))) kept.push(at);
}
view.filter.indices = kept;
view.change.emit();
"""
_VERDICT_CELL = """<span style="color: <%= ({colours})[value] %>">&#9632;</span> <%- value %>"""

_HEIGHT, _HISTOGRAM_HEIGHT = 420, 280
_BINS = 40
_MAX_LEGEND_RANKS = 16
_TOOLS = "pan,xwheel_zoom,box_zoom,reset,save"
_HOVER_FIELDS = [
    ("operator", "@operator"),
    ("rank", "@rank, @when"),
    ("worst", "@verdict at @place, @extents"),
    ("error", "@error"),
    ("cosine", "@cosine"),
    ("close", "@close"),
]


def make_data_source(columns: PageColumns) -> ColumnDataSource:
    """Return columns for bokeh, with numbers as arrays, which the page stores as bytes."""
    return ColumnDataSource(
        {
            title: values if values and isinstance(values[0], str) else np.array(values)
            for title, values in columns.items()
        }
    )


def build_sortable_table(columns: PageColumns, name: str) -> LayoutDOM:
    """Return a table of the columns, below an input field that filters its lines."""
    source = make_data_source(columns)
    asked = TextInput(placeholder="only lines with these words ...", width=420)
    texts = [title for title, values in columns.items() if values and isinstance(values[0], str)]
    lines = len(next(iter(columns.values())))
    view = CDSView(filter=IndexFilter(indices=list(range(lines))))
    known = {"source": source, "asked": asked, "names": texts, "view": view}
    asked.js_on_change("value_input", CustomJS(args=known, code=_FILTER_SCRIPT))
    table = DataTable(
        source=source,
        view=view,
        columns=[_make_column(title, values) for title, values in columns.items()],
        index_position=None,
        reorderable=False,
        autosize_mode="none",
        row_height=_LINE_HEIGHT,
        height=min(_LINE_HEIGHT * (lines + 2), _MAX_TABLE_HEIGHT),
        sizing_mode="stretch_width",
    )
    return column(asked, table, name=name, sizing_mode="stretch_width")


def _make_column(title: str, values: ColumnCells) -> TableColumn:
    usual = _WIDE_WIDTH if _is_real(values) and title not in _INTEGER_COLUMNS else _NARROW_WIDTH
    if len(title) > _LONG_TITLE:
        usual = _WIDEST_WIDTH
    return TableColumn(
        field=title,
        title=title,
        width=_COLUMN_WIDTHS.get(title, usual),
        formatter=_choose_formatter(title, values),
        sortable=True,
    )


def _choose_formatter(title: str, values: ColumnCells) -> CellFormatter:
    if "verdict" in title:
        return HTMLTemplateFormatter(template=_VERDICT_CELL.format(colours=VERDICT_COLOURS))
    if title in _INTEGER_COLUMNS:
        return NumberFormatter(format="0", nan_format="-", text_align="right")
    if title in _SHARE_COLUMNS:
        return ScientificFormatter(precision=8, nan_format="-", text_align="right")
    if _is_real(values):
        return ScientificFormatter(
            precision=3, power_limit_low=-2, nan_format="-", text_align="right"
        )
    return StringFormatter()


def _is_real(values: ColumnCells) -> bool:
    return bool(values) and isinstance(values[0], float)


def draw_operator_chart(operators: Sequence[OperatorSummary], suspects: set[CallKey]) -> LayoutDOM:
    """Return the chart of the largest error of each pair of calls, with one colour for
    each rank.
    """
    scale = build_error_scale([each.error for each in operators])
    axis = build_execution_axis(operators)
    chart = _make_chart("by_operator", scale)
    _draw_backdrop(chart, scale, list(axis.iteration_starts.values())[1:])
    # The worst points are drawn last, so that they are on top; the first point of a rank is its
    # legend entry.
    ranked = sorted(operators, key=lambda each: (each.worst.rank, -get_severity(each.worst)))
    for rank, group in groupby(ranked, key=lambda each: each.worst.rank):
        columns = build_point_columns(list(group), scale, axis)
        points = chart.scatter(
            "x",
            "y",
            source=make_data_source(columns),
            marker=factor_mark("verdict", list(VERDICT_MARKERS.values()), list(VERDICT_MARKERS)),
            size=9,
            color=RANK_COLOURS[rank % len(RANK_COLOURS)],
            alpha=0.75,
            legend_label=f"rank {rank}",
        )
        chart.add_tools(HoverTool(renderers=[points], tooltips=_HOVER_FIELDS))
    blamed = [each for each in operators if make_call_key(each.worst) in suspects]
    ring = make_data_source(build_point_columns(blamed, scale, axis))
    chart.scatter(
        "x", "y", source=ring, size=22, fill_color=None, line_color="#c1121f", line_width=2.5
    )
    _place_legend(chart, len({each.worst.rank for each in operators}))
    return chart


def draw_histograms(rows: Sequence[ComparisonRow]) -> list[LayoutDOM]:
    """Return histograms of the errors; a measure that is 0 everywhere gets none."""
    charts = (
        _draw_histogram(rows, get_row_error, "error", "absolute"),
        _draw_histogram(rows, _get_relative_error, "relative Euclidean distance", "relative"),
    )
    return [chart for chart in charts if chart is not None]


def _get_relative_error(row: ComparisonRow) -> float:
    measures = row.outcome.measures
    return measures.relative_euclidean if measures else 0.0


def _draw_histogram(
    rows: Sequence[ComparisonRow], measure: Callable[[ComparisonRow], float], title: str, name: str
) -> LayoutDOM | None:
    """Return a histogram of the logarithms of a measure, stacked by verdict."""
    drawn: dict[str, list[float]] = {}
    for row in sorted(rows, key=get_severity):
        if 0 < (value := measure(row)) < math.inf:
            drawn.setdefault(row.outcome.verdict.value, []).append(math.log10(value))
    if not drawn:
        return None
    every = [power for powers in drawn.values() for power in powers]
    low = math.floor(min(every))
    edges = np.linspace(low, max(math.ceil(max(every)), low + 1), _BINS + 1)
    chart = figure(
        name=name,
        height=_HISTOGRAM_HEIGHT,
        sizing_mode="stretch_width",
        tools="save",
        y_range=DataRange1d(start=0),
        x_axis_label=f"log10 of {title}",
        y_axis_label="tensors",
        min_border_left=70,
    )
    chart.toolbar.logo = None
    base = np.zeros(_BINS)
    for verdict, powers in drawn.items():
        top = base + np.histogram(powers, edges)[0]
        chart.quad(
            left=edges[:-1],
            right=edges[1:],
            bottom=base,
            top=top,
            color=VERDICT_COLOURS[verdict],
            line_color="white",
            legend_label=verdict,
        )
        base = top
    return chart


def _make_chart(name: str, scale: ErrorScale) -> figure:
    chart = figure(
        name=name,
        height=_HEIGHT,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_scroll="xwheel_zoom",
        x_axis_label="operators in execution order",
        y_axis_label="error",
        y_range=Range1d(start=scale.zero_level - 0.6, end=scale.unknown_level + 0.6),
        min_border_left=70,
    )
    chart.toolbar.logo = None
    chart.yaxis.ticker = list(scale.labels)
    chart.yaxis.major_label_overrides = {**scale.labels}
    return chart


def _draw_backdrop(chart: figure, scale: ErrorScale, starts: Sequence[int]) -> None:
    """Shade the levels for 0 and for unknown errors, and draw a line where each
    iteration begins.
    """
    for at in (scale.zero_level, scale.unknown_level):
        shade = BoxAnnotation(bottom=at - 0.5, top=at + 0.5, fill_color="#eceff3", fill_alpha=0.7)
        shade.level = "image"
        chart.add_layout(shade)
    for at in starts:
        line = Span(location=at - 0.5, dimension="height", line_color="#b8c0cc", line_dash="dotted")
        chart.add_layout(line)


def _place_legend(chart: figure, ranks: int) -> None:
    if not chart.legend:
        return
    chart.legend.visible = ranks <= _MAX_LEGEND_RANKS
    chart.legend.click_policy = "hide"
    chart.legend.orientation = "horizontal"
    chart.add_layout(chart.legend[0], "above")
