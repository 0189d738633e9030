"""The live page: its states, the stream that renews them, and orders to the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from support.job_sources import HOSTILE_JOB, ScriptedSource, make_view

from rankdump._analysis.tree_overview import OverviewLevel
from rankdump._core.caller_roles import READER_ROLE, CallerIdentity
from rankdump._core.events import Finding, FindingKind
from rankdump._core.job_control import ControlAction
from rankdump._core.status import (
    BlackBoxStatus,
    FreezeStatus,
    JobUsage,
    RankWait,
    SessionState,
    StatusView,
    view_as_json,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdump._http.http_server import CALLER_KEY
from rankdump._web import job_source, live_pages
from rankdump._web.job_source import EventStream, LiveFeed, LiveState, format_event, iter_events
from rankdump._web.live_view import MAX_RANKS_LISTED, make_live_content
from rankdump.errors import ConfigError, ForbiddenError, RejectedError, UnavailableError

from .test_pages import PageReader, read


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture(autouse=True)
def each_page_reads(monkeypatch) -> None:
    """Pages show what a test has just set."""
    monkeypatch.setattr(live_pages, "LiveFeed", partial(LiveFeed, interval_s=0.0))


@pytest.fixture
def live(open_pages, source, trees) -> TestClient:
    """Pages of a tree and of a running job."""
    return open_pages(trees["indexed"], job=source)


def make_hint(**more: Any) -> TimeoutHint:
    limit = TimeoutLimit("HCCL_EXEC_TIMEOUT", 100_000_000, "environment", (0, 1))
    values: dict[str, Any] = {
        "job_id": "train",
        "group": "dp",
        "backend": "hccl",
        "level": HintLevel.WARNING,
        "waiting": False,
        "kind": "all_reduce",
        "name": "AllReduce",
        "iteration": 2,
        "sequence": 1,
        "first_rank": 0,
        "last_rank": 1,
        "spread_us": 60_000_000,
        "dump_us": 0,
        "limit": limit,
        "limits": (limit,),
        "projected_us": 0,
        "projected_iteration": 5,
        "settings": ("HCCL_EXEC_TIMEOUT=120",),
        "reason": "rank 0 waited 60 s for rank 1",
    }
    return TimeoutHint(**values | more)


def confirm(client: TestClient, **parameters: str) -> str:
    """Return the id of the order that a page has shown."""
    answer = client.get(f"/live/confirm.json?{urlencode(parameters)}")
    assert answer.status_code == 200, answer.text
    return answer.json()["order"]["id"]


def send(client: TestClient, order: str, **more: Any) -> Any:
    return client.post("/live/order", content=urlencode({"order": order}), **more)


# The page


def test_page_shows_ranks_and_says_what_status_says(live, source):
    lost = make_view(state=SessionState.LOST, dropped=1)
    wait = RankWait("train", 0, 2, "all_reduce", "AllReduce", "dp", 3, 0, 60_000_000, absent=(1,))
    freeze = FreezeStatus("train", 7, "request", "loss looks odd", "/data/dump/blackbox/7")
    finding = Finding(FindingKind.SIZE_MISMATCH, 2, "ranks 0 and 1 differ", ())
    source.view = replace(
        lost,
        waits=(wait,),
        hints=(make_hint(),),
        order_findings=(finding,),
        black_box=BlackBoxStatus(steps=9, freezes=(freeze,)),
    )
    page = read(live, "/live")
    for words in (
        "job train has ended: 1 rank lost in iteration 2, 1 rank lost",
        "ranks 0-1: 3 tensors",
        "frozen at iteration 7: loss looks odd; rankdump faults /data/dump/blackbox/7",
        "ranks 0 and 1 differ",
        "rank 0 waited 60 s for rank 1",
        "HCCL_EXEC_TIMEOUT=120",
        "60%",
        "black box: 9 steps of ranks",
        "/data/dump",
    ):
        assert words in page.text
    assert page.inline == []


def test_twin_is_what_status_prints(live, source):
    source.view = make_view(job_id=HOSTILE_JOB)
    expected = json.loads(json.dumps(view_as_json(source.view)))
    assert live.get("/live.json").json() == expected
    assert live.get("/live", headers={"accept": "application/json"}).json() == expected


def test_hostile_names_are_text(live, source):
    source.view = make_view(job_id=HOSTILE_JOB, host="<img src=x onerror=alert(1)>")
    for path in (
        "/live",
        "/live/control?" + urlencode({"job": HOSTILE_JOB}),
        "/live/confirm?" + urlencode({"job": HOSTILE_JOB, "action": "freeze", "value": "<b>x"}),
    ):
        page = PageReader(live.get(path).text)
        assert page.inline == [], path
        assert not {"img", "b"} & set(page.tags), path
        assert "<script>alert(1)</script>" in page.text
    order = confirm(live, job=HOSTILE_JOB, action="freeze")
    assert "b" not in PageReader(send(live, order).text).tags


def test_page_without_a_job_is_unknown_and_not_listed(open_pages, trees):
    client = open_pages(trees["indexed"])
    assert "live-link" not in client.get("/").text
    assert client.get("/live").status_code == 404
    assert "/live" not in client.get("/nothing").text.partition("there are")[2]


def test_job_alone_leads_to_its_page(open_pages, source):
    client = open_pages(job=source)
    assert read(client, "/").text.count("job train runs") == 1
    answer = client.get("/tensors")
    assert (answer.status_code, "there is no tree yet" in answer.text) == (404, True)
    assert client.get("/live?tree=0").status_code == 200
    wrong = client.get("/live.json?job=x")
    assert (wrong.status_code, "no such parameter" in wrong.json()["error"]) == (400, True)


def test_tree_stays_chosen_on_the_page(open_pages, trees, source):
    client = open_pages(trees["walked"], trees["indexed"], job=source)
    assert "/tensors?tree=1" in read(client, "/live", tree=1).links
    assert "/live?tree=1" in read(client, "/tensors", tree=1).links


def test_tree_of_the_job_is_one_click_away(open_pages, trees, source):
    client = open_pages(trees["walked"], trees["indexed"], job=source)
    source.view = replace(source.view, roots=("/data/dump", str(trees["indexed"])))
    links = read(client, "/live").links
    assert [link for link in links if link.startswith("/blackbox?")] == ["/blackbox?tree=1"]


@pytest.mark.parametrize(
    ("view", "level", "words"),
    [
        (StatusView(), OverviewLevel.UNKNOWN, "no rank has opened a session"),
        (
            StatusView(usage=(JobUsage("before", 1),)),
            OverviewLevel.UNKNOWN,
            "no rank has been connected since this agent started",
        ),
        (make_view(), OverviewLevel.GOOD, "job train runs: 2 ranks open, latest iteration 2"),
        (make_view(iterations=0), OverviewLevel.GOOD, "job train runs: 2 ranks open"),
        (make_view(dropped=1), OverviewLevel.WARNING, "job train runs"),
        (replace(make_view(), hints=(make_hint(),)), OverviewLevel.WARNING, "job train runs"),
        (make_view(state=SessionState.CLOSED), OverviewLevel.GOOD, "has ended: 2 ranks closed"),
        (make_view(state=SessionState.LOST), OverviewLevel.FAULT, "has ended: 2 ranks lost"),
    ],
)
def test_verdict_is_what_is_most_urgent(view: StatusView, level: OverviewLevel, words: str):
    verdict = make_live_content(view, "").verdict
    assert (verdict.level, words in verdict.text) == (level, True), verdict.text


def test_rank_that_cannot_go_on_is_a_fault():
    wait = RankWait("train", 1, 2, "send", "Send", "dp", 3, 0, 60_000_000, stuck=True)
    content = make_live_content(replace(make_view(), waits=(wait,)), "")
    assert content.verdict.level is OverviewLevel.FAULT
    assert [rank.is_bad for rank in content.jobs[0].ranks] == [False, True]


def test_ranks_that_failed_are_always_listed():
    many = make_view(ranks=MAX_RANKS_LISTED + 50, iterations=1)
    last = replace(many.sessions[-1], state=SessionState.LOST)
    (job,) = make_live_content(replace(many, sessions=(*many.sessions[:-1], last)), "").jobs
    assert len(job.ranks) == MAX_RANKS_LISTED
    assert (job.rank_count, job.ranks[-1].balance.rank) == (
        MAX_RANKS_LISTED + 50,
        MAX_RANKS_LISTED + 49,
    )
    assert job.total.expected == 4 * job.rank_count


def test_running_jobs_come_before_those_that_ended():
    old, new = make_view("old", state=SessionState.CLOSED), make_view("new")
    both = StatusView((*old.sessions, *new.sessions), (*old.iterations, *new.iterations))
    content = make_live_content(both, "")
    assert [job.job_id for job in content.jobs] == ["new", "old"]
    assert content.verdict.text == "job new runs: 2 ranks open, latest iteration 2"


def test_job_that_does_not_answer_is_one_line_until_it_does(open_pages, source):
    client = open_pages(job=source)
    source.error = UnavailableError("no agent answers at a:\nrefused")
    page = read(client, "/live")
    assert "no agent answers at a: refused; it is asked again every second" in page.text
    answer = client.get("/live.json")
    assert answer.json() == {"error": "no agent answers at a: refused"}
    assert answer.status_code == 503
    source.error = None
    assert "job train runs" in read(client, "/live").text
    source.error = UnavailableError("gone")
    page = read(client, "/live")
    assert "gone; it is asked again" in page.text
    assert "What follows is the state of" in page.text
    assert "2 ranks open" in page.text


# The stream


def run(scenario: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), 60))


def make_feed(source: ScriptedSource, render: Callable[[LiveState], str] | None = None) -> LiveFeed:
    shown = render or (lambda state: f"state {state.number}")
    return LiveFeed(source.read_status, shown, interval_s=0.0)


def test_fifty_viewers_cost_what_one_costs(source):
    feed = make_feed(source)

    async def watch() -> list[int]:
        numbers = [0]
        while numbers[-1] < 5:
            numbers.append((await feed.get_newer(numbers[-1])).number)
        return numbers

    async def scenario() -> list[list[int]]:
        return await asyncio.gather(*(watch() for _ in range(50)))

    found = run(scenario)
    assert source.reads == 5
    assert all(numbers == sorted(set(numbers)) for numbers in found)


def test_nobody_watches_nothing_is_read(source, open_pages):
    open_pages(job=source)
    assert source.reads == 0


def test_page_reads_nothing_anew_that_was_just_read(source):
    feed = LiveFeed(source.read_status, lambda state: "", interval_s=3600.0)

    async def scenario() -> None:
        first = await feed.get_fresh()
        assert await feed.get_fresh() is first
        waiting = asyncio.create_task(feed.get_newer(first.number))
        await asyncio.sleep(0)
        assert await feed.get_fresh() is first
        waiting.cancel()

    run(scenario)
    assert source.reads == 1


class BrowserDouble:
    """The other end of a connection: takes messages when it is ready, and may go."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ready = asyncio.Event()
        self.ready.set()
        self.is_gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.ready.wait()
        await self.messages.put(message)

    async def receive(self) -> dict[str, Any]:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def take(self) -> str:
        return (await self.messages.get()).get("body", b"").decode()


