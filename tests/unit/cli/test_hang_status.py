"""Status of a job that hangs, or that has ended early, as people see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankdump._analysis.reader.rank_tallies import (
    format_status_sentences,
    merge_rank_sentences,
    tally_ranks,
)
from rankdump._analysis.reader.tree_status import mark_ended_sessions
from rankdump._cli.live_tree import add_tree_rows, find_live_job
from rankdump._cli.status_tables import format_status_table
from rankdump._core.status import (
    IterationStatus,
    RankWait,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.tree_session import (
    SESSIONS_FOLDER,
    TreeSession,
    format_tree_session,
    make_session_file_name,
)


def session(rank: int, state: SessionState = SessionState.OPEN, **more: Any) -> SessionStatus:
    return SessionStatus("job", f"s{rank}", rank, 3, rank, "host", 7, state, **more)


def wait(rank: int, *absent: int, **more: object) -> RankWait:
    usual = {"start_us": 10**15, "waited_us": 22_000_000, "source": "/job/train.py:19"}
    fields = {**usual, **more}
    return RankWait("job", rank, 3, "all_reduce", "n", "2", 4, absent=absent, **fields)  # type: ignore[arg-type]


def states_of(view: StatusView) -> list[str]:
    return [tally.described_state for tally in tally_ranks(view)]


def test_open_rank_shows_how_long_it_waits() -> None:
    """A short wait is not shown: every collective waits for its last member."""
    sessions = tuple(map(session, range(3)))
    waits = (wait(0, 1), wait(1, stuck=True), wait(2, waited_us=1_000_000))
    view = StatusView(sessions=sessions, waits=waits)
    assert states_of(view) == ["waits 22 s", "hangs 22 s", "open"]
    assert "waits 22 s" in format_status_table(view, width=120)[1]


@pytest.mark.parametrize(
    ("state", "ended_by", "shown"),
    [
        (SessionState.CLOSED, "", "ended in iteration 3"),
        (SessionState.LOST, "", "lost in iteration 3"),
        (SessionState.LOST, "SIGABRT", "killed by SIGABRT in iteration 3"),
        (SessionState.LOST, "exit code 1", "ended with exit code 1 in iteration 3"),
    ],
)
def test_rank_that_ended_early_shows_where(state: SessionState, ended_by: str, shown: str) -> None:
    """Without an unfinished iteration a closed session is only closed."""
    ended = session(0, state, ended_by=ended_by)
    unfinished = IterationStatus("job", "s0", 0, 3, complete=False)
    assert states_of(StatusView(sessions=(ended,), iterations=(unfinished,))) == [shown]
    assert states_of(StatusView(sessions=(session(0, SessionState.CLOSED),))) == ["closed"]


def test_ranks_that_wait_in_one_call_share_a_sentence() -> None:
    """It names the call, its line and the absent ranks; a lost rank waits no more."""
    sessions = (session(0), session(1), session(2, SessionState.LOST))
    waits = (wait(0, 5), wait(1, 5), wait(2, 5))
    (sentence,) = (
        each
        for each in format_status_sentences(StatusView(sessions=sessions, waits=waits))
        if "has waited" in each or "have waited" in each
    )
    assert sentence.startswith("ranks 0-1 have waited since ")
    assert sentence.endswith(
        "(22 s) in all_reduce number 4 of group '2' in iteration 3 at /job/train.py:19 for rank 5"
    )


def test_sentences_that_differ_in_the_rank_are_one() -> None:
    """Other sentences stay as they are, in their order."""
    assert merge_rank_sentences(
        ["rank 0: no space", "disk full", "rank 1: no space", "rank 2: other"]
    ) == ["ranks 0-1: no space", "disk full", "rank 2: other"]


def test_open_session_of_an_agent_that_is_gone_is_lost() -> None:
    """Of an agent on another host that is not known."""
    view = StatusView(sessions=(session(0), session(1)))
    files = [TreeSession(session(0), agent_host="here"), TreeSession(session(1), agent_host="far")]
    marked = mark_ended_sessions(view, files, "here")
    assert [each.state for each in marked.sessions] == [SessionState.LOST, SessionState.OPEN]
    gone, unknown = marked.findings
    assert gone == "rank 0: the agent ended while the session was open"
    assert unknown.startswith("rank 1: the agent runs on host far and cannot be asked from here")


def test_live_view_keeps_other_jobs_of_the_tree() -> None:
    """The running job is shown as its daemon knows it, others as the tree has them."""
    live = StatusView(sessions=(session(0),))
    other = replace(session(1, SessionState.CLOSED), job_id="old")
    tree = StatusView(sessions=(other, session(0, SessionState.LOST)))
    merged = add_tree_rows(live, tree)
    assert [(each.job_id, each.state.value) for each in merged.sessions] == [
        ("old", "closed"),
        ("job", "open"),
    ]


def test_live_view_has_the_iterations_that_have_begun() -> None:
    """Daemons report an iteration when it ends; until then the tree has its tensors."""
    ended, begun = balance(0, stored=2), balance(1, complete=False, stored=1)
    live = StatusView(sessions=(session(0),), iterations=(ended,))
    merged = add_tree_rows(live, StatusView(iterations=(replace(ended, complete=False), begun)))
    assert merged.iterations == (ended, begun)
    assert [each.iterations_complete for each in tally_ranks(merged)] == [1]


def test_iteration_that_waits_for_its_manifest_is_counted_once() -> None:
    """As on a full disk; files without a manifest do not name their session."""
    live = StatusView(sessions=(session(0, SessionState.CLOSED),), iterations=(balance(0),))
    files = replace(balance(0, complete=False, stored=1), session_id="")
    assert add_tree_rows(live, StatusView(iterations=(files,))).iterations == live.iterations


def balance(iteration: int, *, complete: bool = True, stored: int = 0) -> IterationStatus:
    return IterationStatus("job", "s0", 0, iteration, complete, stored, stored)


def test_tree_whose_daemon_has_no_socket_any_more_has_no_live_job(tmp_path: Path) -> None:
    """Nothing is asked then."""
    status = session(0)
    file = TreeSession(status, 1, f"unix:{tmp_path}/gone.sock", f"unix:{tmp_path}/gone.sock", "me")
    folder = tmp_path / SESSIONS_FOLDER
    folder.mkdir(parents=True)
    (folder / make_session_file_name(status)).write_text(format_tree_session(file))
    assert find_live_job(tmp_path) is None
