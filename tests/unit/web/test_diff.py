"""Page of a comparison: its sentences, rows by verdict, and the process that compares."""

from __future__ import annotations

import html
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from support.diff_reports import layered, outcome, report, row
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder
from support.web_trees import LINEAR, MARKUP, fill_tree

from rankdump._analysis.compare.report import TensorVerdict
from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide
from rankdump._web import comparison_view
from rankdump._web.comparison_process import (
    ComparisonProcesses,
    ComparisonRequest,
    ComparisonState,
)
from rankdump._web.comparison_view import ComparisonView, RowSelection

EVERY = frozenset(verdict.value for verdict in TensorVerdict)


def fill_pair(folder: Path) -> tuple[Path, Path]:
    """Write two trees: the second operator differs, and the third is in one alone."""
    roots = folder / "run", folder / "reference"
    for apart, root in zip((0.5, 0.0), roots, strict=True):
        tree = TreeBuilder(root)
        for iteration in range(2):
            values = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + iteration
            tree.tensor(0, iteration, LINEAR, values, side=TensorSide.INPUT, tabled=True)
            tree.tensor(0, iteration, LINEAR, values + apart, tabled=True)
            if apart:
                tree.tensor(0, iteration, MARKUP, values, tabled=True)
            tree.complete(0, iteration)
    return roots


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fill_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def processes() -> Iterator[ComparisonProcesses]:
    made = ComparisonProcesses()
    yield made
    made.close()


def wait_for_answer(look: Callable[[], ComparisonState]) -> ComparisonState:
    while (found := look()).state in ("waiting", "running"):
        time.sleep(0.01)
    return found


def test_nothing_is_compared_before_it_is_asked_for(pair, open_pages):
    client = open_pages(*pair)
    assert client.get("/diff.json").json()["comparison"] is None
    page = client.get("/diff").text
    assert all(str(root) in page for root in pair)


def test_diff_says_what_the_command_says(pair, open_pages, capsys):
    body = open_pages(*pair).get("/diff.json", params={"a": 0, "b": 1}).json()
    summary = body["comparison"]["summary"]
    assert summary["level"] == "fault"
    assert run_command_line(["diff", *map(str, pair)]) == 1
    printed = capsys.readouterr().out
    assert summary["sentence"].startswith("the difference starts at encoder.0/Linear-op0")
    for line in (summary["sentence"], *summary["origin_lines"], summary["settings"]):
        assert line in printed
    # Its first pair is that of the input, which agrees.
    assert summary["origin_row"] == 0
    counts = {each["verdict"]: each["pairs"] for each in summary["counts"]}
    assert counts == {"different": 2, "unmatched": 2, "same": 2}
    assert "6 pairs of tensors: 2 different, 2 unmatched, 2 same" in printed


def test_rows_lead_to_both_tensors(pair, open_pages):
    client = open_pages(*pair)
    body = client.get("/diff.json", params={"a": 0, "b": 1, "verdicts": "different"}).json()
    rows = body["comparison"]["excerpt"]["rows"]
    assert [(each["iteration"], each["place"], each["rule"]) for each in rows] == [
        (0, "output.0", "exact"),
        (1, "output.0", "exact"),
    ]
    assert (rows[0]["max_absolute"], rows[0]["is_suspect"]) == (0.5, True)
    text = html.unescape(client.get("/diff", params={"a": 0, "b": 1}).text)
    asked = {"name": LINEAR, "side": "output", "slot": 0, "rank": 0, "iteration": 1}
    for address in (f"/tensor?{urlencode(asked)}", f"/tensor?{urlencode(asked | {'tree': 1})}"):
        assert f'href="{address}"' in text
        assert client.get(address).status_code == 200


def test_names_of_both_sides_are_escaped(pair, open_pages):
    text = open_pages(*pair).get("/diff", params={"a": 0, "b": 1}).text
    assert "<script>alert" not in text
    assert 'alert("x")' in html.unescape(text)


