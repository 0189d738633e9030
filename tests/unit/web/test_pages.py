"""Pages of a small tree: what they show, their JSON, and what they refuse."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.foreign_dumps import write_dump
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder
from support.web_trees import (
    BAD_PLACE,
    GRADIENT,
    LINEAR,
    LONG,
    MARKUP,
    SCRIPT,
    fill_tree,
)

from rankdump._analysis import tree_overview
from rankdump._analysis.reader import coordinator_files
from rankdump._analysis.table.table_files import TABLE_FOLDER
from rankdump._analysis.table_index import index_tree
from rankdump._cli.command_group import run_command_line
from rankdump._web import dump_source, tensor_list, tensor_page
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.page_kinds import MAX_NUMBER
from rankdump._web.query_process import QueryProcess

PATHS = ("/", "/tensors", "/modules", "/ranks", "/order", "/diff", "/blackbox", "/query")


class PageReader(HTMLParser):
    """Text, links and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.inline: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.inline += [name for name in named if name == "style" or name.startswith("on")]
        self.inline += ["script"] * (tag == "script" and "src" not in named)
        self.links += [value for name in ("href", "src") if (value := named.get(name))]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(client: Any, path: str, **parameters: Any) -> PageReader:
    answer = client.get(f"{path}?{urlencode(parameters)}" if parameters else path)
    assert answer.status_code == 200, answer.text
    return PageReader(answer.text)


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": LINEAR, "side": "output", "slot": 0} | more


def test_overview_names_the_first_bad_tensor(pages):
    body = pages.get("/overview.json").json()
    rank, iteration = BAD_PLACE
    assert body["verdict"]["level"] == "fault"
    where = f"rank {rank}, iteration {iteration}: output 0 of encoder.0/Linear-op0"
    assert body["verdict"]["text"] == f"first value that is not finite: {where}"
    # The NaN goes on into the operator that takes it.
    assert [(each["tensor"]["name"], each["tensor"]["rank"]) for each in body["bad"]] == [
        (LINEAR, 1),
        (MARKUP, 1),
    ]
    assert body["total"]["expected"] == 2 * 3 * 5
    assert [each["kind"] for each in body["findings"]] == ["late"]


def test_overview_of_a_tree_without_a_fault(tmp_path, open_pages):
    """One rank alone has no NaN, and an order with a finding; without it all is well."""
    root = fill_tree(tmp_path / "tree", ranks=1)
    shutil.rmtree(root / "global_execution_order")
    body = open_pages(root).get("/overview.json").json()
    assert body["verdict"]["level"] == "good"
    assert body["verdict"]["text"].startswith("all 15 tensors that the plan selects")


def test_way_from_the_overview_to_the_source_line(pages):
    """Each page links to the next one: two clicks."""
    first = next(link for link in read(pages, "/").links if link.startswith("/tensor?"))
    page = PageReader(pages.get(first).text)
    assert "train.py:2" in page.text
    assert all(line.strip() in page.text for line in SCRIPT.splitlines())


def test_all_links_of_all_pages_lead_somewhere(pages):
    """Every address that a page has answers with a page, a picture or a file."""
    seen: set[str] = set(PATHS)
    waiting: list[str] = list(PATHS)
    while waiting and len(seen) < 120:
        answer = pages.get(waiting.pop())
        assert answer.status_code == 200, answer.url
        if answer.headers["content-type"].startswith("text/html"):
            links = {link.partition("#")[0] for link in PageReader(answer.text).links}
            new = sorted(link for link in links if link.startswith("/") and link not in seen)
            seen.update(new)
            waiting += new
    assert len(seen) > 60


def test_pages_have_no_script_or_style_of_their_own(indexed):
    for path in (*PATHS, f"/tensor?{urlencode(tensor())}", "/nothing"):
        page = PageReader(indexed.get(path).text)
        assert page.inline == [], path
        assert all(link.startswith(("/", "#")) for link in page.links), path


