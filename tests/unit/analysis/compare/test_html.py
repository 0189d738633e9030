"""HTML page of a report: one file that fetches nothing."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support.diff_reports import (
    LAYERS,
    NAN,
    agreeing,
    layered,
    measures,
    origin,
    outcome,
    report,
    row,
    suspect,
)

from rankdump._analysis.compare.html_page import render_page
from rankdump._analysis.compare.html_widgets import (
    ErrorScale,
    build_error_scale,
    build_execution_axis,
    build_operator_columns,
    build_point_columns,
)
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, PairOutcome, TensorVerdict
from rankdump._analysis.compare.report_summary import summarize_operators
from rankdump._core.scope_names import format_scope_name


class Elements(HTMLParser):
    """The elements of a page, as a browser sees them: scripts are text."""

    def __init__(self, text):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.data.append(data)


def models(text):
    """The objects of the charts' library, by the names of their classes."""
    (raw,) = re.findall(r'(?s)<script type="application/json"[^>]*>(.*?)</script>', text)
    (document,) = json.loads(html.unescape(raw)).values()
    found: dict[str, list] = {}

    def gather(value):
        if isinstance(value, dict):
            if value.get("type") == "object":
                found.setdefault(value["name"], []).append(value.get("attributes", {}))
            for inner in value.values():
                gather(inner)
        elif isinstance(value, list):
            for inner in value:
                gather(inner)

    gather(document["roots"])
    return found


def columns(text, title):
    """The columns of the table that has that one."""
    (found,) = (each for each in sources(text) if title in each)
    return found


def sources(text):
    """The columns of every table and chart."""
    held = [model["data"]["entries"] for model in models(text)["ColumnDataSource"]]
    return [{name: plain(values) for name, values in entries} for entries in held]


def plain(values):
    if isinstance(values, list):
        return values
    raw = base64.b64decode(values["array"]["data"])
    return np.frombuffer(gzip.decompress(raw), values["dtype"]).tolist()


@pytest.fixture(scope="module")
def text():
    return render_page(report(), format_scope_name)


def test_page_fetches_nothing(text):
    """No element has an address outside the page, and its policy refuses any that a script has."""
    found = Elements(text).found
    for tag, attributes in found:
        for name in ("src", "href", "data", "srcset", "action"):
            assert not attributes.get(name), (tag, attributes)
    (policy,) = [a["content"] for t, a in found if t == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "@import" not in text.partition("<body")[0].rpartition("<style>")[2]


def test_page_begins_with_the_origin(text):
    said = " ".join(" ".join(Elements(text).data).split())
    after = said.partition("rankdump diff")[2].partition("rankdump diff")[2]
    assert "the difference starts at " + LAYERS[3] in after
    assert after.index(LAYERS[3]) < after.index("24 pairs of tensors")
    assert "rank 0-1, iteration 0, forward" in after
    assert "32 of 64 elements of output.0 do not" in after
    assert "/job/net.py:17 x = layer(x)" in after


def test_page_contains_the_data(text):
    tensors, operators = columns(text, "matched by"), columns(text, "worst verdict")
    assert len(tensors["place"]) == 24
    assert tensors["operator"][0] == "layers.0/Linear-op0"
    assert tensors["verdict"].count("different") == 10
    assert max(tensors["max abs"]) == 0.00123 * 6
    assert len(operators["operator"]) == 12
    assert len(models(text)["Quad"]) >= 2, "histograms"
    drawn = [len(each["x"]) for each in sources(text) if "x" in each]
    assert sorted(drawn) == [2, 6, 6], "the ring, and two ranks"


def test_page_limits_rows_and_shows_the_limit():
    rows = layered(range(20))
    small = render_page(report(rows), format_scope_name, most=110)
    verdicts = columns(small, "matched by")["verdict"]
    assert len(verdicts) == 110
    assert verdicts.count("different") == 100
    said = " ".join(Elements(small).data)
    assert "110 of 240 pairs of tensors are shown; those that disagree come first" in said
    assert "110 of 120 operators are shown" in said


def test_page_escapes_names():
    """A dump's names come from anywhere; none of them may run."""
    bad = '</script><img src="http://evil.example/x" onerror="alert(1)">$$x$$'
    rows = [
        row(0, "output.0", outcome(TensorVerdict.DIFFERENT, 0.5, bad), name=bad),
        row(1, "output.0", PairOutcome(TensorVerdict.UNMATCHED), name=bad, only="b"),
    ]
    blamed = origin(suspect(0, name_a=bad, name_b=bad, reason=bad))
    made = render_page(report(rows, a=bad, origins=(blamed,), notes=(bad,)), str)
    assert all(tag != "img" for tag, _ in Elements(made).found)
    assert columns(made, "matched by")["operator"][0] == bad


@pytest.mark.parametrize(
    "made",
    [
        agreeing(),
        report([], origins=(), rank_origins=()),
        report(
            [row(0, "output.0", PairOutcome(TensorVerdict.SHAPE), iteration=CONSTANTS_ITERATION)],
            origins=(origin(kind="nonfinite", side="b", why="no order"),),
        ),
        report(
            [
                row(
                    0,
                    "output.0",
                    PairOutcome(TensorVerdict.DIFFERENT, statistic_differences={"max": 0.5}),
                )
            ]
        ),
    ],
    ids=["agreeing", "empty", "odd", "figures"],
)
def test_page_of_a_report_without_numbers(made, caplog):
    """The library has nothing to complain about either."""
    said = " ".join(Elements(render_page(made, format_scope_name)).data)
    assert "Every call has a partner." in said
    assert not caplog.records


def test_error_scale_fits_all_errors():
    scale = build_error_scale([1e-7, 0.02, 0.0, NAN])
    assert scale == ErrorScale(-7, -1)
    assert scale.get_y(0.0) == -8
    assert scale.get_y(NAN) == scale.get_y(float("inf")) == 0
    assert scale.labels[-8] == "0"
    assert build_error_scale([]) == ErrorScale(-6, 0)


def test_only_the_page_loads_bokeh():
    """It takes half a second, which a comparison without a page does not pay."""
    code = "import sys, rankdump._cli.diff_report; sys.exit('bokeh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chart_draws_nan_at_the_level_of_no_number():
    """An operator with equal inputs whose output is nothing but NaN stands where no number does."""
    nothing = replace(outcome(TensorVerdict.NAN), measures=replace(measures(), max_absolute=NAN))
    rows = [row(0, "input.0", outcome()), row(0, "output.0", nothing)]
    called = summarize_operators(rows)
    scale = build_error_scale([each.error for each in called])
    points = build_point_columns(called, scale, build_execution_axis(called))
    assert points["y"] == [scale.unknown_level]
    assert points["error"] == ["-"]
    assert build_operator_columns(called, str)["error"] != [0.0]
