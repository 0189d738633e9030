"""Findings about ranks that wait, are late, lost events or run the same program."""

from __future__ import annotations

from typing import Any

import pytest
from support.event_lists import find_waiting_ranks
from support.order_events import coll, merged, message, op

from rankdump._core.events import OPEN_END_POSITION, EventKind, FindingKind, ProcessGroup, RankEvent


def test_open_call_counts_its_waiting_members() -> None:
    """The member that has not arrived is named with its last operator."""
    waiting = coll(2, 7, end_position=OPEN_END_POSITION)
    result = merged([op(1), waiting], [op(1), op(2, "Default/Stuck-op2")])
    (finding,) = result.findings
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING_MEMBER, (1,))
    assert (finding.group, finding.sequence) == ("world", 7)
    assert (finding.name, finding.position) == ("Default/Stuck-op2", 2)
    assert find_waiting_ranks(result.calls, 0) == (0,)
    assert list(result.entries())[-1].missing == (1,)


def test_complete_event_replaces_open_one() -> None:
    """In any order, and with differently corrected times, without a conflict."""
    begun, done = coll(1, 0, end_position=OPEN_END_POSITION), coll(1, 0, start_us=4, end_us=9)
    for program in ([begun, done], [done, begun], [begun, begun, done, begun]):
        result = merged(program, program)
        assert result.findings == ()
        assert find_waiting_ranks(result.calls, 0) == ()
        assert [entry.end_us for entry in result.entries()] == [9]


def test_findings_of_running_iteration_are_provisional() -> None:
    """Missing events may still arrive, and late completions are not lost."""
    programs = [op(1), coll(2, 0)], [op(1), op(3)]
    (finding,) = merged(*programs, provisional=True).findings
    assert finding.provisional
    assert "rank 1 has not arrived so far" in finding.text
    (finding,) = merged([coll(1, 0)], provisional=True).findings
    assert "rank 1 reported nothing so far" in finding.text
    (finding,) = merged([message(1, EventKind.SEND, 1)], [op(1)], provisional=True).findings
    assert "no counterpart so far on rank 1" in finding.text


def test_late_rank_is_reported_as_not_arrived_in_time() -> None:
    """The iteration was merged at its deadline; later events of the rank are not known."""
    (finding,) = merged([op(1), coll(2, 0)], [op(1)], late=(1,), late_count=1).findings
    assert "rank 1 had not arrived in time" in finding.text
    assert not finding.provisional


def test_missing_rank_is_reported_with_call_it_waits_in() -> None:
    trio = ProcessGroup("trio", (0, 1, 2))
    pair = ProcessGroup("pair", (1, 2))
    result = merged(
        [coll(1, 0, group="trio", end_position=OPEN_END_POSITION)],
        [coll(1, 4, group="pair", end_position=OPEN_END_POSITION)],
        [op(1)],
        groups=(trio, pair),
    )
    texts = [finding.text for finding in result.findings if finding.ranks == (1,)]
    assert len(texts) == 1
    assert "it waits in all_reduce 'AllReduce' number 4 of group 'pair'" in texts[0]


@pytest.mark.parametrize(
    "calls",
    [
        (
            coll(2, 3, end_position=OPEN_END_POSITION),
            coll(2, 5, group="other", end_position=OPEN_END_POSITION),
        ),
        (
            message(2, EventKind.RECV, 1, end_position=OPEN_END_POSITION),
            message(2, EventKind.RECV, 0, end_position=OPEN_END_POSITION),
        ),
    ],
)
def test_ranks_that_wait_for_each_other_are_a_cycle(calls) -> None:
    """Each waits in a call at which the other never arrives: one cycle, and no missing member."""
    one, other = calls
    (finding,) = merged([op(1), one], [op(1), other]).findings
    assert (finding.kind, finding.ranks) == (FindingKind.CYCLE, (0, 1))
    assert (finding.group, finding.sequence) == (one.group, one.sequence)
    assert "none of them can continue" in finding.text


