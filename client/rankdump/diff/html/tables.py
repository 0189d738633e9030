"""Tables of the page: a click on a title sorts, words above them filter."""

from __future__ import annotations

from bokeh.layouts import column
from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CustomJS,
    CustomJSFilter,
    DataTable,
    HTMLTemplateFormatter,
    LayoutDOM,
    NumberFormatter,
    ScientificFormatter,
    StringFormatter,
    TableColumn,
    TextInput,
)

from rankdump.diff.html.columns import Columns
from rankdump.diff.html.palette import COLOURS

_WIDTHS = {"operator": 380, "findings": 420, "type and shape": 180, "verdict": 100, "direction": 80}
_NARROW, _WIDE, _WIDER = 66, 92, 124
_LINE_HEIGHT, _MOST_HEIGHT = 26, 560
# All words have to be in a line, wherever.
_FILTER = """
const words = asked.value.toLowerCase().split(/\\s+/).filter((word) => word);
const kept = [];
const columns = names.map((name) => source.data[name]);
for (let at = 0; at < source.get_length(); at++) {
  const text = columns.map((column) => column[at]).join(" ").toLowerCase();
  if (words.every((word) => text.includes(word))) kept.push(at);
}
return kept;
"""
_AGAIN = "source.change.emit()"
_VERDICT = """<span style="color: <%= ({colours})[value] || '#444' %>">&#9632;</span> <%- value %>"""


def sortable(columns: Columns, name: str) -> LayoutDOM:
    """Return a table of those columns with a field for words in front of it."""
    source = ColumnDataSource({title: list(values) for title, values in columns.items()})
    asked = TextInput(placeholder="only lines with these words ...", width=420)
    texts = [title for title, values in columns.items() if values and isinstance(values[0], str)]
    kept = CustomJSFilter(args={"asked": asked, "names": texts}, code=_FILTER)
    asked.js_on_change("value_input", CustomJS(args={"source": source}, code=_AGAIN))
    lines = len(next(iter(columns.values())))
    table = DataTable(
        source=source,
        view=CDSView(filter=kept),
        columns=[_column(title, values) for title, values in columns.items()],
        index_position=None,
        reorderable=False,
        autosize_mode="none",
        row_height=_LINE_HEIGHT,
        height=min(_LINE_HEIGHT * (lines + 2), _MOST_HEIGHT),
        sizing_mode="stretch_width",
    )
    return column(asked, table, name=name, sizing_mode="stretch_width")


def _column(title: str, values: list[str] | list[int] | list[float]) -> TableColumn:
    usual = _WIDER if len(title) > 12 else _WIDE if _is_real(values) else _NARROW
    return TableColumn(
        field=title,
        title=title,
        width=_WIDTHS.get(title, usual),
        formatter=_formatter(title, values),
        sortable=True,
    )


def _formatter(title: str, values: list[str] | list[int] | list[float]) -> StringFormatter:
    if "verdict" in title:
        return HTMLTemplateFormatter(template=_VERDICT.format(colours=COLOURS))
    if _is_real(values):
        return ScientificFormatter(precision=4, nan_format="-", text_align="right")
    if values and isinstance(values[0], int):
        return NumberFormatter(format="0", text_align="right")
    return StringFormatter()


def _is_real(values: list[str] | list[int] | list[float]) -> bool:
    return bool(values) and isinstance(values[0], float)
