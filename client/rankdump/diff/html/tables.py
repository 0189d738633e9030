"""Tables of the page: a click on a title sorts, words above them filter."""

from __future__ import annotations

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    CDSView,
    CellFormatter,
    ColumnDataSource,
    CustomJS,
    DataTable,
    HTMLTemplateFormatter,
    IndexFilter,
    LayoutDOM,
    NumberFormatter,
    ScientificFormatter,
    StringFormatter,
    TableColumn,
    TextInput,
)

from rankdump.diff.html.columns import Cells, Columns
from rankdump.diff.html.palette import COLOURS

_WIDTHS = {
    "operator": 380,
    "findings": 420,
    "figures apart": 260,
    "type and shape": 180,
    "verdict": 100,
    "direction": 80,
}
_WHOLE = ("rank", "iteration", "position", "tensors", "differing", "unequal")
_SHARES = ("cosine", "lowest cosine", "close share", "lowest close")
_NARROW, _WIDE, _WIDER = 66, 92, 124
_LONG = 12
_LINE_HEIGHT, _MOST_HEIGHT = 26, 560
# All words have to be in a line, wherever.
_FILTER = """
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
_VERDICT = """<span style="color: <%= ({colours})[value] %>">&#9632;</span> <%- value %>"""


def source_of(columns: Columns) -> ColumnDataSource:
    """Return columns as the library holds them; numbers as arrays, which are bytes in the page."""
    return ColumnDataSource(
        {
            title: values if values and isinstance(values[0], str) else np.array(values)
            for title, values in columns.items()
        }
    )


def sortable(columns: Columns, name: str) -> LayoutDOM:
    """Return a table of those columns with a field for words in front of it."""
    source = source_of(columns)
    asked = TextInput(placeholder="only lines with these words ...", width=420)
    texts = [title for title, values in columns.items() if values and isinstance(values[0], str)]
    lines = len(next(iter(columns.values())))
    view = CDSView(filter=IndexFilter(indices=list(range(lines))))
    known = {"source": source, "asked": asked, "names": texts, "view": view}
    asked.js_on_change("value_input", CustomJS(args=known, code=_FILTER))
    table = DataTable(
        source=source,
        view=view,
        columns=[_column(title, values) for title, values in columns.items()],
        index_position=None,
        reorderable=False,
        autosize_mode="none",
        row_height=_LINE_HEIGHT,
        height=min(_LINE_HEIGHT * (lines + 2), _MOST_HEIGHT),
        sizing_mode="stretch_width",
    )
    return column(asked, table, name=name, sizing_mode="stretch_width")


def _column(title: str, values: Cells) -> TableColumn:
    usual = _WIDE if _is_real(values) and title not in _WHOLE else _NARROW
    if len(title) > _LONG:
        usual = _WIDER
    return TableColumn(
        field=title,
        title=title,
        width=_WIDTHS.get(title, usual),
        formatter=_formatter(title, values),
        sortable=True,
    )


def _formatter(title: str, values: Cells) -> CellFormatter:
    if "verdict" in title:
        return HTMLTemplateFormatter(template=_VERDICT.format(colours=COLOURS))
    if title in _WHOLE:
        return NumberFormatter(format="0", nan_format="-", text_align="right")
    if title in _SHARES:
        return ScientificFormatter(precision=8, nan_format="-", text_align="right")
    if _is_real(values):
        return ScientificFormatter(
            precision=3, power_limit_low=-2, nan_format="-", text_align="right"
        )
    return StringFormatter()


def _is_real(values: Cells) -> bool:
    return bool(values) and isinstance(values[0], float)
