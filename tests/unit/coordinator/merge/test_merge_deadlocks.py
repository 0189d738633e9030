"""Deadlocks: one sentence for each circle of calls that cannot end."""

from __future__ import annotations

from support.order_events import coll, merged, message, op

from rankdump._core.events import OPEN_END_POSITION, EventKind, FindingKind, ProcessGroup

OPEN = {"end_position": OPEN_END_POSITION}


def test_deadlock_over_two_groups_names_each_rank_with_its_line() -> None:
    """The sentence begins with the lowest rank, and shows the end of each path."""
    result = merged(
        [op(1), coll(2, 3, source="/home/me/job/train.py:19", **OPEN)],
        [op(1), coll(2, 5, group="other", source="/home/me/job/train.py:20", **OPEN)],
    )
    (finding,) = result.findings
    assert finding.kind is FindingKind.CYCLE
    assert finding.ranks == (0, 1)
    assert finding.text == (
        "iteration 3: deadlock: rank 0 waits in group 'world' (all_reduce number 3, "
        "job/train.py:19) for rank 1, which waits in group 'other' (all_reduce number 5, "
        "job/train.py:20) for rank 0; none of them can continue"
    )


def test_deadlock_that_a_timeout_ended_is_found_from_failed_calls() -> None:
    """A failed call has the time of its failure as its end, and replaces the open one."""
    failed = {**OPEN, "end_us": 60_000_000}
    result = merged(
        [coll(1, 0, **OPEN), coll(1, 0, **failed)],
        [coll(1, 0, group="other", **failed)],
    )
    (finding,) = result.findings
    assert (
        "deadlock: rank 0 waits in group 'world' (all_reduce number 0) for rank 1" in finding.text
    )
    assert max(entry.end_us for entry in result.entries()) == 60_000_000


def test_failed_call_of_a_rank_that_goes_on_is_no_deadlock() -> None:
    """Only the last event of a rank is a call that it waits in."""
    failed = {**OPEN, "end_us": 9}
    result = merged(
        [coll(1, 0, **failed), op(2)],
        [coll(1, 0, group="other", **OPEN)],
    )
    assert FindingKind.CYCLE not in {finding.kind for finding in result.findings}


def test_deadlock_of_several_ranks_names_them_together() -> None:
    """Ranks that wait in one call share a step of the sentence."""
    trio = ProcessGroup("trio", (0, 1, 2))
    result = merged(
        [coll(1, 0, group="trio", **OPEN)],
        [coll(1, 0, group="trio", **OPEN)],
        [message(1, EventKind.RECV, 0, **OPEN)],
        groups=(ProcessGroup("world", (0, 1, 2)), trio),
    )
    (finding,) = result.findings
    assert "rank 0 waits in group 'trio' (all_reduce number 0) for rank 2" in finding.text
    assert "which waits in group 'world' (recv number 0) for rank 0" in finding.text
