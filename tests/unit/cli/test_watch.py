"""Screens of `status --watch`: lines that are cut on a small screen, and lines that are not."""

from __future__ import annotations

import pytest

from rankdump._cli.status import format_screen
from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import (
    AgentStatus,
    IterationStatus,
    MergeStatus,
    SessionState,
    SessionStatus,
    StatusView,
)

JOBS = (("early", SessionState.CLOSED), ("broken", SessionState.LOST), ("now", SessionState.OPEN))
RANKS = 16


def session(job, rank, state):
    notes = (f"the file system of host{rank} at /data/{'dump' * 20} has no locks",) * (rank == 3)
    return SessionStatus(job, f"{job}{rank}", rank, RANKS, 0, "host", 7, state, notes=notes)


def finding(number):
    text = f"iteration {number}: rank 1 never arrived at " + "all_reduce of a long name " * 5
    return Finding(FindingKind.MISSING_MEMBER, number, text.strip(), (1,))


VIEW = StatusView(
    sessions=tuple(session(job, rank, state) for job, state in JOBS for rank in range(RANKS)),
    iterations=tuple(
        IterationStatus(job, f"{job}{rank}", rank, 0, True, 10, 10, bytes_in=100, bytes_stored=50)
        for job, _ in JOBS
        for rank in range(RANKS)
    ),
    agents=(AgentStatus("a", "host", 0.1, True),),
    merges=tuple(MergeStatus(job, 1, 10) for job, _ in JOBS),
    order_findings=tuple(map(finding, range(3))),
    findings=("group world: rank 3 is 20 s late",),
)
SAID = [
    *(f"{each.kind.value}: {each.text}" for each in VIEW.order_findings),
    *VIEW.findings,
    f"the file system of host3 at /data/{'dump' * 20} has no locks",
]


def drawn(height, width=80):
    lines = format_screen(VIEW, "12:00:00", width=width, height=height)
    assert len(lines) <= height
    return lines


def ranks_in(lines, state):
    return sum(line.split()[1:2] == [state] for line in lines)


@pytest.mark.parametrize("height", [20, 24, 30, 40, 60, 100, 200])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_screen_shows_findings_in_full(height, width):
    """Whatever gives way: every word of what was found is on the screen."""
    lines = drawn(height, width)
    flat = "".join("".join(lines).split())
    for said in SAID:
        assert "".join(said.split()) in flat
    assert all(len(line) <= width for line in lines[-12:])


def test_screen_counts_the_lines_that_do_not_fit():
    """Those there is room for are whole to the last line, which says how many are not there."""
    lines = drawn(9)
    assert lines[-1].startswith("... ")
    assert "more lines: rankdump status without --watch" in lines[-1]


def test_screen_shows_everything_when_high_enough():
    lines = drawn(200)
    assert [ranks_in(lines, state) for state in ("closed", "lost", "open")] == [RANKS] * 3


def test_screen_folds_ended_jobs_first():
    """They have one line each with their sums; the job that goes on has all of its ranks."""
    lines = drawn(60)
    assert [ranks_in(lines, state) for state in ("closed", "lost", "open")] == [0, 0, RANKS]
    (over,) = (line for line in lines if line.startswith("job early:"))
    assert over == ("job early: ranks 16 closed; iterations 16/16, 160 tensors, 800 B, 0 dropped")
    assert any(line.startswith("job broken: ranks 16 lost;") for line in lines)
    assert any(line.split()[:1] == ["host"] for line in lines)


def test_screen_cuts_ranks_next_and_keeps_their_sum():
    lines = drawn(42)
    assert 0 < ranks_in(lines, "open") < RANKS
    assert any(line.split()[:1] == ["all"] for line in lines)
    small = drawn(20)
    assert ranks_in(small, "open") == 0
    assert any(line.startswith("job now: ranks 16 open;") for line in small)


def test_screen_does_not_fold_a_single_ended_job():
    """With room, nothing is folded."""
    view = StatusView(sessions=tuple(session("early", r, SessionState.CLOSED) for r in range(4)))
    lines = format_screen(view, "12:00:00", width=80, height=40)
    assert ranks_in(lines, "closed") == 4
    assert not any(line.startswith("job early") for line in lines)