def test_slow_reader_gets_the_latest_state_and_nothing_waits_for_it(source):
    feed = make_feed(source)

    async def scenario() -> None:
        slow = BrowserDouble()
        stream = asyncio.create_task(EventStream(feed)({}, slow.receive, slow.send))
        while "state 1" not in await slow.take():
            pass
        slow.ready.clear()
        state = await feed.get_newer(1)
        for _ in range(20):
            state = await feed.get_newer(state.number)
        waiting = slow.messages.qsize()
        slow.ready.set()
        texts = [await slow.take() for _ in range(waiting + 2)]
        assert waiting <= 1
        assert f"state {state.number}" in texts[-1] or int(texts[-1].split()[-1]) > state.number
        slow.is_gone.set()
        await stream

    run(scenario)


def test_reader_that_takes_nothing_lets_nothing_be_read(source):
    feed = make_feed(source)

    async def scenario() -> None:
        stalled = BrowserDouble()
        stream = asyncio.create_task(EventStream(feed)({}, stalled.receive, stalled.send))
        while "state 1" not in await stalled.take():
            pass
        stalled.ready.clear()
        await feed.get_newer(1)
        for _ in range(100):
            await asyncio.sleep(0)
        before = source.reads
        for _ in range(1000):
            await asyncio.sleep(0)
        assert source.reads == before
        stalled.is_gone.set()
        await stream

    run(scenario)