def test_two_iterations_of_one_tree(pair, open_pages):
    client = open_pages(pair[0])
    asked = {"a": 0, "b": 0, "iteration_a": 1, "iteration_b": 0}
    body = client.get("/diff.json", params=asked).json()
    found = body["comparison"]["excerpt"]["rows"][0]
    assert (found["a"]["iteration"], found["b"]["iteration"]) == (1, 0)
    asked["iteration_b"] = 9
    failed = client.get("/diff.json", params=asked).json()["comparison"]
    assert failed["state"] == "failed"
    assert "iteration" in failed["failure"]
    assert 'role="alert"' in client.get("/diff", params=asked).text


def test_noise_run_gives_the_tolerance(tmp_path, open_pages):
    run, reference = fill_pair(tmp_path)
    noise = tmp_path / "noise"
    shutil.copytree(run, noise)
    client = open_pages(run, reference, noise)
    body = client.get("/diff.json", params={"a": 0, "b": 1, "noise": 2, "verdicts": "normal"})
    comparison = body.json()["comparison"]
    assert str(noise) in comparison["summary"]["settings"]
    assert comparison["excerpt"]["total"] == 2
    assert comparison["excerpt"]["rows"][0]["error_ratio"] == pytest.approx(1.0)


def test_chips_add_and_remove_a_verdict(pair, open_pages):
    client = open_pages(*pair)
    chips = client.get("/diff.json", params={"a": 0, "b": 1}).json()["chips"]
    assert [(each["verdict"], each["is_chosen"]) for each in chips] == [
        ("different", True),
        ("unmatched", True),
        ("same", False),
    ]
    assert chips[2]["toggled"].split(",")[-1] == "same"
    more = client.get("/diff.json", params={"a": 0, "b": 1, "verdicts": chips[2]["toggled"]})
    assert more.json()["comparison"]["excerpt"]["total"] == 6


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("a=0", "parameter b: '' is not allowed"),
        ("a=0&b=0", "another tree, rank_b or iteration_b than those of a"),
        ("a=0&b=2", "a whole number from 0 to 1"),
        ("a=0&b=1&verdicts=wrong", "words with commas, of nan, shape, different"),
        ("a=0&b=1&row=x", "parameter row"),
        ("a=0&b=1&left=1", "no such parameter"),
    ],
)
def test_wrong_parameters_are_one_line(pair, open_pages, parameters, words):
    answer = open_pages(*pair).get(f"/diff.json?{parameters}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]


# -- rows of a report


def test_pages_of_rows_come_one_behind_the_other(monkeypatch):
    monkeypatch.setattr(comparison_view, "PAGE_ROWS", 3)
    bad, good = TensorVerdict.DIFFERENT, TensorVerdict.SAME
    rows = [row(at, "output.0", outcome(bad if at % 4 == 2 else good)) for at in range(10)]
    view = ComparisonView(report(rows))
    numbers: list[int] = []
    starts: list[int] = []
    at: int | None = 0
    while at is not None:
        found = view.select(RowSelection(EVERY, at))
        starts.append(at)
        assert (found.total, found.previous_row) == (10, starts[-2] if starts[1:] else None)
        numbers += [each.number for each in found.rows]
        at = found.next_row
    assert numbers == list(range(10))
    assert starts == [0, 3, 6, 9]


def test_next_and_previous_difference():
    bad, good = TensorVerdict.NAN, TensorVerdict.SAME
    view = ComparisonView(
        report([row(at, "output.0", outcome(bad if at in (2, 6) else good)) for at in range(9)])
    )

    def find(at: int, verdicts: frozenset[str] = EVERY) -> tuple[int | None, int | None]:
        found = view.select(RowSelection(verdicts, at))
        return found.previous_difference, found.next_difference

    assert [find(at) for at in (0, 2, 4, 6, 8)] == [
        (None, 2),
        (None, 6),
        (2, 6),
        (2, None),
        (6, None),
    ]
    assert find(0, frozenset({"same"})) == (None, None)
    assert view.select(RowSelection(EVERY, 99)).rows == ()


def test_summary_counts_many_sentences():
    found = ComparisonView(report(layered(), notes=tuple(f"note {at}" for at in range(90))))
    notes = found.summarize().notes
    assert (len(notes.shown), notes.total) == (40, 90)


# -- the process


@pytest.mark.process
def test_comparison_runs_beside_the_pages(pair, open_pages, processes):
    """The first answer says how far it is; the part of the page asks again until it is done."""
    client = open_pages(*pair, comparisons=processes)
    asked = {"a": 0, "b": 1}
    first = client.get("/diff", params=asked).text
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert "The trees are read" in first
    assert 'hx-trigger="load delay' in first
    other: Any = client.get("/diff.json", params={"a": 1, "b": 0}).json()["comparison"]
    assert other["state"] == "waiting"
    assert client.get("/tensors").status_code == 200
    os.kill(child.pid, signal.SIGCONT)

    def look() -> ComparisonState:
        request = ComparisonRequest(*pair)
        return processes.look(request, RowSelection(EVERY, 0))

    found = wait_for_answer(look)
    assert found.summary is not None
    assert found.excerpt is not None
    assert found.summary.row_count == found.excerpt.total == 6
    part = client.get("/diff", params=asked, headers={"hx-request": "true"}).text
    assert "<html" not in part
    assert "hx-trigger" not in part
    assert "the difference starts at" in part


@pytest.mark.process
def test_comparison_is_kept_until_a_tree_changes(tmp_path, processes):
    request = ComparisonRequest(*fill_pair(tmp_path))

    def look(at: int = 0) -> ComparisonState:
        return processes.look(request, RowSelection(EVERY, at))

    assert wait_for_answer(look).state == "ready"
    assert look().state == "ready"
    (request.a / "rank_9").mkdir()
    # Rows of a later page are still those of the same report.
    assert look(1).state == "ready"
    assert look().state == "running"
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    failed = wait_for_answer(look)
    assert (failed.state, "more memory" in failed.failure) == ("failed", True)
    # It is told once; then it is tried again.
    assert look().state == "running"


@pytest.mark.process
def test_comparison_that_is_late_ends(pair):
    processes = ComparisonProcesses(timeout_s=0.001)
    try:
        request = ComparisonRequest(*pair)
        found = wait_for_answer(lambda: processes.look(request, RowSelection(EVERY, 0)))
        assert (found.state, "longer than 0.001 s" in found.failure) == ("failed", True)
    finally:
        processes.close()
    assert multiprocessing.active_children() == []


def test_tree_that_is_gone_is_one_line(tmp_path, open_pages, processes):
    roots = fill_tree(tmp_path / "one"), fill_tree(tmp_path / "two")
    client = open_pages(*roots, comparisons=processes)
    shutil.rmtree(roots[1])
    answer = client.get("/diff.json", params={"a": 0, "b": 1})
    assert (answer.status_code, "not there any more" in answer.json()["error"]) == (422, True)


# -- pairs by hand, tolerances and both sides


def fill_renamed(folder: Path) -> tuple[Path, Path]:
    """Write two trees whose second operator has other names, types and shapes in each."""
    roots = folder / "run", folder / "reference"
    for root, name, shape in zip(roots, (RENAMED_A, RENAMED_B), ((4, 6), (6, 4, 1)), strict=True):
        tree = TreeBuilder(root)
        for iteration in range(2):
            values = np.arange(24, dtype=np.float32).reshape(shape)
            tree.tensor(0, iteration, LINEAR, values.reshape(4, 6), tabled=True)
            tree.tensor(0, iteration, name, values, tabled=True)
            tree.complete(0, iteration, world_size=1)
    return roots


RENAMED_A = 'Default/network-Net/mlp-Old, "first"/GeLU-op0'
RENAMED_B = "Default/network-Net/<i>ffn</i>-New/QuickGelu-op0"


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fill_renamed(tmp_path_factory.mktemp("renamed"))


def read_counts(body: Any) -> dict[str, int]:
    return {each["verdict"]: each["pairs"] for each in body["comparison"]["summary"]["counts"]}


def test_pairs_chosen_by_hand_are_compared_and_downloaded(renamed, open_pages, tmp_path, capsys):
    """One operator of each side is picked; the file does the same for the command."""
    client = open_pages(*renamed)
    asked: dict[str, Any] = {"a": 0, "b": 1}
    body = client.get("/diff.json", params=asked).json()
    assert read_counts(body) == {"unmatched": 4, "same": 2}
    rows = body["comparison"]["excerpt"]["rows"]
    names = {row["name_a"] or None for row in rows} - {None}, {row["name_b"] for row in rows} - {""}
    assert names == ({RENAMED_A}, {RENAMED_B})
    page = client.get("/diff", params=asked | {"pick_a": RENAMED_A}).text
    assert f'name="pick_b" value="{html.escape(RENAMED_B, quote=False)}"' in page
    assert 'name="pick_a" value="Default/network-Net/mlp' in page
    picked = asked | {"pick_a": RENAMED_A, "pick_b": RENAMED_B}
    body = client.get("/diff.json", params=picked).json()
    assert read_counts(body)["same"] == 2
    assert "unmatched" not in read_counts(body)
    assert body["request"]["pairs"] == [[RENAMED_A, RENAMED_B]]
    assert (body["request"]["pick_a"], body["request"]["pick_b"]) == ("", "")
    page = html.unescape(client.get("/diff", params=picked).text)
    assert "Paired by hand" in page
    address = next(
        part.partition('" download')[0]
        for part in page.split('href="')
        if part.startswith("/diff/mapping.json")
    )
    answer = client.get(address)
    assert answer.headers["content-disposition"] == 'attachment; filename="mapping.json"'
    assert answer.json() == {RENAMED_A: RENAMED_B}
    # The pairs alone are the same state, and a pair can be taken out again.
    pairs = answer.text
    same = client.get("/diff.json", params=asked | {"pairs": pairs}).json()
    assert read_counts(same) == read_counts(body)
    without = client.get("/diff.json", params=asked | {"pairs": pairs, "drop": 0}).json()
    assert read_counts(without) == {"unmatched": 4, "same": 2}
    (tmp_path / "mapping.json").write_bytes(answer.content)
    command = ["diff", *map(str, renamed), "--map", str(tmp_path / "mapping.json"), "--json"]
    run_command_line(command)
    printed = json.loads(capsys.readouterr().out)["counts"]
    assert {name: count for name, count in printed.items() if count} == read_counts(body)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"pairs": "{"}, "a JSON object of names of a"),
        ({"pairs": '{"a": 1}'}, "a JSON object of names of a"),
        ({"pairs": '{"a": "\\ud800"}'}, "a JSON object of names of a"),
        ({"pairs": "no comma"}, "lines name_a,name_b"),
        ({"pick_a": "x" * 2500, "pick_b": "y" * 2500}, "rankdump diff --map"),
        ({"rtol": "-1"}, "a number of 0 or more"),
        ({"atol": "nan"}, "a number of 0 or more"),
        ({"tolerance": "norm"}, "PATTERN=ERROR"),
        ({"tolerance": "norm=inf"}, "an error of 0 or more"),
        ({"unshard": "yes"}, "allowed: 1, 0"),
    ],
)
def test_wrong_pairs_and_tolerances_are_one_line(renamed, open_pages, parameters, words):
    answer = open_pages(*renamed).get("/diff.json", params={"a": 0, "b": 1} | parameters)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text