def test_names_are_escaped(indexed):
    """A name with markup is text, wherever it is."""
    own = f"/tensor?{urlencode(tensor(name=MARKUP, side='input'))}"
    for path in ("/", "/tensors", "/modules", "/order", own):
        text = indexed.get(path).text
        assert "<script>alert" not in text, path
    assert MARKUP in read(indexed, "/tensor", **tensor(name=MARKUP, side="input")).text
    assert "came late <b>" in read(indexed, "/order").text
    assert "<b>" not in indexed.get("/order").text


def test_long_names_keep_pages_small(indexed):
    for path, parameters in (("/tensors", {}), ("/tensor", tensor(name=LONG)), ("/modules", {})):
        assert len(indexed.get(f"{path}?{urlencode(parameters)}").content) < 100_000
    assert LONG[:2000] in html.unescape(indexed.get(f"/tensor?{urlencode(tensor(name=LONG))}").text)


# -- lists


def test_list_goes_on_behind_its_last_row(pages, monkeypatch):
    """All rows come once, in the order of execution, with pages of any size."""
    whole = pages.get("/tensors.json").json()
    assert (whole["total"], whole["next_after"]) == (30, "")
    monkeypatch.setattr(tensor_list, "PAGE_ROWS", 7)
    rows: list[Any] = []
    after = ""
    while True:
        page = pages.get("/tensors.json", params={"after": after}).json()
        rows += page["rows"]
        after = page["next_after"]
        if not after:
            break
    assert rows == whole["rows"]
    places = [(row["iteration"], row["rank"], row["position"]) for row in rows]
    assert places == sorted(places)


def test_filters_of_the_list(pages):
    def count(**parameters: Any) -> int:
        return pages.get("/tensors.json", params=parameters).json()["total"]

    assert count(search="LINEAR") == 12
    assert count(search="%") == 0
    assert count(rank=1, iteration=2) == 5
    assert count(side="input") == 12
    assert count(nonfinite=1) == 2
    assert count(search="nothing like it") == 0


def test_list_shows_what_its_twin_has(pages):
    for parameters in ({}, {"nonfinite": 1}, {"rank": 0, "search": "encoder"}):
        body = pages.get("/tensors.json", params=parameters).json()
        page = read(pages, "/tensors", **parameters)
        assert f"Tensors {body['total']}" in page.text
        for row in body["rows"]:
            assert row["short_name"][:300] in page.text
        assert sum(link.startswith("/tensor?") for link in page.links) == len(body["rows"])


# -- one tensor


def test_tensor_shows_its_series_over_ranks(pages):
    body = pages.get("/tensor.json", params=tensor(statistic="max", rank=0, iteration=2)).json()
    series = body["series"]
    assert series["ranks"] == [0, 1]
    assert [line["values"] for line in series["lines"]] == [[1.0, 2.0], [2.0, "nan"], [3.0, 4.0]]
    assert (body["row"]["rank"], body["row"]["iteration"]) == (0, 2)
    page = read(pages, "/tensor", **tensor(statistic="max", rank=0, iteration=2))
    assert "234" in "".join(page.text.split())


def test_tensor_without_a_place_is_that_which_is_not_finite(pages):
    row = pages.get("/tensor.json", params=tensor()).json()["row"]
    assert ((row["rank"], row["iteration"]), row["nonfinite"]) == (BAD_PLACE, True)


def test_tensor_has_its_elements(pages):
    asked = tensor(side="input", rank=1, iteration=0)
    elements = pages.get("/tensor.json", params=asked).json()["elements"]
    assert elements["shape"] == [2, 3, 4]
    expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1
    assert elements["slice"]["cells"] == expected[0].tolist()
    other = pages.get("/tensor.json", params=asked | {"rows": 2, "columns": 0, "at": "0,2,0"})
    assert other.json()["elements"]["slice"]["cells"] == expected[:, 2, :].T.tolist()
    assert sum(elements["histogram"]["counts"]) == 24


def test_tensor_is_downloaded_as_npy(pages, tmp_path):
    answer = pages.get("/tensor/elements.npy", params=tensor(side="input", rank=1, iteration=0))
    assert '; filename="encoder.0_Linear-op0.' in answer.headers["content-disposition"]
    (tmp_path / "found.npy").write_bytes(answer.content)
    found = np.load(tmp_path / "found.npy")
    assert (found == np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1).all()