@pytest.mark.parametrize("named", [(), {0: (1, 4), 1: (1, 4)}])
def test_gap_is_counted_and_hides_absences_it_may_explain(named) -> None:
    """The lost event may be the call; other absences are still reported."""
    full = [op(1), coll(2, 0), coll(3, 1), coll(4, 2)]
    (gap,) = merged(full, [op(1), coll(2, 0), coll(4, 2)], spans=dict(named)).findings
    assert (gap.kind, gap.ranks, gap.position) == (FindingKind.GAP, (1,), 3)
    assert "1 event of rank 1 was lost at position 3" in gap.text
    kinds = [
        f.kind for f in merged(full, [coll(2, 0), coll(3, 1), op(4)], spans={1: (1, 4)}).findings
    ]
    assert kinds == [FindingKind.GAP, FindingKind.MISSING_MEMBER]


def test_rank_with_all_events_lost_is_not_silent() -> None:
    """The rank reported the number of its events, so there is a gap."""
    (gap,) = merged([op(1), coll(2, 0)], spans={0: (1, 2), 1: (1, 2)}).findings
    assert (gap.kind, gap.ranks) == (FindingKind.GAP, (1,))
    assert "2 events of rank 1 were lost between positions 1 and 2" in gap.text


def test_program_finding_names_first_different_operator() -> None:
    """The finding names the minority, its operator and position, and the usual operator."""
    four = ProcessGroup("world", (0, 1, 2, 3))
    usual = [op(1, "A"), coll(2, 0), op(3, "B"), op(4, "C")]
    other = [op(1, "A"), coll(2, 0), op(3, "X"), op(4, "C")]
    (finding,) = merged(usual, usual, other, usual, groups=(four,)).findings
    assert (finding.kind, finding.ranks) == (FindingKind.SEQUENCE_DIFFERENCE, (2,))
    assert (finding.name, finding.position) == ("X", 3)
    for word in ["rank 2 executed 'X' at position 3", "ranks 0-1,3", "executed 'B'"]:
        assert word in finding.text


def test_program_of_unfinished_rank_is_compared_as_far_as_it_got() -> None:
    """A common beginning is no difference; another operator or an end is one."""
    usual = [op(1, "A"), coll(2, 0), op(3, "B"), op(4, "C")]
    late: dict[str, Any] = {"late": (1,), "late_count": 1}
    assert merged(usual, usual[:3], **late).findings == ()
    (finding,) = merged(usual, [*usual[:2], op(3, "X")], **late).findings
    assert (finding.kind, finding.ranks) == (FindingKind.SEQUENCE_DIFFERENCE, (1,))
    (finding,) = merged(usual, usual[:3]).findings
    assert "rank 1 executed nothing more as operator 2 of graph 0" in finding.text
    assert "executed 'C'" in finding.text


def test_programs_of_pipeline_stages_are_not_compared() -> None:
    """Ranks that exchange messages are stages, even in one barrier; replicas are compared."""
    world = ProcessGroup("world", (0, 1, 2, 3))
    first, second = ProcessGroup("dp0", (0, 1)), ProcessGroup("dp1", (2, 3))

    def stage(names: str, group: str, kind: EventKind, peer: int) -> list[RankEvent]:
        return [
            op(1, names[0]),
            message(2, kind, peer),
            op(3, names[1]),
            coll(4, 0, group=group),
            coll(5, 0, kind=EventKind.BARRIER),
        ]

    def found(last: str) -> list[tuple[FindingKind, tuple[int, ...]]]:
        to, since = EventKind.SEND, EventKind.RECV
        programs = (
            stage("AB", "dp0", to, 2),
            stage("AB", "dp0", to, 3),
            stage("CD", "dp1", since, 0),
            stage(last, "dp1", since, 1),
        )
        return [
            (f.kind, f.ranks) for f in merged(*programs, groups=(world, first, second)).findings
        ]

    assert found("CD") == []
    assert found("CE") == [(FindingKind.SEQUENCE_DIFFERENCE, (3,))]