def test_tolerances_are_those_of_the_command(pair, open_pages):
    """The page says which tolerance decided about each pair."""
    client = open_pages(*pair)

    def judge(**more: Any) -> tuple[dict[str, int], set[str], str]:
        asked = {"a": 0, "b": 1, "verdicts": "normal,suspicious,different", **more}
        body = client.get("/diff.json", params=asked).json()
        found = body["comparison"]
        judges = {row["judged_by"] for row in found["excerpt"]["rows"]}
        return read_counts(body), judges, found["summary"]["settings"]

    counts, judges, settings = judge()
    assert (counts["different"], judges) == (2, {"0.0001 + 0.0001 * |b|"})
    counts, judges, settings = judge(rtol="0", atol="0.5")
    assert (counts["normal"], judges) == (2, {"0.5 + 0 * |b|"})
    assert "normal is within 0.5 + 0 * |b|" in settings
    asked = {"a": 0, "b": 1, "tolerance": "*Linear*=1\r\n*nothing-like-it=2"}
    failed = client.get("/diff.json", params=asked).json()["comparison"]
    assert (failed["state"], "nothing-like-it" in failed["failure"]) == ("failed", True)
    counts, judges, settings = judge(tolerance="*Linear*=1")
    assert (counts["normal"], judges) == (2, {"tolerance 1 for *Linear*"})
    assert (
        "by tolerance 1 for *Linear*"
        in client.get(
            "/diff", params={"a": 0, "b": 1, "verdicts": "normal", "tolerance": "*Linear*=1"}
        ).text
    )