def test_slice_is_drawn(pages):
    answer = pages.get("/tensor/slice.png", params=tensor(side="input", rank=1, iteration=0))
    assert answer.headers["content-type"] == "image/png"
    assert answer.content[16:24] == (4).to_bytes(4, "big") + (3).to_bytes(4, "big")


def test_tensor_names_who_made_and_who_took_it(pages):
    body = pages.get("/tensor.json", params=tensor(rank=0, iteration=0)).json()
    assert [each["name"] for each in body["consumers"]] == [MARKUP]
    body = pages.get("/tensor.json", params=tensor(name=MARKUP, side="input", rank=0, iteration=0))
    assert [each["name"] for each in body.json()["producers"]] == [LINEAR]
    assert [each["position"] for each in body.json()["neighbours"]] == [0, 1, 2, 3, 4]


def test_statistics_without_elements_say_so(pages):
    body = pages.get("/tensor.json", params=tensor(name=GRADIENT)).json()
    assert body["elements"] is None
    assert "statistics of this tensor, and no elements" in body["elements_note"]
    assert pages.get("/tensor/slice.png", params=tensor(name=GRADIENT)).status_code == 404


def test_large_tensor_is_not_read(pages, monkeypatch):
    monkeypatch.setattr(tensor_page, "MAX_ELEMENT_BYTES", 10)
    body = pages.get("/tensor.json", params=tensor()).json()
    assert "a page reads at most 10 B" in body["elements_note"]
    assert pages.get("/tensor/elements.npy", params=tensor()).status_code == 503


def test_shards_are_joined_from_all_ranks(tmp_path, open_pages):
    tree = TreeBuilder(tmp_path / "tree")
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    for rank, rows in ((0, slice(0, 3)), (1, slice(3, 5))):
        shape = shard_rows(rank, rows.start, (5, 3))
        tree.tensor(rank, 0, LINEAR, whole[rows], tabled=True, tensor_layout=shape)
        tree.complete(rank, 0)
    client = open_pages(tree.root)
    asked = tensor(rank=1, iteration=0)
    alone, joined = (
        client.get("/tensor.json", params=asked | {"joined": flag}).json() for flag in (0, 1)
    )
    assert alone["elements"]["slice"]["cells"] == whole[3:].tolist()
    assert joined["elements"]["slice"]["cells"] == whole.tolist()
    page = read(client, "/tensor", **asked)
    assert any("joined=1" in link for link in page.links if link.startswith("/tensor?"))
    assert "Shard(0)" in page.text
    assert "Shard(0)" in read(client, "/modules").text


def test_source_is_shown_only_where_it_is_the_recorded_line(tmp_path, open_pages):
    """A tree that names another file does not make the page show it."""
    root = fill_tree(tmp_path / "tree")
    (tmp_path / "train.py").write_text("secret = 1\nsecret = 2\n")
    body = open_pages(root).get("/tensor.json", params=tensor()).json()
    assert [(each["line"], each["context"]) for each in body["frames"]] == [(2, [])]
    assert "secret" not in open_pages(root).get(f"/tensor?{urlencode(tensor())}").text


# -- modules, ranks, order, query


def test_modules_are_a_hierarchy_with_the_worst_of_each(pages):
    body = pages.get("/modules.json").json()
    rows = {row["name"]: row for row in body["modules"]}
    assert (rows["encoder"]["severity"], rows["encoder"]["nonfinite"]) == ("nonfinite", 1)
    assert rows["Gradients"]["severity"] == "none"
    part = pages.get("/modules.json", params={"under": "encoder/0/Linear-op0"}).json()
    assert [(each["side"], each["nonfinite"]) for each in part["tensors"]] == [
        ("input", 0),
        ("output", 1),
    ]
    fine = pages.get("/modules.json", params={"iteration": 0, "rank": 1}).json()
    assert all(row["severity"] == "none" for row in fine["modules"])


def test_part_of_the_modules_is_loaded_alone(indexed):
    whole = indexed.get("/modules", params={"under": "encoder"}).text
    part = indexed.get("/modules", params={"under": "encoder"}, headers={"hx-request": "true"}).text
    assert "<html" not in part
    assert part.strip() in whole


