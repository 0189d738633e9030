"""Trees of a job that was restarted, and of several jobs: each can be chosen in an address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from support.tree_builder import TreeBuilder
from support.web_trees import LINEAR, write_order

from rankdump._analysis.table_index import index_tree
from rankdump._cli.command_group import run_command_line
from rankdump._core.status import SessionState, SessionStatus
from rankdump._core.tree_session import (
    SESSIONS_FOLDER,
    TreeSession,
    format_tree_session,
    make_session_file_name,
)

START_US = 1_700_000_000_000_000


def fill_attempts(root: Path, *, jobs: tuple[str, ...] = ("job",)) -> Path:
    """Write two attempts of each job: iterations 0 and 1, then again 1 and 2, on two ranks."""
    root.mkdir()
    clock_us = START_US
    for number, job in enumerate(jobs):
        for attempt, iterations in enumerate(((0, 1), (1, 2))):
            tree = TreeBuilder(root, job=job, attempt=attempt, clock_us=clock_us)
            for rank in (0, 1):
                write_session(root, job, attempt, rank, clock_us)
            for iteration in iterations:
                for rank in (0, 1):
                    values = np.full((2, 3), 10 * number + attempt + 1, np.float32)
                    tree.tensor(rank, iteration, LINEAR, values)
                    tree.complete(rank, iteration, session=name_session(job, attempt, rank))
            clock_us = tree.clock_us + 1_000_000
    return root


def name_session(job: str, attempt: int, rank: int) -> str:
    return f"{job}-{attempt}-{rank}"


def write_session(root: Path, job: str, attempt: int, rank: int, started_us: int) -> None:
    status = SessionStatus(
        *(job, name_session(job, attempt, rank), rank, 2, rank, "host", 0, SessionState.CLOSED),
        attempt=attempt,
        started_us=started_us,
    )
    folder = root / SESSIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text = format_tree_session(TreeSession(status))
    (folder / make_session_file_name(status)).write_text(text)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = fill_attempts(tmp_path_factory.mktemp("attempts") / "tree")
    for attempt in (0, 1):
        write_order(root, ranks=2, iterations=2, attempt=attempt)
    return root


@pytest.fixture(params=["walked", "indexed"])
def pages(restarted, open_pages, request, tmp_path_factory) -> Any:
    if request.param == "indexed":
        index_tree(restarted)
    return open_pages(restarted)


def test_attempt_is_chosen_in_the_address(pages):
    whole = pages.get("/tensors.json").json()
    assert [(row["iteration"], row["attempt"]) for row in whole["rows"] if not row["rank"]] == [
        *((0, 0), (1, 0), (1, 1), (2, 1)),
    ]
    for attempt, iterations in ((0, [0, 1]), (1, [1, 2])):
        asked = {"attempt": attempt}
        rows = pages.get("/tensors.json", params=asked).json()["rows"]
        assert {row["attempt"] for row in rows} == {attempt}
        ranks = pages.get("/ranks.json", params=asked | {"statistic": "stored"}).json()
        assert ranks["all_iterations"] == iterations
        overview = pages.get("/overview.json", params=asked).json()
        assert (overview["iterations"], overview["tensor_count"]) == (
            f"{iterations[0]}-{iterations[1]}",
            4,
        )
        assert {each["attempt"] for each in overview["balances"]} == {attempt}
        assert overview["attempts"] == [{"job": "job", "attempt": at} for at in (0, 1)]
        order = pages.get("/order.json", params=asked).json()
        assert (order["iteration"], order["next_iteration"]) == (1, 2 if attempt else None)


def test_links_keep_the_attempt(pages):
    text = pages.get("/tensors", params={"attempt": 1, "search": "linear"}).text
    links = [part.partition('"')[0].replace("&amp;", "&") for part in text.split('href="')[1:]]
    for path in ("/", "/tensors", "/ranks", "/order", "/tensor"):
        own = [parse_qs(urlsplit(link).query) for link in links if urlsplit(link).path == path]
        assert any(each.get("attempt") == ["1"] for each in own), path
    assert '<input type="hidden" name="attempt" value="1">' in text
    # A row of the whole tree leads to its own attempt.
    row = pages.get("/tensors.json").json()["rows"][-1]
    asked = {name: row[name] for name in ("name", "side", "slot", "rank", "iteration", "attempt")}
    assert pages.get("/tensor.json", params=asked).json()["row"]["attempt"] == row["attempt"] == 1
    listed = pages.get("/tensors").text
    assert "attempt=0" in listed
    assert '<th scope="col" class="n">attempt</th>' in listed


def test_attempt_that_is_not_there_is_named(pages):
    answer = pages.get("/tensors.json", params={"attempt": 7})
    expected = "the tree has no attempt 7; known: job job, attempt 0; job job, attempt 1"
    assert (answer.status_code, answer.json()["error"]) == (404, expected)
    assert pages.get("/tensors.json", params={"job": "x"}).status_code == 404
    assert pages.get("/tensors.json", params={"attempt": "x"}).status_code == 400


def test_tree_of_one_attempt_has_no_choice(indexed):
    assert "Jobs and attempts" not in indexed.get("/tensors").text
    assert "attempt=" not in indexed.get("/tensors").text
    assert indexed.get("/tensors.json", params={"attempt": 0, "job": "job"}).json()["total"] == 30


def test_one_of_several_jobs(tmp_path, open_pages, capsys):
    root = fill_attempts(tmp_path / "tree", jobs=("first", "second"))
    client = open_pages(root)
    assert client.get("/tensors.json").json()["total"] == 16
    rows = client.get("/tensors.json", params={"job": "second", "attempt": 0}).json()["rows"]
    assert {(row["job"], row["max"]) for row in rows} == {("second", None)}
    assert client.get("/overview.json", params={"job": "first"}).json()["jobs"] == ["first"]
    assert run_command_line(["ls", str(root), "--job", "second", "--attempt", "0", "--json"]) == 0
    assert len(rows) == len(json.loads(capsys.readouterr().out)["tensors"])


def test_attempts_are_compared_and_linked(pages):
    asked = {"a": 0, "b": 0, "attempt_a": 1, "attempt_b": 0, "verdicts": "different"}
    row = pages.get("/diff.json", params=asked).json()["comparison"]["excerpt"]["rows"][0]
    assert (row["a"]["attempt"], row["b"]["attempt"], row["max_absolute"]) == (1, 0, 1.0)
    text = pages.get("/diff", params=asked).text.replace("&amp;", "&")
    assert 'name="attempt_a"' in text
    links = [part.partition('"')[0] for part in text.split('href="/tensor?')[1:]]
    assert {parse_qs(link)["attempt"][0] for link in links} == {"0", "1"}
    for link in links:
        assert pages.get(f"/tensor?{link}").status_code == 200
    refused = pages.get("/diff.json", params={"a": 0, "b": 0, "attempt_a": 1, "attempt_b": 1})
    assert refused.status_code == 400


def test_cells_of_an_attempt_lead_to_its_comparison(pages):
    asked = {"attempt": 1, "statistic": "fingerprint_differences", "tensors": "all"}
    text = pages.get("/ranks", params=asked).text.replace("&amp;", "&")
    assert "&attempt_a=1&attempt_b=1" in text
