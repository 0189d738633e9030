"""Tests of attempts: their numbers, the sessions of a rank over time, and how a session ended."""

from __future__ import annotations

import dataclasses

import pytest

from rankdump._core.rank_identity import RankIdentity, find_restarts, make_session_request
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.tree_session import (
    SessionPeriods,
    TreeSession,
    describe_crash,
    number_attempt,
    order_sessions,
)


def make_session(name: str = "s", **more) -> SessionStatus:
    return SessionStatus(
        more.pop("job_id", "j"),
        name,
        more.pop("rank", 0),
        2,
        0,
        more.pop("host", "h"),
        more.pop("pid", 1),
        more.pop("state", SessionState.CLOSED),
        **more,
    )


def make_request(name: str = "new", *, pid: int = 9, **more) -> SessionRequest:
    return SessionRequest("j", name, 0, 2, 0, "h", pid, "", "", b"", b"", **more)


FIRST = TreeSession(make_session("a", pid=1, attempt=0), process_us=5)
SECOND = TreeSession(make_session("b", pid=2, attempt=1), process_us=6)


@pytest.mark.parametrize(
    ("request_", "earlier", "expected"),
    [
        (make_request(), (), 0),
        (make_request(attempt=3), (), 3),
        (make_request(), (FIRST,), 1),
        (make_request(attempt=1), (FIRST,), 1),
        (make_request(attempt=2), (FIRST,), 2),
        # A whole job was started again under the same id: the launcher counts from 0.
        (make_request(attempt=0), (FIRST, SECOND), 2),
        # The same process, and the same session after a reconnect.
        (make_request(pid=1, process_us=5), (FIRST, SECOND), 0),
        (make_request("b"), (FIRST, SECOND), 1),
        # In a container every process may have the same number.
        (make_request(pid=1, process_us=7), (FIRST,), 1),
    ],
)
def test_attempt_number_follows_launcher_and_processes(request_, earlier, expected):
    assert number_attempt(request_, earlier) == expected


def test_attempt_number_ignores_other_jobs():
    other = dataclasses.replace(FIRST, status=make_session("a", job_id="other", attempt=4))
    assert number_attempt(make_request(), [other]) == 0


def test_open_session_that_another_followed_is_lost():
    """Its agent ended before it did; an open session of another rank is as it was."""
    begun = [
        make_session(name, started_us=at, rank=rank, state=SessionState.OPEN)
        for name, at, rank in (("c", 7, 1), ("b", 7, 0), ("a", 3, 0))
    ]
    ordered = order_sessions(map(TreeSession, begun))
    assert [(each.status.session_id, each.status.state) for each in ordered] == [
        ("a", SessionState.LOST),
        ("b", SessionState.OPEN),
        ("c", SessionState.OPEN),
    ]


def test_record_belongs_to_the_session_begun_last():
    periods = SessionPeriods(
        [
            make_session("b", started_us=200, attempt=1),
            make_session("a", started_us=100),
            make_session("other", rank=1, started_us=50, attempt=4),
            make_session("old", rank=2),
        ]
    )
    assert periods.attempts == (0, 1, 4)
    assert [periods.find_attempt(0, at) for at in (99, 100, 199, 200, 999)] == [0, 0, 0, 1, 1]
    assert periods.find_session(0, 99) is None
    assert periods.find_attempt(1, 60) == 4
    assert periods.find_session(2, 60) is None


@pytest.mark.parametrize(
    ("state", "raised_in", "is_followed", "expected"),
    [
        (SessionState.CLOSED, None, True, ""),
        (SessionState.CLOSED, 2, False, "crashed in iteration 2"),
        (SessionState.LOST, None, False, ""),
        (SessionState.LOST, None, True, "crashed in iteration 3"),
        (SessionState.OPEN, None, False, ""),
    ],
)
def test_crash_is_described_with_its_iteration(state, raised_in, is_followed, expected):
    session = make_session(state=state, raised_in=raised_in)
    iterations = [IterationStatus("j", "s", 0, at, at < 3) for at in range(4)]
    assert describe_crash(session, iterations, is_followed=is_followed) == expected


def test_crash_between_iterations_is_described():
    lost = make_session(state=SessionState.LOST)
    done = [IterationStatus("j", "s", 0, 4, True)]
    assert describe_crash(lost, done, is_followed=True) == "crashed after iteration 4"
    assert describe_crash(lost, [], is_followed=True) == "crashed before any iteration"


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("0", 0), ("12", 12), ("-1", None), ("many", None)]
)
def test_restarts_are_read_from_torchrun(text, expected):
    assert find_restarts({"TORCHELASTIC_RESTART_COUNT": text}) == expected


@pytest.mark.parametrize("restarts", [None, 0, 3])
def test_session_request_has_the_count_of_the_launcher(restarts):
    request = make_session_request(
        RankIdentity(restarts=restarts), plan_json=b"", config_source=b""
    )
    assert (request.attempt, request.is_elastic) == (restarts or 0, restarts is not None)
    assert 0 < request.process_us <= request.started_us
