"""Findings about ranks that ended: nobody is missing where it took part, or may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.order_events import coll, merged, op

from rankdump._core.events import (
    OPEN_END_POSITION,
    CallOutcome,
    EventKind,
    FindingKind,
    ProcessGroup,
)

ABSENCES = {FindingKind.MISSING_MEMBER, FindingKind.SILENT_RANK, FindingKind.LONE_MESSAGE}


def program(count: int, **last) -> list:
    """Return a program of so many pairs of an operator and a collective."""
    events = []
    for number in range(count):
        more = last if number == count - 1 else {"outcome": CallOutcome.COMPLETE}
        events += [op(2 * number + 1), coll(2 * number + 2, number, **more)]
    return events


def test_rank_that_ended_is_named_with_its_last_event_and_what_it_missed() -> None:
    result = merged(program(3, outcome=CallOutcome.FAILED), program(2), lost={1: True})
    (finding,) = result.findings
    assert (finding.kind, finding.ranks) == (FindingKind.ENDED_RANK, (1,))
    assert "the process of rank 1 ended after all_reduce 'AllReduce' number 1" in finding.text
    assert "it never arrived at all_reduce 'AllReduce' number 2" in finding.text
    assert finding.text.endswith("which failed on rank 0")
    assert (finding.group, finding.sequence, finding.position) == ("world", 2, 4)


def test_rank_that_ended_within_an_operator_is_named_with_it() -> None:
    loss = op(3, "Default/Loss-op1")
    stuck = op(3, "Default/Loss-op1", end_position=OPEN_END_POSITION)
    whole = [*program(1), loss, op(4, "Default/More-op1")]
    (finding,) = merged(whole, [*program(1), stuck], lost={1: True}).findings
    assert finding.text == (
        "iteration 3: the process of rank 1 ended within 'Default/Loss-op1' at position 3, "
        "without ending its session"
    )


@given(st.integers(0, 4), st.integers(1, 5), st.booleans())
def test_no_absence_is_reported_where_last_events_may_be_missing(known, count, provisional) -> None:
    """However many of its last events a lost rank has reported, nobody misses it behind them."""
    known = min(known, count)
    result = merged(program(count), program(known), lost={1: False}, provisional=provisional)
    assert not ABSENCES & {finding.kind for finding in result.findings}
    (finding,) = [f for f in result.findings if f.kind is FindingKind.ENDED_RANK]
    assert "its last events may be missing" in finding.text
    assert all(not entry.missing for entry in result.entries())


def test_rank_that_skipped_a_call_is_missing_though_its_session_was_lost() -> None:
    """It executed a later call of the same group: its last events do not matter there."""
    skipped = [op(1), coll(2, 1)]
    others = [coll(1, 0, end_position=OPEN_END_POSITION), coll(2, 1), coll(3, 2)]
    result = merged(others, skipped, lost={1: False})
    assert [entry.missing for entry in result.entries() if entry.missing] == [(1,)]
    (finding,) = [each for each in result.findings if each.kind is FindingKind.ENDED_RANK]
    assert finding.text.endswith(
        "it never arrived at all_reduce 'AllReduce' number 0 of group 'world' (ranks 0-1)"
    )


def test_rank_that_finished_the_iteration_did_not_end_in_it() -> None:
    """Its session was lost later, so an absence here is an absence."""
    result = merged(
        [op(1), coll(2, 0)], [op(1), op(2)], lost={1: True}, spans={0: (1, 2), 1: (1, 2)}
    )
    (finding,) = result.findings
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING_MEMBER, (1,))


def test_rank_that_ended_before_the_iteration_is_not_silent() -> None:
    result = merged(program(1, outcome=CallOutcome.FAILED), lost={1: True})
    (finding,) = result.findings
    assert (finding.kind, finding.ranks) == (FindingKind.ENDED_RANK, (1,))
    assert "the process of rank 1 ended before this iteration" in finding.text


def test_rank_that_ended_first_is_named_first() -> None:
    """The rank that failed because of it ended later."""
    first = [op(1, start_us=100)]
    second = [op(1, start_us=50), op(2, start_us=900)]
    result = merged(second, first, lost={0: True, 1: True})
    assert [finding.ranks for finding in result.findings] == [(1,), (0,)]


def test_first_missed_call_is_the_one_that_another_missed_call_stands_behind() -> None:
    """Rank 0 is early in the call of all; rank 1 waits for the lost rank in a call before it."""
    groups = ProcessGroup("all", (0, 1, 2)), ProcessGroup("half", (1, 2))
    failed = {"outcome": CallOutcome.FAILED, "end_position": OPEN_END_POSITION}
    early = [op(1, start_us=1), coll(2, 0, group="all", start_us=2, **failed)]
    late = [op(1, start_us=50), coll(2, 0, group="half", start_us=60, **failed)]
    lost = [op(1, start_us=1)]
    findings = merged(early, late, lost, lost={2: True}, groups=groups).findings
    (ended,) = [each for each in findings if each.kind is FindingKind.ENDED_RANK]
    assert ended.group == "half"
    assert "of group 'half' (ranks 1-2) and 1 more after it" in ended.text


JOINT = (
    EventKind.ALL_REDUCE,
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.BARRIER,
)


@pytest.mark.parametrize("kind", [*JOINT, EventKind.BROADCAST, EventKind.REDUCE])
@pytest.mark.parametrize("outcome", CallOutcome)
@pytest.mark.parametrize("provisional", [True, False])
def test_call_that_is_complete_on_a_member_was_entered_by_all(kind, outcome, provisional) -> None:
    """That follows for calls that need the data of all members, and only where they succeeded."""
    programs = [op(1), coll(2, 0, kind=kind, outcome=outcome)], [op(1)]
    findings = merged(*programs, provisional=provisional).findings
    follows = kind in JOINT and outcome is CallOutcome.COMPLETE
    assert bool(ABSENCES & {finding.kind for finding in findings}) is not follows
