"""Session files: their JSON, and which sessions of a tree are to be asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.tree_session import (
    TreeSession,
    format_tree_session,
    list_addresses,
    make_session_file_name,
    parse_tree_session,
    select_running_sessions,
    update_session,
)
from rankdump.errors import CorruptedError

SOCKET = "unix:/run/rankdump/agent.sock"


def session(rank: int, changed_us: int, state: SessionState, job: str = "job") -> TreeSession:
    status = SessionStatus(job, f"s{rank}.{changed_us}", rank, 2, rank, "host", 7, state)
    return TreeSession(status, changed_us, SOCKET, "node1:7421", "host")


def test_session_file_reads_back_and_ignores_fields_of_later_versions() -> None:
    """A file of a later version may have more fields, one of an earlier version fewer."""
    balance = IterationStatus("job", "s0.5", 0, 2, False, stored=3, dropped={"disk_full": 1})
    written = replace(session(0, 5, SessionState.LOST), process_us=4, unfinished=(balance,))
    text = format_tree_session(written)
    assert parse_tree_session(text) == parse_tree_session(text.encode()) == written
    later = text.replace('"version": 1', '"version": 1, "unknown": [1]')
    assert parse_tree_session(later) == written
    older = json.loads(text)
    del older["process_us"], older["unfinished"], older["agent_host"]
    bare = session(0, 5, SessionState.LOST)
    assert parse_tree_session(json.dumps(older)) == replace(bare, agent_host="")


@pytest.mark.parametrize(
    "text",
    ["", b"\xff", "{}", "[]", '{"version": 2}', '{"version": 1, "status": {"job_id": 4}}'],
)
def test_damaged_session_file_is_an_error(text: str | bytes) -> None:
    """Each is a CorruptedError, never another exception."""
    with pytest.raises(CorruptedError):
        parse_tree_session(text)


def test_session_file_names_differ_by_job_and_session() -> None:
    """Sessions of one rank have files of their own, and the name begins with the rank."""
    first, second = session(3, 1, SessionState.OPEN), session(3, 2, SessionState.OPEN)
    other = session(3, 1, SessionState.OPEN, job="other")
    names = {make_session_file_name(each.status) for each in (first, second, other)}
    assert len(names) == 3
    assert all(name.startswith("rank_3.") for name in names)


def test_session_file_keeps_what_an_earlier_agent_wrote_about_the_end() -> None:
    """A restarted agent has the state from its ledger, but not the error that ended the session."""
    closed = session(0, 1, SessionState.CLOSED)
    before = replace(closed, status=replace(closed.status, raised_in=2))
    assert update_session(before, replace(closed, changed_us=9)) is before
    moved = update_session(before, replace(closed, agent="node1:7420"))
    assert (moved.agent, moved.status.raised_in) == ("node1:7420", 2)
    reopened = replace(closed, status=replace(closed.status, state=SessionState.OPEN))
    assert update_session(before, reopened).status.raised_in is None


def test_session_file_changes_with_its_unfinished_iterations() -> None:
    """The state may be the same, when late records are settled."""
    before = session(0, 1, SessionState.LOST)
    balance = IterationStatus("job", "s0.1", 0, 2, False, stored=3)
    now = replace(before, changed_us=9, unfinished=(balance,))
    assert update_session(before, now) == now


def test_running_job_is_the_one_whose_newest_sessions_are_not_closed() -> None:
    """A rank that was lost and restarted counts by its newest session."""
    lost = session(0, 1, SessionState.LOST)
    closed = session(0, 2, SessionState.CLOSED)
    assert select_running_sessions([lost, closed]) == ()
    reopened = session(0, 3, SessionState.OPEN)
    assert reopened in select_running_sessions([lost, closed, reopened])
    other = session(1, 9, SessionState.OPEN, job="other")
    assert select_running_sessions([reopened, other]) == (other,)


def test_socket_of_another_host_cannot_be_asked() -> None:
    """An address over TCP can be asked from everywhere."""
    sessions = [session(0, 1, SessionState.OPEN)]
    assert list_addresses(sessions, "host") == ("node1:7421", (SOCKET,))
    assert list_addresses(sessions, "elsewhere") == ("node1:7421", ())
