"""Pictures of charts, as SVG or PNG. Needs matplotlib: `pip install 'rankdump[plot]'`.

With the same version of matplotlib, equal charts give equal bytes: a file contains no time, ids are
hashed with a fixed salt (matplotlib, `svg.hashsalt`), and settings in the user's `matplotlibrc`
have no effect. Text in an SVG stays text, so that it can be searched and read aloud.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from rankdump._analysis.plot.chart_data import (
    FINITE,
    INFINITE,
    NOT_A_NUMBER,
    AxisScale,
    ChartLine,
    ElementHistogram,
    HeatMap,
    LineChart,
    choose_scale,
    shrink_heat_map,
)
from rankdump._core.units import format_count

AnyChart: TypeAlias = LineChart | HeatMap | ElementHistogram
TextShortener: TypeAlias = Callable[[str, int], str]
"""Function that shortens a text to a number of characters."""
_COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22",
    "#17becf",
)  # fmt: skip
_GREY, _TEXT, _GRID = "#b8bfc8", "#5a6675", "#e6e9ed"
_NAN_COLOUR, _INFINITE_COLOUR, _EMPTY_COLOUR = "#d62728", "#ff7f0e", "#f0f2f4"
_SIZE_INCHES, _LEGEND_LINE_INCHES = (10.0, 5.4), 0.21
_LABEL_LENGTH, _TITLE_LENGTH, _NOTES_LENGTH = 60, 105, 150
_CONTEXT_LENGTH = 20
"""Number of characters that are kept of the common beginning of long labels."""
_LEGEND_LENGTH = 125
"""Number of characters that fit into a row of the legend."""
_MAX_MARKED_POINTS = 60
"""Largest number of points of a line whose points are marked."""
_MAX_TICKS = 12
_NONFINITE_MARKS: Sequence[tuple[Callable[[Any], Any], str, float, str]] = (
    (np.isnan, "x", 0.985, "NaN"),
    (np.isposinf, "^", 0.95, "infinite"),
    (np.isneginf, "v", 0.015, "minus infinite"),
)
"""For each kind of value that is not finite: its test, its mark, its height on the axes from 0 to
1, and its name.
"""
_NARROW_RATIO = 30
"""Ratio of a logarithmic axis's ends below which numbers between powers of ten are
labelled, too.
"""
_NUMBERS = StrMethodFormatter("{x:g}")
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rankdump",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.parse_math": False,  # names may contain dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "savefig.dpi": 150,
}
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}


def render_picture(
    chart: AnyChart, form: str, shorten: TextShortener, *, scale: str = "auto"
) -> bytes:
    """Return a picture of a chart as the bytes of a file, `svg` or `png`.

    `scale` applies to values, or to counts of elements: `auto`, `log` or `linear`.
    """
    with _fixed_settings():
        drawn, buffer = draw_chart(chart, shorten, scale=scale), io.BytesIO()
        drawn.savefig(buffer, format=form, metadata=_METADATA[form])
        return buffer.getvalue()


def draw_chart(chart: AnyChart, shorten: TextShortener, *, scale: str = "auto") -> Figure:
    """Return the drawing of a chart, with the present settings of matplotlib."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(chart, LineChart):
        handles = _draw_lines(figure, chart, shorten, scale)
    elif isinstance(chart, HeatMap):
        chart = shrink_heat_map(chart)
        handles = _draw_heat_map(figure, chart, scale)
    else:
        handles = _draw_bars(figure, chart, scale)
    figure.suptitle(
        shorten(chart.title, _TITLE_LENGTH), x=0.01, ha="left", fontsize=11, fontweight="bold"
    )
    notes = shorten("; ".join(chart.notes), _NOTES_LENGTH)
    figure.axes[0].set_title(notes, loc="left", fontsize=8, color=_TEXT)
    if handles:
        labels = [str(each.get_label()) for each in handles]
        # matplotlib leaves labels that begin with an underscore out of a legend.
        labels = [f" {label}" if label.startswith("_") else label for label in labels]
        columns = max(1, min(3, _LEGEND_LENGTH // max(map(len, labels))))
        height = _SIZE_INCHES[1] + _LEGEND_LINE_INCHES * -(-len(handles) // columns)
        figure.set_size_inches(_SIZE_INCHES[0], height)
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5
        )
    return figure


def select_prominent_lines(lines: Sequence[ChartLine], most: int) -> list[int]:
    """Return the positions of the lines that are most noteworthy, ascending.

    These are lines with values that are not finite, then lines with the largest values.
    """

    def get_rank(at: int) -> tuple[bool, float]:
        values = lines[at].values
        finite = np.abs(values[np.isfinite(values)])
        return len(finite) == len(values), -float(finite.max(initial=0.0))

    return sorted(sorted(range(len(lines)), key=get_rank)[:most])


@contextmanager
def _fixed_settings() -> Generator[None, None, None]:
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        # Names may contain characters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def _shorten_labels(labels: Sequence[str], shorten: TextShortener) -> list[str]:
    """Return shortened labels; if they would be equal then, without their common beginning."""
    short = [shorten(label, _LABEL_LENGTH) for label in labels]
    if len(set(short)) == len(set(labels)):
        return short
    start = max(0, _count_common(labels) - _CONTEXT_LENGTH)
    tail = max(0, _count_common([label[::-1] for label in labels]) - _CONTEXT_LENGTH)
    parts = [label[start : len(label) - tail] for label in labels]
    return [shorten(f"...{part}...", _LABEL_LENGTH) for part in parts]


def _count_common(labels: Sequence[str]) -> int:
    """Return the number of characters at the beginning that all labels have in common."""
    columns = enumerate(zip(*labels, strict=False))
    return next((at for at, column in columns if len(set(column)) > 1), min(map(len, labels)))


def _draw_lines(figure: Figure, chart: LineChart, shorten: TextShortener, scale: str) -> list[Any]:
    """Draw a line chart, and return the entries of its legend."""
    axes = figure.add_subplot()
    prominent = select_prominent_lines(chart.lines, len(_COLOURS))
    others = [line for at, line in enumerate(chart.lines) if at not in set(prominent)]
    values = np.concatenate([line.values for line in chart.lines])
    _scale_axis(axes, choose_scale(values, scale), values)
    axes.add_collection(
        LineCollection(
            [np.column_stack([line.places, _hide_nonfinite(line.values)]) for line in others],
            colors=_GREY, linewidths=0.7, zorder=1,
        )
    )  # fmt: skip
    for line in others:
        _mark_nonfinite(axes, line, _GREY)
    handles: list[Any] = []
    labels = _shorten_labels([chart.lines[at].label for at in prominent], shorten)
    for at, label, colour in zip(prominent, labels, _COLOURS, strict=False):
        line = chart.lines[at]
        mark = "o" if len(line.places) <= _MAX_MARKED_POINTS else ""
        handles += axes.plot(
            line.places, _hide_nonfinite(line.values), label=label,
            color=colour, marker=mark, markersize=3, linewidth=1.4,
        )  # fmt: skip
        _mark_nonfinite(axes, line, colour)
    _arrange_axes(axes, chart, values)
    if len(handles) == 1 and not others:
        handles.clear()
    if others:
        handles.append(Line2D([], [], color=_GREY, label=format_count(len(others), "more line")))
    return [*handles, *_explain_marks(values)]


def _arrange_axes(axes: Axes, chart: LineChart, values: npt.NDArray[np.float64]) -> None:
    axes.autoscale_view()
    axes.margins(y=0.08)
    axes.set(xlabel=chart.over, ylabel=chart.statistic)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    places = np.concatenate([line.places for line in chart.lines])
    if places.min() == places.max():
        axes.set_xlim(places[0] - 1, places[0] + 1)
    if not np.isfinite(values).any():
        axes.set_yticks([])
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _hide_nonfinite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.nan)


def _mark_nonfinite(axes: Axes, line: ChartLine, colour: str) -> None:
    """Mark values that are not finite at the edge of the axes."""
    for is_chosen, mark, height, _ in _NONFINITE_MARKS:
        places = line.places[is_chosen(line.values)]
        if len(places):
            axes.plot(
                places, np.full(len(places), height), transform=axes.get_xaxis_transform(),
                linestyle="", marker=mark, color=colour, markersize=6, clip_on=False,
            )  # fmt: skip


def _explain_marks(values: npt.NDArray[np.float64]) -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker=mark, color=_TEXT, label=label)
        for is_chosen, mark, _, label in _NONFINITE_MARKS
        if is_chosen(values).any()
    ]