def test_both_sides_of_a_pair_are_shown_together(pair, open_pages):
    client = open_pages(*pair)
    asked = {"a": 0, "b": 1, "verdicts": "different"}
    row = client.get("/diff.json", params=asked).json()["comparison"]["excerpt"]["rows"][0]
    opened = asked | {"opened": row["number"]}
    facts = client.get("/diff.json", params=opened).json()["comparison"]["excerpt"]["facts"]
    known = {each["name"]: (each["a"], each["b"]) for each in facts}
    assert known["shape"] == ("2 x 3 x 4", "2 x 3 x 4")
    assert known["digest"][0] != known["digest"][1]
    assert known["max"] == (23.5, 23.0)
    text = client.get("/diff", params=opened).text
    assert text.count('id="opened"') == 1
    assert "Both sides of encoder.0/Linear-op0" in text
    assert 'id="opened"' not in client.get("/diff", params=asked | {"opened": 10**9}).text


# -- links to tensors


def fill_layouts(folder: Path, *, has_elements: bool) -> tuple[Path, Path]:
    """Write a job on two ranks, which have shards, stages and copies, and the same on one rank."""
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    names = LINEAR, MARKUP, "Default/network-Net/head-Linear/Linear-op0"

    def put(tree: TreeBuilder, rank: int, name: str, values: Any, **more: Any) -> None:
        (tree.tensor if has_elements else tree.row)(rank, 0, name, values, **more)

    split = TreeBuilder(folder / "split")
    for rank in (0, 1):
        shape = shard_rows(rank, 2 * rank, (4, 3))
        put(split, rank, LINEAR, whole[2 * rank : 2 * rank + 2] + 1, tensor_layout=shape)
        put(split, rank, MARKUP, whole + 1)
        if rank == 1:  # a stage that the first rank does not have
            put(split, rank, names[2], whole + 1)
        split.complete(rank, 0)
    alone = TreeBuilder(folder / "alone")
    for name in names:
        put(alone, 0, name, whole)
    alone.complete(0, 0, world_size=1)
    return split.root, alone.root


@pytest.mark.parametrize("has_elements", [True, False])
@pytest.mark.parametrize("turn", [1, -1])
def test_links_of_joined_rows_lead_to_tensors(tmp_path, open_pages, has_elements, turn):
    client = open_pages(*fill_layouts(tmp_path, has_elements=has_elements)[::turn])
    asked = {"a": 0, "b": 1, "unshard": 1, "verdicts": ",".join(sorted(EVERY))}
    body = client.get("/diff.json", params=asked).json()["comparison"]
    assert body["state"] == "ready", body
    assert len(body["excerpt"]["rows"]) == 3
    page = html.unescape(client.get("/diff", params=asked).text)
    links = {part.partition('"')[0] for part in page.split('href="/tensor?')[1:]}
    assert len(links) >= 6
    for link in links:
        assert client.get(f"/tensor?{link}").status_code == 200, link
