"""Session files: their JSON, and which sessions of a tree are to be asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._core.status import SessionState, SessionStatus
from rankdump._core.tree_session import (
    TreeSession,
    format_tree_session,
    list_addresses,
    make_session_file_name,
    parse_tree_session,
    select_running_sessions,
)
from rankdump.errors import CorruptedError

SOCKET = "unix:/run/rankdump/agent.sock"


def session(rank: int, changed_us: int, state: SessionState, job: str = "job") -> TreeSession:
    status = SessionStatus(job, f"s{rank}.{changed_us}", rank, 2, rank, "host", 7, state)
    return TreeSession(status, changed_us, SOCKET, "node1:7421", "host")


def test_session_file_reads_back_and_ignores_fields_of_later_versions() -> None:
    """A file of a later version may have more fields, one of an earlier version fewer."""
    written = session(0, 5, SessionState.LOST)
    text = format_tree_session(written)
    assert parse_tree_session(text) == written
    later = text.replace('"version": 1', '"version": 1, "unknown": [1]')
    assert parse_tree_session(later) == written
    earlier = text.replace('"agent_host": "host"', '"later": 0')
    assert parse_tree_session(earlier) == replace(written, agent_host="")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "status": {"job_id": 4}}']
)
def test_damaged_session_file_is_an_error(text: str) -> None:
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


def test_running_job_is_the_one_whose_newest_sessions_are_not_closed() -> None:
    """A rank that was lost and restarted counts by its newest session."""
    lost = session(0, 1, SessionState.LOST)
    closed = session(0, 2, SessionState.CLOSED)
    assert select_running_sessions([lost, closed]) == ()
    reopened = session(0, 3, SessionState.OPEN)
    assert reopened in select_running_sessions([lost, closed, reopened])
    other = session(1, 9, SessionState.OPEN, job="other")
    assert select_running_sessions([reopened, other]) == (other,)
    assert select_running_sessions([reopened, other], "job") == (reopened,)


def test_socket_of_another_host_cannot_be_asked() -> None:
    """An address over TCP can be asked from everywhere."""
    sessions = [session(0, 1, SessionState.OPEN)]
    assert list_addresses(sessions, "host") == ("node1:7421", (SOCKET,))
    assert list_addresses(sessions, "elsewhere") == ("node1:7421", ())
