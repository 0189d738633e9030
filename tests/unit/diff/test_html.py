"""The page: one file that fetches nothing, with the report in it."""

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
from suites.diff_reports import (
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

from rankdump.cli.text import label
from rankdump.diff.html import page
from rankdump.diff.html.columns import Scale, axis_of, operator_columns, point_columns, scale_of
from rankdump.diff.summary import operators
from rankdump.diff.values import CONSTANTS, Outcome, Verdict


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
    return page(report(), label)


def test_nothing_is_fetched(text):
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


def test_it_leads_with_where_it_starts(text):
    said = " ".join(" ".join(Elements(text).data).split())
    after = said.partition("rankdump diff")[2].partition("rankdump diff")[2]
    assert "the difference starts at " + LAYERS[3] in after
    assert after.index(LAYERS[3]) < after.index("24 pairs of tensors")
    assert "rank 0-1, iteration 0, forward" in after
    assert "32 of 64 elements of output.0 do not" in after
    assert "/job/net.py:17 x = layer(x)" in after


def test_the_data_is_in_it(text):
    tensors, operators = columns(text, "matched by"), columns(text, "worst verdict")
    assert len(tensors["place"]) == 24
    assert tensors["operator"][0] == "layers.0/Linear-op0"
    assert tensors["verdict"].count("different") == 10
    assert max(tensors["max abs"]) == 0.00123 * 6
    assert len(operators["operator"]) == 12
    assert len(models(text)["Quad"]) >= 2, "histograms"
    drawn = [len(each["x"]) for each in sources(text) if "x" in each]
    assert sorted(drawn) == [2, 6, 6], "the ring, and two ranks"


def test_only_so_much_is_drawn_and_that_is_said():
    rows = layered(range(20))
    small = page(report(rows), label, most=110)
    verdicts = columns(small, "matched by")["verdict"]
    assert len(verdicts) == 110
    assert verdicts.count("different") == 100
    said = " ".join(Elements(small).data)
    assert (
        "110 of 240 pairs of tensors are shown, the first that disagree before all others" in said
    )
    assert "110 of 120 operators are shown" in said


def test_names_are_text_and_nothing_else():
    """A dump's names come from anywhere; none of them may run."""
    bad = '</script><img src="http://evil.example/x" onerror="alert(1)">$$x$$'
    rows = [
        row(0, "output.0", outcome(Verdict.DIFFERENT, 0.5, bad), name=bad),
        row(1, "output.0", Outcome(Verdict.UNMATCHED), name=bad, only="b"),
    ]
    blamed = origin(suspect(0, name_a=bad, name_b=bad, reason=bad))
    made = page(report(rows, a=bad, origins=(blamed,), notes=(bad,)), str)
    assert all(tag != "img" for tag, _ in Elements(made).found)
    assert columns(made, "matched by")["operator"][0] == bad


@pytest.mark.parametrize(
    "made",
    [
        agreeing(),
        report([], origins=(), rank_origins=()),
        report(
            [row(0, "output.0", Outcome(Verdict.SHAPE), iteration=CONSTANTS)],
            origins=(origin(kind="nonfinite", side="b", why="no order"),),
        ),
        report([row(0, "output.0", Outcome(Verdict.DIFFERENT, figures={"max": 0.5}))]),
    ],
    ids=["agreeing", "empty", "odd", "figures"],
)
def test_reports_without_numbers(made, caplog):
    """The library has nothing to complain about either."""
    said = " ".join(Elements(page(made, label)).data)
    assert "Every call has a partner." in said
    assert not caplog.records


def test_the_scale_has_room_for_all():
    scale = scale_of([1e-7, 0.02, 0.0, NAN])
    assert scale == Scale(-7, -1)
    assert scale.at(0.0) == -8
    assert scale.at(NAN) == scale.at(float("inf")) == 0
    assert scale.labels[-8] == "0"
    assert scale_of([]) == Scale(-6, 0)


def test_nobody_else_loads_the_library():
    """It takes half a second, which a comparison without a page does not pay."""
    code = "import sys, rankdump.cli.diff_report; sys.exit('bokeh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nan_beside_what_agrees_is_not_drawn_as_zero():
    """An operator with equal inputs whose output is nothing but NaN stands where no number does."""
    nothing = replace(outcome(Verdict.NAN), measures=replace(measures(), max_absolute=NAN))
    rows = [row(0, "input.0", outcome()), row(0, "output.0", nothing)]
    called = operators(rows)
    scale = scale_of([each.error for each in called])
    points = point_columns(called, scale, axis_of(called))
    assert points["y"] == [scale.unknown]
    assert points["error"] == ["-"]
    assert operator_columns(called, str)["error"] != [0.0]