def test_map_of_ranks_and_iterations(pages):
    body = pages.get("/ranks.json", params={"statistic": "max", "search": "linear"}).json()
    assert (body["ranks"], body["all_iterations"]) == ([0, 1], [0, 1, 2])
    expected = [[23.0, 23.0, 23.0], [24.0, "nan", 24.0]]
    assert [line["values"] for line in body["lines"]] == expected
    picture = pages.get("/ranks/map.png", params={"statistic": "nonfinite"})
    assert picture.content[16:24] == (3).to_bytes(4, "big") + (2).to_bytes(4, "big")
    counts = pages.get("/ranks.json", params={"statistic": "nonfinite"}).json()["lines"]
    assert [line["values"] for line in counts] == [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    stored = pages.get("/ranks.json", params={"statistic": "stored"}).json()["lines"]
    assert {value for line in stored for value in line["values"]} == {5.0}


def test_order_begins_at_the_finding(pages):
    body = pages.get("/order.json").json()
    assert (body["iteration"], body["entry_count"]) == (1, 5)
    (chosen,) = (row for row in body["rows"] if row["is_chosen"])
    assert (chosen["name"], chosen["kind"]) == ("Default/AllReduce-op0", "all_reduce")
    assert body["lanes"] == [0, 1]
    assert sum(bar["row"]["position"] == chosen["position"] for bar in body["bars"]) == 2
    assert len(pages.get("/order.json", params={"collectives": 1}).json()["rows"]) == 1


def test_query_shows_rows(pages):
    sql = "SELECT iteration, max(max) AS largest FROM tensors WHERE rank = 0 GROUP BY 1 ORDER BY 1"
    body = pages.get("/query.json", params={"sql": sql}).json()
    assert (body["columns"], body["has_plot"]) == (["iteration", "largest"], True)
    assert body["rows"] == [[0, 23.0], [1, 23.0], [2, 23.0]]
    assert "3 rows" in read(pages, "/query", sql=sql).text
    every = pages.get("/query.json", params={"sql": sql.replace("rank = 0", "true")}).json()
    # A NaN leaves the column one of numbers.
    assert (every["rows"][1], every["has_plot"]) == ([1, "nan"], True)


REFUSED = ("DROP TABLE tensors", "SELECT * FROM read_csv('/etc/passwd')", "x")


@pytest.mark.parametrize("sql", REFUSED)
def test_query_that_is_refused_says_why(indexed, sql):
    answer = indexed.get("/query", params={"sql": sql})
    assert answer.status_code == 400
    assert 'role="alert"' in answer.text
    assert indexed.get("/query.json", params={"sql": sql}).json()["error"]


def test_recipes_run(indexed):
    for recipe in indexed.get("/query.json").json()["recipes"]:
        assert indexed.get("/query", params={"sql": recipe["sql"]}).status_code == 200, recipe


# -- several trees, changes, damage


@pytest.mark.parametrize("name", ["debug-mode-nan", "msprobe-statistics", "msprobe-tensor"])
def test_dumps_of_other_tools_have_pages(tmp_path, open_pages, name):
    client = open_pages(write_dump(name, tmp_path))
    for path in PATHS[:4]:
        assert client.get(path).status_code == 200, path
    body = client.get("/overview.json").json()
    assert body["missing"]["total"] == 0
    # Logs of DebugMode have a norm that the table has no column for.
    is_measured = name != "debug-mode-nan"
    assert body["verdict"]["level"] == ("good" if is_measured else "unknown")
    row = client.get("/tensors.json").json()["rows"][0]
    asked = {key: row[key] for key in ("name", "side", "slot", "rank")}
    assert client.get("/tensor", params=asked).status_code == 200


def test_several_trees_keep_their_number_in_links(trees, open_pages):
    client = open_pages(trees["walked"], trees["indexed"])
    links = [link for link in read(client, "/", tree=1).links if link.startswith("/tensor?")]
    assert links
    assert all("tree=1" in link for link in links)
    answer = client.get("/", params={"tree": 2})
    assert (answer.status_code, "from 0 to 1" in answer.text) == (400, True)


def test_tree_that_changes_is_read_again(tmp_path, open_pages):
    root = fill_tree(tmp_path / "tree", iterations=1)
    index_tree(root)
    client = open_pages(root)
    assert client.get("/tensors.json").json()["total"] == 10
    other = fill_tree(tmp_path / "other", iterations=2)
    shutil.rmtree(root)
    shutil.move(other, root)
    index_tree(root)
    assert client.get("/tensors.json").json()["total"] == 20
    shutil.rmtree(root)
    answer = client.get("/tensors")
    assert (answer.status_code, "not there any more" in answer.text) == (422, True)


def test_damaged_table_is_one_line(tmp_path, open_pages):
    root = fill_tree(tmp_path / "tree")
    index_tree(root)
    for path in (root / TABLE_FOLDER).glob("tensors.*"):
        path.write_bytes(b"PAR1 no table PAR1")
    for path in ("/", "/tensors", "/modules", "/ranks"):
        answer = open_pages(root).get(path)
        assert answer.status_code == 422, path
        (line,) = re.findall(r'role="alert">([^<]*)<', answer.text)
        assert "tensors." in line
        assert "\n" not in line


def test_damaged_manifest_is_a_problem_of_the_overview(tmp_path, open_pages):
    root = fill_tree(tmp_path / "tree")
    manifest = next(root.glob("rank_0/.dump_metadata/manifest/*.json"))
    manifest.write_bytes(manifest.read_bytes()[:40])
    body = open_pages(root).get("/overview.json").json()
    assert body["verdict"]["level"] == "fault"
    assert manifest.name in body["problems"]["shown"][0]


def test_path_that_leads_out_of_the_tree_is_refused(tmp_path, open_pages, monkeypatch):
    """A table from elsewhere may name any file."""
    root = fill_tree(tmp_path / "tree")
    np.save(tmp_path / "outside.npy", np.ones(3))
    make_row = dump_source.make_row
    monkeypatch.setattr(
        dump_source, "make_row", lambda found: make_row(found | {"path": "../outside.npy"})
    )
    answer = open_pages(root).get("/tensor/elements.npy", params=tensor())
    assert (answer.status_code, "leads out of the tree" in answer.text) == (404, True)


def test_failure_of_a_page_is_one_line_without_a_traceback(indexed, monkeypatch, caplog):
    def fail(self: object, attempt: int | None) -> None:
        raise RuntimeError("something of ours")

    monkeypatch.setattr(coordinator_files.PublishedOrder, "read_last_entries", fail)
    answer = indexed.get("/order")
    assert answer.status_code == 500
    assert "something of ours" not in answer.text
    assert "something of ours" in caplog.text


def test_unknown_pages_are_one_line(indexed):
    for path in ("/nothing", "/tensor/../../etc/passwd", "/static/../application.py", "/%2e%2e/x"):
        answer = indexed.get(path)
        assert answer.status_code == 404, path
    error = indexed.get("/nothing.json").json()["error"]
    known = "/, /tensors, /modules, /ranks, /order, /diff, /blackbox, /query"
    assert error == f"no page '/nothing.json'; there are {known}"


# -- parameters


@pytest.mark.parametrize(
    ("path", "parameters", "words"),
    [
        ("/tensors", "rank=x", "parameter rank: 'x' is not allowed; allowed: a whole number"),
        ("/tensors", "rank=-1", "allowed: a whole number of at least 0"),
        ("/tensors", "rank=1&rank=2", "allowed: one value"),
        ("/tensors", "after=1-2", "iteration-rank-attempt-position"),
        ("/tensors", "side=left", "allowed: input, output"),
        ("/tensors", "wrong=1", "no such parameter; known: "),
        ("/tensors", "search=%00", "characters other than NUL"),
        ("/tensors", "search=" + "x" * 1025, "at most 1,024 characters"),
        ("/tensor", "", "parameter name"),
        ("/ranks", "statistic=sql", "nonfinite, max, min"),
    ],
)
def test_parameter_that_is_not_allowed_is_named(indexed, path, parameters, words):
    answer = indexed.get(f"{path}?{parameters}")
    assert answer.status_code == 400
    (line,) = re.findall(r'role="alert">([^<]*)<', answer.text)
    assert words in html.unescape(line)


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 3}, {"rows": 1, "columns": 1}, {"at": "0,0"}, {"at": "5,0,0"}, {"at": "x"}],
)
def test_slice_that_a_tensor_does_not_have_is_refused(indexed, wrong):
    answer = indexed.get("/tensor", params=tensor(side="input") | wrong)
    assert answer.status_code == 400
    assert next(iter(wrong)) in answer.text or "columns" in answer.text


