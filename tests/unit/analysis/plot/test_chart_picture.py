"""Pictures and pages of charts: what is in them, not how it looks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.patches import StepPatch

from rankdump._analysis.plot.chart_data import (
    FINITE,
    INFINITE,
    NOT_A_NUMBER,
    ChartLine,
    ElementHistogram,
    HeatMap,
    LineChart,
)
from rankdump._analysis.plot.chart_page import make_value_table, render_page
from rankdump._analysis.plot.chart_picture import (
    draw_chart,
    render_picture,
    select_prominent_lines,
)
from rankdump._cli.output import shorten_text

SVG = "{http://www.w3.org/2000/svg}"


def line(label: str, *values: float) -> ChartLine:
    return ChartLine(label, np.arange(len(values)) * 10, np.array(values, np.float64))


def chart_of(*lines: ChartLine) -> LineChart:
    return LineChart("max of <b>", ("2 values NaN",), "max", "iteration", lines)


def texts(svg: bytes) -> list[str]:
    return ["".join(each.itertext()).strip() for each in ET.fromstring(svg).iter(f"{SVG}text")]


MARKUP = chart_of(line("_$x_{1}$ <b> & \"'", 1, np.nan, 3), line("漢字", np.inf, -np.inf, 5000))
MAP = HeatMap(
    "map", (), "max", np.array([0, 3]), np.array([5, 6, 8]),
    np.array([[1, 2, np.nan], [4, np.nan, np.nan]]),
    np.array([[FINITE, FINITE, FINITE], [INFINITE, NOT_A_NUMBER, FINITE]]),
)  # fmt: skip
BARS = ElementHistogram("bars", ("n",), np.array([0.0, 1.0, 2.0]), np.array([3, 9000]))


def test_picture_has_names_as_text_and_marks_what_is_not_finite():
    found = texts(render_picture(MARKUP, "svg", shorten_text))
    assert {
        "_$x_{1}$ <b> & \"'", "漢字", "NaN", "infinite", "minus infinite", "max of <b>",
        "2 values NaN", "iteration", "1000",
    } <= {*found}  # fmt: skip


def test_picture_is_the_same_each_time_and_leaves_settings_alone():
    """Law: neither the time nor the settings of the user are in it."""
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30}):
        first = render_picture(MAP, "svg", shorten_text)
        assert mpl.rcParams["font.size"] == 30
    assert render_picture(MAP, "svg", shorten_text) == first
    assert render_picture(BARS, "png", shorten_text) == render_picture(BARS, "png", shorten_text)
    assert b"date" not in first


def test_lines_that_stand_out_are_in_the_legend():
    many = [line(f"line {n}", n, n + 1) for n in range(30)]
    many[3] = line("line 3", 0, np.nan)
    assert select_prominent_lines(many, 3) == [3, 28, 29]
    drawn = draw_chart(chart_of(*many), shorten_text)
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == ["line 3", *(f"line {n}" for n in range(22, 30)), "21 more lines", "NaN"]
    (others,) = drawn.axes[0].collections
    assert len(others.get_paths()) == 21


def test_long_labels_stay_apart():
    """Law: names that differ in the middle are not shortened to the same text."""
    long = [line("module." * 20 + f"{name}." + "module." * 20, 1) for name in "ab"]
    drawn = draw_chart(chart_of(*long), shorten_text)
    first, second = (text.get_text() for text in drawn.legends[0].get_texts())
    assert first != second
    assert max(len(first), len(second)) <= 60


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1e300])
@pytest.mark.parametrize("scale", ["auto", "log", "linear"])
def test_one_value_can_be_drawn(value, scale):
    drawn = draw_chart(chart_of(line("only", value)), shorten_text, scale=scale)
    assert drawn.axes[0].get_xlim() == (-1, 1)
    assert bool(drawn.legends) == (not np.isfinite(value))


def test_heat_map_has_values_and_flags_as_images():
    drawn = draw_chart(MAP, shorten_text)
    values, flags = (np.ma.asarray(each.get_array()) for each in drawn.axes[0].get_images())
    assert values.tolist() == [[1, 2, None], [4, None, None]]
    assert flags.tolist() == [[None, None, None], [INFINITE, NOT_A_NUMBER, None]]
    assert [tick.get_text() for tick in drawn.axes[0].get_yticklabels()] == ["0", "3"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "NaN", "infinite", "no value"
    ]  # fmt: skip


def test_bars_have_counts_and_edges():
    drawn = draw_chart(BARS, shorten_text)
    (bars,) = drawn.axes[0].patches
    assert isinstance(bars, StepPatch)
    counts, edges, _ = bars.get_data()
    assert (counts.tolist(), edges.tolist()) == ([3, 9000], [0, 1, 2])
    assert drawn.axes[0].get_yscale() == "log"


def test_page_is_escaped_and_fetches_nothing():
    picture = render_picture(MARKUP, "svg", shorten_text).decode()
    page = render_page(MARKUP, picture, "rankdump plot 'a <script>' -o x.html")
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "<pre>rankdump plot &#x27;a &lt;script&gt;&#x27; -o x.html</pre>" in page
    assert "<h1>max of &lt;b&gt;</h1>" in page
    assert page.count("<svg") == 1
    assert not re.findall(r"""(?:src|href)=["']?(?!["']?#|data:)[^"'> ]*""", page)


def test_page_has_a_row_for_each_line_rank_or_bar():
    titles, rows = make_value_table(MARKUP)
    assert dict(zip(titles, rows[0], strict=True)) == {
        "line": "_$x_{1}$ <b> & \"'", "first": "1", "last": "3", "smallest": "1", "largest": "3",
        "largest at iteration": "20", "NaN": "1", "infinite": "0",
        "first not finite at iteration": "10",
    }  # fmt: skip
    titles, rows = make_value_table(MAP)
    assert rows[0] == ["rank 0", "1", "2", "6", "0", "0", "-"]
    assert rows[1] == ["rank 3", "4", "4", "5", "1", "1", "5"]
    assert make_value_table(BARS)[1] == [["0", "1", "3"], ["1", "2", "9,000"]]
