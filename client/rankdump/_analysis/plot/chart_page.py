"""HTML page of one chart, which works offline: the picture, the command that made it, and a table
with the same data for readers who do not see the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rankdump._analysis.plot.chart_data import (
    FINITE,
    INFINITE,
    NOT_A_NUMBER,
    ChartLine,
    ElementHistogram,
    HeatMap,
    LineChart,
)
from rankdump._core.statistics import format_statistic_number

_MAX_ROWS = 2000
_STYLE = """
body { margin: 0 auto; max-width: 1200px; padding: 24px 32px 64px; background: #fff;
  color: #1c2430; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 19px; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 4px 0; color: #5a6675; }
pre { overflow-x: auto; background: #f4f6f8; padding: 8px 12px;
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin-top: 12px; font-size: 13px; }
th, td { padding: 2px 12px 2px 0; text-align: right; border-bottom: 1px solid #e6e9ed;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: nothing is fetched, and a map is an image in a data URL."""


def render_page(chart: LineChart | HeatMap | ElementHistogram, picture: str, command: str) -> str:
    """Return the page of a chart; `picture` is the chart as SVG, `command` the command line that
    made it.
    """
    titles, rows = make_value_table(chart)
    title = escape(chart.title)
    left_out = len(rows) - _MAX_ROWS
    drawing = picture[picture.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *(f"<p>{escape(note)}</p>" for note in chart.notes),
        drawing,
        f"<pre>{escape(command)}</pre>",
        f"<table><thead>{_render_row('th', titles)}</thead><tbody>",
        *(_render_row("td", row) for row in rows[:_MAX_ROWS]),
        "</tbody></table>",
        f"<p>{left_out:,} more rows are left out.</p>" if left_out > 0 else "",
        "</body></html>\n",
    ]
    return "\n".join(filter(None, parts))


def make_value_table(
    chart: LineChart | HeatMap | ElementHistogram,
) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table: a row for each line, for each rank of a map, or for each
    bar.
    """
    if isinstance(chart, ElementHistogram):
        rows = [
            [_spell(low), _spell(high), f"{count:,}"]
            for (low, high), count in zip(pairwise(chart.edges), chart.counts, strict=True)
        ]
        return ["from", "to", "elements"], rows
    over = chart.over if isinstance(chart, LineChart) else "iteration"
    counted = ["NaN", "infinite", f"first not finite at {over}"]
    extremes = ["smallest", "largest", f"largest at {over}", *counted]
    if isinstance(chart, LineChart):
        rows = [
            [line.label, *map(_spell, line.values[[0, -1]]), *_summarize_line(line)]
            for line in chart.lines
        ]
        return ["line", "first", "last", *extremes], rows
    rows = [
        [f"rank {rank}", *_find_extremes(values, chart.iterations), *_count_flags(flags, chart)]
        for rank, values, flags in zip(chart.ranks, chart.values, chart.flags, strict=True)
    ]
    return ["rank", *extremes], rows


def _summarize_line(line: ChartLine) -> list[str]:
    lost = line.places[~np.isfinite(line.values)]
    counts = np.isnan(line.values).sum(), np.isinf(line.values).sum()
    extremes = _find_extremes(line.values, line.places)
    return [*extremes, *(f"{count:,}" for count in counts), _spell_first(lost)]


def _find_extremes(
    values: npt.NDArray[np.float64], places: npt.NDArray[np.int64]
) -> tuple[str, str, str]:
    """Return the smallest and the largest finite value, and the place of the largest one."""
    is_finite = np.isfinite(values)
    if not is_finite.any():
        return "-", "-", "-"
    finite, where = values[is_finite], places[is_finite]
    largest = int(finite.argmax())
    return _spell(finite.min()), _spell(finite[largest]), str(where[largest])


def _count_flags(flags: npt.NDArray[np.int64], chart: HeatMap) -> list[str]:
    counts = [f"{(flags == flag).sum():,}" for flag in (NOT_A_NUMBER, INFINITE)]
    return [*counts, _spell_first(chart.iterations[flags != FINITE])]


def _spell_first(places: npt.NDArray[np.int64]) -> str:
    return str(places[0]) if len(places) else "-"


def _spell(value: float) -> str:
    return format_statistic_number(float(value))


def _render_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