@pytest.mark.parametrize("takes", [True, False])
def test_stream_ends_with_the_server(source, monkeypatch, takes: bool):
    monkeypatch.setattr(job_source, "_END_S", 0.01)
    feed = make_feed(source)

    async def scenario() -> dict[str, Any]:
        browser = BrowserDouble()
        stream = asyncio.create_task(EventStream(feed)({}, browser.receive, browser.send))
        while "state 1" not in await browser.take():
            pass
        if not takes:
            browser.ready.clear()
        feed.closed.set()
        await stream
        while browser.messages.qsize() > 1:
            browser.messages.get_nowait()
        return browser.messages.get_nowait() if takes else {}

    assert run(scenario).get("more_body") is (False if takes else None)


def test_part_of_the_page_is_sent_when_it_differs(source):
    feed = make_feed(source, lambda state: "same" if state.number < 3 else "other\r\nlines\rof")

    async def scenario() -> list[str]:
        events = iter_events(feed)
        return [await anext(events) for _ in range(4)]

    retry, first, second, third = run(scenario)
    assert retry.startswith("retry: ")
    assert first.startswith("event: state\ndata: same\n\nevent: time\n")
    assert "state" not in second
    assert third.startswith("event: state\ndata: other\ndata: lines\ndata: of\n\n")