NAMES = (
    *("search", "rank", "iteration", "side", "nonfinite", "after", "name", "slot", "statistic"),
    *("first_iteration", "first_rank", "at", "rows", "columns", "joined", "under", "around"),
    *("collectives", "sql", "tree", "x"),
    *("a", "b", "rank_b", "iteration_a", "noise", "verdicts", "row", "freeze"),
    *("job", "attempt", "base", "against", "tensors", "trace", "first", "last", "opened"),
    *("pairs", "pick_a", "pick_b", "drop", "rtol", "tolerance", "unshard", "attempt_b"),
)
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.integers(0, 3).map(str),
    st.sampled_from([LINEAR, MARKUP, "input", "output", "l2norm", "0,1", "0-0-0-0", "", "1"]),
    st.sampled_from([str(MAX_NUMBER), f"{MAX_NUMBER}-0-0-0", "\u0663", "1e3", "'; DROP", "\ud800"]),
)
FILE_PATHS = (*("/tensor/slice.png", "/ranks/map.png", "/order/trace.json", "/diff/mapping.json"),)
ALL_PATHS = tuple(
    path
    for kind in WebPages((), QueryProcess(), ComparisonProcesses()).kinds
    for path in (kind.path, kind.json_path)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    path=st.sampled_from([*ALL_PATHS, *FILE_PATHS]),
    items=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4),
)
@example("/tensor", [("name", LINEAR), ("iteration", str(MAX_NUMBER))])
@example("/order", [("around", str(MAX_NUMBER)), ("iteration", str(MAX_NUMBER))])
def test_any_query_is_a_page_or_one_line(indexed, path, items):
    query = urlencode(items, errors="surrogatepass")
    answer = indexed.get(f"{path}?{query}")
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200 and "json" in answer.headers["content-type"]:
        assert "\n" not in answer.json()["error"]