def _draw_heat_map(figure: Figure, chart: HeatMap, scale: str) -> list[Any]:
    """Draw a map, and return the entries of its legend."""
    axes = figure.add_subplot()
    shown = axes.imshow(
        np.ma.masked_invalid(chart.values), norm=_make_norm(chart.values, scale),
        aspect="auto", interpolation="nearest", origin="lower",
    )  # fmt: skip
    colours = ListedColormap([_INFINITE_COLOUR, _NAN_COLOUR])
    axes.imshow(
        np.ma.masked_equal(chart.flags, FINITE), cmap=colours,
        vmin=INFINITE, vmax=NOT_A_NUMBER, aspect="auto", interpolation="nearest", origin="lower",
    )  # fmt: skip
    axes.set(xlabel="iteration", ylabel="rank", facecolor=_EMPTY_COLOUR)
    _label_cells(axes, "x", chart.iterations)
    _label_cells(axes, "y", chart.ranks)
    if np.isfinite(chart.values).any():
        figure.colorbar(shown, ax=axes, label=chart.statistic, pad=0.01, format=_NUMBERS)
    marks = (
        ((chart.flags == NOT_A_NUMBER).any(), _NAN_COLOUR, "NaN"),
        ((chart.flags == INFINITE).any(), _INFINITE_COLOUR, "infinite"),
        ((np.isnan(chart.values) & (chart.flags == FINITE)).any(), _EMPTY_COLOUR, "no value"),
    )
    return [
        Patch(facecolor=colour, edgecolor=_GREY, label=label)
        for is_there, colour, label in marks
        if is_there
    ]