def test_text_makes_no_event_of_its_own():
    text = format_event("state", HOSTILE_JOB)
    assert [line.partition(":")[0] for line in text.splitlines()] == ["event", *["data"] * 3, ""]


def test_events_are_an_address_of_the_application(open_pages, source):
    application = open_pages(job=source).app

    async def scenario() -> dict[str, Any]:
        browser = BrowserDouble()
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/live/events",
            "query_string": b"",
            "headers": [],
        }
        serving = asyncio.create_task(application(scope, browser.receive, browser.send))
        start = await browser.messages.get()
        while "job train runs" not in await browser.take():
            pass
        browser.is_gone.set()
        await serving
        return start

    start = run(scenario)
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")


# Orders


@pytest.mark.parametrize(
    ("action", "value", "values", "words"),
    [
        ("freeze", " loss ", ("loss",), "the report says why: loss"),
        ("freeze", "", (), "a new folder blackbox/<iteration> in /data/dump, on each host"),
        ("start", "", (), "every iteration is dumped"),
        ("stop", "", (), "no iteration is dumped"),
        ("iterations", "0|5-8", ("0|5-8",), "iterations 0|5-8 are dumped"),
        ("operators", "conv\n\n fc \n", ("conv", "fc"), "tensors of operators conv, fc are dumped"),
        ("operators", "all", ("all",), "all operators"),
        ("saved-data", "statistic", ("statistic",), "their statistics are kept"),
    ],
)
def test_order_is_shown_before_it_is_sent(live, source, action, value, values, words):
    parameters = {"job": "train", "action": action, "value": value}
    text = read(live, "/live/confirm", **parameters).text
    assert words in text
    assert "all that run: 0-1 (2 ranks)" in text
    assert "the latest that is known here is 2" in text
    assert "/data/dump" in text
    assert source.orders == []
    order = confirm(live, **parameters)
    answer = send(live, order, headers={"accept": "application/json"})
    assert answer.json()["outcome"] == {
        "lines": ["job train: done", "rank 1: <b>late</b>"],
        "is_complete": True,
    }
    (sent,) = source.orders
    assert (sent.id, sent.job_id, sent.action, sent.values) == (
        order,
        "train",
        ControlAction(action),
        values,
    )


def test_preview_says_what_is_dumped_now(live, source):
    sessions = source.view.sessions
    changed = replace(sessions[1], selected="none")
    source.view = replace(source.view, sessions=(sessions[0], changed))
    text = read(live, "/live/confirm", job="train", action="start").text
    assert "rank 0: every iteration of operators all, as full" in text
    assert "rank 1: no iteration" in text


def test_preview_names_ranks_that_have_ended(live, source):
    ended = make_view(state=SessionState.CLOSED).sessions
    source.view = replace(source.view, sessions=(source.view.sessions[0], ended[1]))
    assert (
        "rank 1 ended and cannot answer"
        in read(live, "/live/confirm", job="train", action="stop").text
    )
    source.view = replace(source.view, sessions=ended)
    assert (
        "none is running: ranks 0-1 ended"
        in read(live, "/live/confirm", job="train", action="stop").text
    )


def test_same_order_is_sent_once(live, source):
    order = confirm(live, job="train", action="stop")
    assert send(live, order).text == send(live, order).text
    assert len(source.orders) == 1