# -- run cards


def test_overview_says_of_run_cards_what_the_command_says(tmp_path, open_pages, capsys):
    """Those of all iterations, also where the difference comes late."""
    tree = TreeBuilder(tmp_path / "tree")
    for iteration in range(40):
        for rank in (0, 1):
            rate = "0.2" if (rank, iteration) == (1, 39) else "0.1"
            own = {"version": 1, "numbers": {"learning_rate.0": rate}}
            tree.row(rank, iteration, LINEAR, np.ones(3, np.float32))
            tree.complete(rank, iteration, card=own | {"digests": {"batch.0": "ab"}})
    body = open_pages(tree.root).get("/overview.json").json()
    assert run_command_line(["card", str(tree.root), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert len(findings) == 2
    for part, is_difference in (("card_differences", True), ("card_remarks", False)):
        texts = [each["text"] for each in findings if each["is_difference"] == is_difference]
        assert body[part]["shown"] == texts
    assert "in iteration 39: 0.1 on rank 0, 0.2 on rank 1" in body["verdict"]["text"]


def test_overview_says_how_many_run_cards_it_compared(tmp_path, open_pages, monkeypatch):
    monkeypatch.setattr(tree_overview, "MAX_CARD_PLACES", 4)
    tree = TreeBuilder(tmp_path / "tree")
    for iteration in range(3):
        for rank in (0, 1):
            tree.row(rank, iteration, LINEAR, np.ones(3, np.float32))
            tree.complete(rank, iteration, card={"version": 1, "revision": f"{iteration}{rank}"})
    remarks = open_pages(tree.root).get("/overview.json").json()["card_remarks"]["shown"]
    expected = "compared are the first 4 run cards of 6, up to iteration 1: rankdump card compares"
    assert remarks[-1].startswith(expected)
