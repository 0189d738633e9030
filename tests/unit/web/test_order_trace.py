"""Traces of the order to download: the published file, parts of it, and those made of entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.merged_order import merged
from support.trace_schema import checked_trace, flows_of, slices_of
from support.web_trees import fill_tree

from rankdump._core.events import EventKind, ProcessGroup, RankEvent
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._web import order_page
from rankdumpd.coordinator.publish.publisher import OrderPublisher

WORLD = ProcessGroup("world", (0, 1))
EPOCH_US = 1_700_000_000_000_000
ITERATION = 1


def event(at: int, start: int, end: int, kind: EventKind, **more: Any) -> RankEvent:
    span = EPOCH_US + start, EPOCH_US + end
    return RankEvent(0, ITERATION, at, at, kind.name.title(), kind, *span, **more)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose iteration 1 has two operators, a collective, and a message a rank."""
    root = fill_tree(tmp_path_factory.mktemp("trace") / "tree", iterations=2)
    for path in (root / GLOBAL_ORDER_FOLDER).iterdir():
        path.unlink()
    call: dict[str, Any] = {"group": "world", "element_count": 8, "dtype": "float32"}
    events = {
        rank: [
            event(1, rank, 10 + rank, EventKind.OPERATOR),
            event(2, 20 + rank, 30, EventKind.ALL_REDUCE, sequence=1, **call),
            event(
                *(3, 40 + rank, 50 + rank, EventKind.RECV if rank else EventKind.SEND),
                peer=1 - rank,
                **call,
            ),
        ]
        for rank in (0, 1)
    }
    order = merged(events, (WORLD,), ITERATION)
    _, problem = OrderPublisher().append(order, job_id="job", root=str(root), offsets=None)
    assert not problem
    return root


def fetch(client: Any, tmp_path: Path, **parameters: Any) -> list[dict[str, Any]]:
    answer = client.get("/order/trace.json", params={"iteration": ITERATION, **parameters})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    path = tmp_path / "trace.json"
    path.write_bytes(answer.content)
    # A part names threads in which it has nothing.
    return checked_trace(path) if not parameters else answer.json()["traceEvents"]


def test_whole_trace_is_the_published_file(published, open_pages, tmp_path):
    client = open_pages(published)
    (link,) = client.get("/order.json").json()["traces"]
    (path,) = (published / GLOBAL_ORDER_FOLDER).glob("*.trace/*")
    assert (link["graph"], link["size_bytes"]) == (0, path.stat().st_size)
    fetch(client, tmp_path)
    assert (tmp_path / "trace.json").read_bytes() == path.read_bytes()
    assert 'href="/order/trace.json?iteration=1&amp;trace=0"' in client.get("/order").text


def test_part_of_a_trace_has_its_slices_and_arrows(published, open_pages, tmp_path):
    client = open_pages(published)
    whole = fetch(client, tmp_path, trace=0, first=0)
    assert len(flows_of(whole)) == 2
    alone = fetch(client, tmp_path, rank=1)
    assert {each["pid"] for each in alone} == {1}
    assert len(slices_of(alone, "operator")) == 1
    assert flows_of(alone) == []
    position = slices_of(whole, "collective")[0]["args"]["position"]
    window = fetch(client, tmp_path, first=position, last=position)
    assert [each["pid"] for each in slices_of(window, "collective")] == [0, 1]
    assert slices_of(window, "operator") == []
    ((begin, end),) = flows_of(window)
    assert (begin["ph"], end["ph"]) == ("s", "f")
    # A send without its receive has no arrow.
    sent = slices_of(whole, "message")[0]["args"]["position"]
    assert flows_of(fetch(client, tmp_path, first=sent, last=sent)) == []


def test_entries_make_a_trace_where_none_is_published(tmp_path, open_pages):
    root = fill_tree(tmp_path / "tree")
    client = open_pages(root)
    body = client.get("/order.json").json()
    assert [each["graph"] for each in body["traces"]] == [None]
    trace = client.get("/order/trace.json", params={"iteration": 1}).json()["traceEvents"]
    slices = [each for each in trace if each["ph"] == "X"]
    assert {(each["pid"], each["cat"]) for each in slices} == {
        *((rank, cat) for rank in (0, 1) for cat in ("operator", "call")),
    }
    assert len(slices) == 4 + 2
    few = {"iteration": 1, "rank": 1, "last": body["rows"][-2]["position"]}
    some = client.get("/order/trace.json", params=few).json()["traceEvents"]
    assert {each["pid"] for each in some} == {1}
    assert {each["cat"] for each in some if each["ph"] == "X"} == {"operator"}


@pytest.mark.parametrize(
    ("parameters", "words", "status"),
    [
        ({"iteration": 77}, "the order has no iteration 77", 404),
        ({"iteration": ITERATION, "trace": 4}, "has no trace 4", 404),
        ({"iteration": "x"}, "parameter iteration", 400),
        ({"around": 1}, "no such parameter", 400),
    ],
)
def test_trace_that_is_not_there_is_one_line(published, open_pages, parameters, words, status):
    answer = open_pages(published).get("/order/trace.json", params=parameters)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True)


def test_part_that_is_too_large_says_what_to_do(published, tmp_path, open_pages, monkeypatch):
    monkeypatch.setattr(order_page, "MAX_PART_BYTES", 300)
    made = fill_tree(tmp_path / "tree")
    for root, words in ((published, "the whole iteration can be"), (made, "rankdump order /")):
        answer = open_pages(root).get("/order/trace.json", params={"iteration": 1, "first": 0})
        assert answer.status_code == 503
        assert words in answer.json()["error"]


@pytest.mark.parametrize("text", ["", "{}\n", '{"displayTimeUnit":"ms"}\nnothing\n'])
def test_damaged_trace_is_one_line(tmp_path, open_pages, text):
    root = fill_tree(tmp_path / "tree")
    folder = root / GLOBAL_ORDER_FOLDER / "execution_order_graph_0.trace"
    folder.mkdir()
    (folder / "iteration_1.json").write_text(text)
    answer = open_pages(root).get("/order/trace.json", params={"iteration": 1, "rank": 0})
    assert answer.status_code == 422
    assert "iteration_1.json, line " in answer.json()["error"]


def test_trace_that_is_a_link_out_of_the_tree_is_not_sent(tmp_path, open_pages):
    root = fill_tree(tmp_path / "tree")
    folder = root / GLOBAL_ORDER_FOLDER / "execution_order_graph_0.trace"
    folder.mkdir()
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"secret": 1}))
    (folder / "iteration_1.json").symlink_to(secret)
    answer = open_pages(root).get("/order/trace.json", params={"iteration": 1})
    assert "secret" not in answer.text
    assert answer.json()["traceEvents"]