def test_order_that_was_not_shown_is_refused(live, source, monkeypatch):
    bodies = (b"", b"order=x", b"order=x&order=y", b"\xff\xfe", b"order=" + b"x" * 9999)
    for body in bodies:
        answer = live.post("/live/order", content=body)
        assert (answer.status_code, "was not shown here" in answer.text) == (409, True)
    order = confirm(live, job="train", action="stop")
    monkeypatch.setattr(live_pages, "_ORDER_LIFE_S", 0.0)
    assert send(live, order).status_code == 409
    assert source.orders == []


def test_orders_are_carried_out_one_at_a_time(live, source):
    first, second = (confirm(live, job="train", action=word) for word in ("stop", "start"))
    answers: list[Any] = []
    source.while_sending = lambda: answers.append(send(live, second))
    assert send(live, first).status_code == 200
    assert (answers[0].status_code, "under way" in answers[0].text) == (409, True)
    source.while_sending = lambda: None
    assert send(live, second).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ForbiddenError("agent at a: ann has the wrong role"), 403),
        (RejectedError("coordinator at a: job 'train' has ended"), 409),
        (UnavailableError("no coordinator answers at a: refused"), 503),
        (ConfigError("control", "stop", "now", "no value"), 400),
    ],
)
def test_refusal_is_the_line_of_the_daemon(live, source, error, status):
    """Whoever sees the buttons: what counts is what the daemon says, and it can be asked again."""
    source.refusal = error
    order = confirm(live, job="train", action="stop")
    answer = send(live, order)
    assert (answer.status_code, str(error) in PageReader(answer.text).text) == (status, True)
    source.refusal = None
    assert send(live, order).status_code == 200


def test_order_that_not_all_ranks_do_is_a_warning(live, source):
    source.is_complete = False
    answer = send(live, confirm(live, job="train", action="stop"))
    assert 'class="verdict warning"' in answer.text


def test_buttons_are_those_of_the_role(live, source):
    def find_forms() -> list[str]:
        page = live.get("/live/control?job=train").text
        return [each.value for each in ControlAction if f'value="{each.value}"' in page]

    assert len(find_forms()) == 6
    assert "/live/confirm?job=train&action=freeze" in read(live, "/live").links
    source.actions = (ControlAction.FREEZE,)
    assert find_forms() == ["freeze"]
    source.actions = ()
    assert find_forms() == []
    assert "These pages may not control jobs" in live.get("/live/control?job=train").text


def test_reader_gets_the_reason_in_place_of_buttons(live):
    """Whatever the certificate of the server may do: an order would be refused."""

    async def ask_as_reader(scope: Scope, receive: Receive, send: Send) -> None:
        caller = CallerIdentity("ann", frozenset({READER_ROLE}), "ab")
        await live.app({**scope, CALLER_KEY: caller}, receive, send)

    reader = TestClient(ask_as_reader)
    page = reader.get("/live/control.json?job=train").json()
    assert (page["actions"], "Control is for operator" in page["refusal"]) == ([], True)
    assert "Control is for operator" in read(reader, "/live/control?job=train").text
    answer = reader.get("/live/confirm.json?job=train&action=stop")
    assert (answer.status_code, answer.json()["error"]) == (403, page["refusal"])


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"job": "other", "action": "stop"}, 404, "no job 'other'; known: train"),
        ({"job": "train", "action": "explode"}, 400, "'explode' is not allowed"),
        ({"job": "train"}, 400, "parameter action: '' is not allowed; allowed: start, stop"),
        ({"job": "train", "action": "stop", "value": "now"}, 400, "allowed: no value"),
        ({"job": "train", "action": "iterations", "value": "9-5"}, 400, "'9-5' is not allowed"),
        ({"job": "train", "action": "operators"}, 400, "'' is not allowed"),
        ({"job": "train", "action": "stop", "more": "1"}, 400, "no such parameter"),
    ],
)
def test_wrong_order_is_one_line(live, query, status, words):
    answer = live.get("/live/confirm.json?" + urlencode(query))
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_order_needs_the_state_of_its_job(open_pages, source):
    source.error = UnavailableError("gone")
    client = open_pages(job=source)
    for path in ("/live/control.json?job=train", "/live/confirm.json?job=train&action=stop"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"error": "gone"})


def test_orders_are_sent_alone(live):
    assert live.get("/live/order").status_code == 405
    assert live.post("/live").status_code == 405
