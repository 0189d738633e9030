"""Charts of the page: errors by operator in execution order, and how they are distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from bokeh.models import BoxAnnotation, DataRange1d, HoverTool, LayoutDOM, Range1d, Span
from bokeh.plotting import figure
from bokeh.transform import factor_mark

from rankdump.diff.html.columns import Scale, axis_of, point_columns, scale_of
from rankdump.diff.html.palette import COLOURS, MARKS, RANKS
from rankdump.diff.html.tables import source_of
from rankdump.diff.summary import CallKey, Operator, call_key, error, severity
from rankdump.diff.values import Row

_HEIGHT, _HISTOGRAM_HEIGHT = 420, 280
_BINS = 40
_MOST_LEGEND = 16
_TOOLS = "pan,xwheel_zoom,box_zoom,reset,save"
_HOVER = [
    ("operator", "@operator"),
    ("rank", "@rank, @when"),
    ("worst", "@verdict at @place, @extents"),
    ("error", "@error"),
    ("cosine", "@cosine"),
    ("close", "@close"),
]


def by_operator(operators: Sequence[Operator], suspects: set[CallKey], name: str) -> LayoutDOM:
    """Return the chart of the largest error of each pair of calls, a colour for each rank."""
    scale = scale_of([each.error for each in operators])
    axis = axis_of(operators)
    chart = _figure(name, _HEIGHT, scale)
    _backdrop(chart, scale, list(axis.begins.values())[1:])
    # What is drawn last lies on top, and what is drawn first stands for all in the legend.
    ranked = sorted(operators, key=lambda each: (each.worst.rank, -severity(each.worst)))
    for rank, group in groupby(ranked, key=lambda each: each.worst.rank):
        columns = point_columns(list(group), scale, axis)
        points = chart.scatter(
            "x",
            "y",
            source=source_of(columns),
            marker=factor_mark("verdict", list(MARKS.values()), list(MARKS)),
            size=9,
            color=RANKS[rank % len(RANKS)],
            alpha=0.75,
            legend_label=f"rank {rank}",
        )
        chart.add_tools(HoverTool(renderers=[points], tooltips=_HOVER))
    blamed = point_columns([o for o in operators if call_key(o.worst) in suspects], scale, axis)
    ring = source_of(blamed)
    chart.scatter(
        "x", "y", source=ring, size=22, fill_color=None, line_color="#c1121f", line_width=2.5
    )
    _legend(chart, len({each.worst.rank for each in operators}))
    return chart


def histograms(rows: Sequence[Row]) -> list[LayoutDOM]:
    """Return how many tensors have which error; of what is nowhere but 0, no chart."""
    charts = (
        _histogram(rows, error, "error", "absolute"),
        _histogram(rows, _relative, "relative Euclidean distance", "relative"),
    )
    return [chart for chart in charts if chart is not None]


def _relative(row: Row) -> float:
    measures = row.outcome.measures
    return measures.relative_euclidean if measures else 0.0


def _histogram(
    rows: Sequence[Row], measure: Callable[[Row], float], title: str, name: str
) -> LayoutDOM | None:
    """Return a chart of logarithms, stacked by verdict."""
    drawn: dict[str, list[float]] = {}
    for row in sorted(rows, key=severity):
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
            color=COLOURS[verdict],
            line_color="white",
            legend_label=verdict,
        )
        base = top
    return chart


def _figure(name: str, height: int, scale: Scale) -> figure:
    chart = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_scroll="xwheel_zoom",
        x_axis_label="operators in execution order",
        y_axis_label="error",
        y_range=Range1d(start=scale.zero - 0.6, end=scale.unknown + 0.6),
        min_border_left=70,
    )
    chart.toolbar.logo = None
    chart.yaxis.ticker = list(_thinned(scale))
    chart.yaxis.major_label_overrides = {at: scale.labels[at] for at in _thinned(scale)}
    return chart


def _thinned(scale: Scale) -> list[int]:
    """Return the ticks: the two lines at the ends, and a dozen decades between."""
    step = max(1, math.ceil((scale.high - scale.low) / 12))
    return [scale.zero, *range(scale.low, scale.high + 1, step), scale.unknown]


def _backdrop(chart: figure, scale: Scale, starts: Sequence[int]) -> None:
    """Shade the lines of what has no place on the scale; show where iterations begin."""
    for at in (scale.zero, scale.unknown):
        shade = BoxAnnotation(bottom=at - 0.5, top=at + 0.5, fill_color="#eceff3", fill_alpha=0.7)
        shade.level = "image"
        chart.add_layout(shade)
    for at in starts:
        line = Span(location=at - 0.5, dimension="height", line_color="#b8c0cc", line_dash="dotted")
        chart.add_layout(line)


def _legend(chart: figure, ranks: int) -> None:
    if not chart.legend:
        return
    chart.legend.visible = ranks <= _MOST_LEGEND
    chart.legend.click_policy = "hide"
    chart.legend.orientation = "horizontal"
    chart.add_layout(chart.legend[0], "above")