def _label_cells(axes: Axes, name: str, numbers: npt.NDArray[np.int64]) -> None:
    """Label some of the rows or columns of a map with their numbers."""
    step = -(-len(numbers) // _MAX_TICKS)
    ticks = np.arange(0, len(numbers), step)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(ticks, [f"{number}" for number in numbers[ticks]])


def _make_norm(values: npt.NDArray[np.float64], asked: str) -> Normalize:
    chosen = choose_scale(values.ravel(), asked)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Normalize(0, 1)
    low, high = float(finite.min()), float(finite.max())
    if chosen.name == "log":
        return LogNorm(low, high)
    if chosen.name == "symlog":
        return SymLogNorm(chosen.threshold, vmin=low, vmax=high)
    return Normalize(low, high)


def _draw_bars(figure: Figure, chart: ElementHistogram, scale: str) -> list[Any]:
    axes = figure.add_subplot()
    chosen = choose_scale(chart.counts.astype(np.float64), scale)
    # Counts are 1 or more, so the bars of a logarithmic axis start at one half.
    axes.set_yscale("linear" if chosen.name == "linear" else "log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    bottom = 0.0 if chosen.name == "linear" else 0.5
    axes.stairs(chart.counts, chart.edges, baseline=bottom, fill=True, color=_COLOURS[0])
    axes.set_ylim(bottom=bottom)
    axes.set(xlabel="value", ylabel="elements")
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return []


def _scale_axis(axes: Axes, scale: AxisScale, values: npt.NDArray[np.float64]) -> None:
    """Set the scale of the vertical axis, with numbers that need no mathematical notation."""
    options = {"linthresh": scale.threshold} if scale.name == "symlog" else {}
    axes.set_yscale(scale.name, **options)
    axes.yaxis.set_major_formatter(_NUMBERS)
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    is_narrow = scale.name == "log" and sizes.max() / sizes.min() < _NARROW_RATIO
    axes.yaxis.set_minor_formatter(_NUMBERS if is_narrow else NullFormatter())
