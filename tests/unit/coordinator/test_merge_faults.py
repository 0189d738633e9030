"""Injected faults are found as exactly what they are; what only looks like one is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from suites.order_jobs import view_of

from rankdump.contract.events import OPEN, Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.findings import FindingKind
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.values import GlobalOrder

WORLD = ProcessGroup("world", (0, 1))
OTHER = ProcessGroup("other", (0, 1))


def op(position: int, name: str = "Default/Add-op1", **more: Any) -> Event:
    return event(position, name, EventKind.OPERATOR, **more)


def coll(position: int, sequence: int, **more: Any) -> Event:
    defaults: dict[str, Any] = {
        "group": "world",
        "element_count": 8,
        "dtype": "float32",
        "sequence": sequence,
    }
    kind = more.pop("kind", EventKind.ALL_REDUCE)
    return event(position, "AllReduce", kind, **(defaults | more))


def message(position: int, kind: EventKind, peer: int, sequence: int = 0, **more: Any) -> Event:
    return event(position, "Msg", kind, group="world", sequence=sequence, peer=peer, **more)


def event(position: int, name: str, kind: EventKind, **more: Any) -> Event:
    start = more.pop("start_us", position)
    fields: dict[str, Any] = {
        "end_position": position,
        "graph": 0,
        "iteration": 3,
        "end_us": start,
    } | more
    return Event(position=position, name=name, kind=kind, start_us=start, **fields)


def merged(*programs: list[Event], groups=(WORLD, OTHER), **more: Any) -> GlobalOrder:
    events = {
        rank: [EventColumns.of(program, groups)] for rank, program in enumerate(programs) if program
    }
    return merge(view_of(events, iteration=3, **more))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"element_count": 9},
            FindingKind.SIZE_MISMATCH,
            ["8 elements on rank 0", "9 elements on rank 1"],
        ),
        ({"dtype": "int8"}, FindingKind.DTYPE_MISMATCH, ["float32 on rank 0", "int8 on rank 1"]),
        (
            {"kind": EventKind.BARRIER},
            FindingKind.OPERATION_MISMATCH,
            ["all_reduce on rank 0", "barrier on rank 1"],
        ),
        (
            {"kind": EventKind.BROADCAST, "element_count": 9},
            FindingKind.OPERATION_MISMATCH,
            ["all_reduce on rank 0", "broadcast on rank 1"],
        ),
    ],
)
def test_a_mismatch_names_the_number_and_both_sides(change, kind, words) -> None:
    """Kind, size or type that differ at one number: one finding, and still one entry."""
    result = merged([op(1), coll(2, 4), coll(3, 5)], [op(1), coll(2, 4), coll(3, 5, **change)])
    (finding,) = result.findings
    for word in ["iteration 3", "number 5 of group 'world'", "(ranks 0 1)", "AllReduce", *words]:
        assert word in finding.text
    assert "elements" not in finding.text or "element_count" in change
    assert (finding.kind, finding.ranks, finding.iteration) == (kind, (1,), 3)
    assert (finding.group, finding.sequence, finding.name) == ("world", 5, "AllReduce")
    assert [e.ranks for e in result.entries() if e.kind.collective] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"element_count": 0, "dtype": ""},
        {"kind": EventKind.SCATTER, "element_count": 0, "dtype": ""},
    ],
)
def test_a_member_that_says_nothing_contradicts_nobody(change) -> None:
    """A size or type left unsaid is not a mismatch."""
    both = {"kind": change.get("kind", EventKind.ALL_REDUCE)}
    assert merged([coll(1, 0, **both)], [coll(1, 0, **(both | change))]).findings == ()


def test_uneven_sizes_are_legal_where_the_operation_allows_them() -> None:
    """all_to_all may move different numbers of elements on each rank."""
    kind = {"kind": EventKind.ALL_TO_ALL}
    assert merged([coll(1, 0, **kind)], [coll(1, 0, element_count=3, **kind)]).findings == ()


def test_a_missing_member_is_named_with_the_last_thing_it_did() -> None:
    """The entry says who is missing; one finding says where that rank stopped, and how often."""
    result = merged(
        [op(1), coll(2, 0), coll(3, 1), coll(4, 2)],
        [op(1, "Default/Mul-op2"), coll(2, 0), op(3, "Default/Last-op9")],
    )
    (finding,) = result.findings
    for word in ["rank 1 never arrived", "number 1 of group 'world'", "and 1 more"]:
        assert word in finding.text
    assert "'Default/Last-op9' at position 3" in finding.text
    missing = [entry.missing for entry in result.entries() if entry.kind.collective]
    assert missing == [(), (1,), (1,)]


def test_a_silent_rank_is_one_finding_and_an_excluded_one_is_none() -> None:
    """A rank without any event is named once for all its calls; one the plan leaves out, never."""
    program = [coll(1, 0), coll(2, 0, group="other"), message(3, EventKind.SEND, 1)]
    (finding,) = merged(program).findings
    assert "rank 1 reported nothing" in finding.text
    assert "and 2 more" in finding.text
    result = merged(program, excluded=frozenset({1}))
    assert result.findings == ()
    assert all(entry.missing == () for entry in result.entries())


def test_two_groups_entered_in_opposite_order_are_one_circle() -> None:
    """The circle is reported once with both calls, and the older call goes first."""
    a, b = {"group": "world"}, {"group": "other"}
    result = merged(
        [op(1), coll(2, 0, **a), op(3), coll(4, 0, **b), op(5), coll(6, 1, **a)],
        [op(1), coll(2, 0, start_us=9, **b), op(3), coll(4, 0, **a), op(5), coll(6, 1, **a)],
    )
    (finding,) = result.findings
    assert "circle" in finding.text
    assert "group 'world'" in finding.text
    assert "group 'other'" in finding.text
    order = [(entry.group, entry.sequence) for entry in result.entries() if entry.kind.collective]
    # Both are as old as 9: rank 0 entered `world` first.
    assert order == [("world", 0), ("other", 0), ("world", 1)]
    for rank in (0, 1):
        own = [e.start_us for e in result.entries() if e.ranks == (rank,)]
        assert own == sorted(own)


def test_a_circle_is_broken_at_the_older_call() -> None:
    """Which call goes first follows from time, not from names or numbers."""
    result = merged(
        [coll(1, 0, start_us=50), coll(2, 0, group="other", start_us=50)],
        [coll(1, 0, group="other", start_us=10), coll(2, 0, start_us=90)],
    )
    assert [entry.group for entry in result.entries()] == ["other", "world"]


def test_overlapping_calls_in_opposite_order_are_no_circle() -> None:
    """What one rank has under way at once binds nothing."""
    a, b = {"group": "world"}, {"group": "other"}
    result = merged(
        [coll(1, 0, end_position=2, **a), coll(2, 0, **b)],
        [coll(1, 0, end_position=2, **b), coll(2, 0, **a)],
    )
    assert result.findings == ()


def test_receives_posted_before_the_sends_are_no_circle() -> None:
    """Both ranks post irecv, then isend, then wait: nothing to find, each send first."""
    programs = [
        [
            message(1, EventKind.RECV, peer, end_position=3),
            message(2, EventKind.SEND, peer, end_position=3),
            op(3),
        ]
        for peer in (1, 0)
    ]
    result = merged(*programs)
    assert result.findings == ()
    ends = [(entry.kind, entry.ranks[0]) for entry in result.entries()]
    for sender, receiver in ((0, 1), (1, 0)):
        assert ends.index((EventKind.SEND, sender)) < ends.index((EventKind.RECV, receiver))


def test_blocking_receives_before_the_sends_are_a_circle() -> None:
    """Both ranks wait for the other's send before their own: a deadlock, of four calls."""
    (finding,) = merged(
        [message(1, EventKind.RECV, 1), message(2, EventKind.SEND, 1)],
        [message(1, EventKind.RECV, 0), message(2, EventKind.SEND, 0)],
    ).findings
    assert finding.kind is FindingKind.CYCLE
    assert finding.text.count("; then ") == 4


@pytest.mark.parametrize("kind", [EventKind.SEND, EventKind.RECV])
def test_one_end_of_a_message_without_the_other_is_found(kind) -> None:
    """A send nobody received, or a receive nobody sent: one finding on the peer."""
    result = merged([message(1, kind, 1, sequence=6)], [op(1)])
    (finding,) = result.findings
    for word in [kind.name.lower(), "number 6", "no other end on rank 1", "Default/Add-op1"]:
        assert word in finding.text
    assert [entry.missing for entry in result.entries() if entry.name == "Msg"] == [(1,)]


def test_messages_disagree_like_members_do() -> None:
    """Send and receive of one message name the same size and type."""
    (finding,) = merged(
        [message(1, EventKind.SEND, 1, element_count=4, dtype="int8")],
        [message(1, EventKind.RECV, 0, element_count=5, dtype="int8")],
    ).findings
    assert "4 elements on rank 0, 5 elements on rank 1" in finding.text
    assert "from rank 0" in finding.text


def test_groups_of_one_name_and_other_members_are_different_groups() -> None:
    """Members are matched by name and ranks together."""
    left, right = ProcessGroup("tp", (0, 1)), ProcessGroup("tp", (3, 2))
    program = [coll(1, 0, group="tp")]
    events = {rank: [EventColumns.of(program, (left if rank < 2 else right,))] for rank in range(4)}
    result = merge(view_of(events, iteration=3))
    assert [entry.ranks for entry in result.entries()] == [(0, 1), (2, 3)]
    assert result.findings == ()


def test_a_group_that_a_rank_never_declared_is_looked_up_at_the_others() -> None:
    """A batch may come without its groups; nobody knowing the group is no fault either."""
    program = [coll(1, 0)]
    bare, full = EventColumns.of(program), EventColumns.of(program, (WORLD,))
    assert merge(view_of({0: [full], 1: [bare]}, iteration=3)).findings == ()
    (entry,) = merge(view_of({0: [bare], 1: [bare]}, iteration=3)).entries()
    assert (entry.ranks, entry.missing) == ((0, 1), ())


def test_repeated_numbers_are_matched_by_turn() -> None:
    """A framework without numbers says 0 each time: the n-th call meets the n-th call."""
    program = [coll(1, 0), coll(2, 0), coll(3, 0)]
    result = merged(program, program)
    assert [entry.ranks for entry in result.entries()] == [(0, 1)] * 3
    assert result.findings == ()


def test_two_events_at_one_position_are_found() -> None:
    """The same event twice is a repeat; two different ones are a contradiction."""
    first = [op(1), op(2)]
    assert merged([*first, *first]).findings == ()
    (finding,) = merged([*first, replace(first[0], name="Default/Else-op1")]).findings
    assert "rank 0: two different events at position 1" in finding.text


@pytest.mark.parametrize("big", [2**63, 2**64 - 1])
def test_numbers_at_the_edge_of_their_type_do_not_break_the_merge(big) -> None:
    """Hostile positions, numbers and times give an order, not an exception."""
    low, high = -(2**63), 2**63 - 1
    program = [
        op(0, start_us=high),
        coll(1, big, end_position=big, start_us=low),
        op(big, start_us=low),
    ]
    result = merged(program, program)
    assert len(result) == 5
    assert [entry.sequence for entry in result.entries() if entry.kind.collective] == [big]


def test_nothing_gives_nothing() -> None:
    """No rank, no batch, no event: an empty order."""
    for events in ({}, {0: []}, {0: [EventColumns.of([])]}):
        result = merge(view_of(events, iteration=3))
        assert (len(result), list(result.entries()), result.findings) == (0, [], ())


def test_an_entry_carries_what_its_members_say() -> None:
    """Graph, name and kind from the lowest rank, earliest start, latest end, rising positions."""
    result = merged(
        [coll(1, 5, graph=2, start_us=40, end_us=60)], [coll(1, 5, start_us=30, end_us=50)]
    )
    (entry,) = result.entries(100)
    assert (entry.position, entry.graph, entry.iteration) == (100, 2, 3)
    assert (entry.start_us, entry.end_us, entry.group, entry.sequence) == (30, 60, "world", 5)


def test_a_call_that_is_not_complete_has_its_member() -> None:
    """Who waits has arrived; who has not come is named, with what it did instead."""
    waiting = coll(2, 7, end_position=OPEN)
    result = merged([op(1), waiting], [op(1), op(2, "Default/Stuck-op2")])
    (finding,) = result.findings
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING_MEMBER, (1,))
    assert (finding.group, finding.sequence) == ("world", 7)
    assert (finding.name, finding.position) == ("Default/Stuck-op2", 2)
    assert result.calls.waiting(0) == (0,)
    assert list(result.entries())[-1].missing == (1,)


def test_what_is_complete_replaces_what_was_not() -> None:
    """In any order, and with times that were corrected differently: no conflict, nobody waits."""
    begun, done = coll(1, 0, end_position=OPEN), coll(1, 0, start_us=4, end_us=9)
    for program in ([begun, done], [done, begun], [begun, begun, done, begun]):
        result = merged(program, program)
        assert result.findings == ()
        assert result.calls.waiting(0) == ()
        assert [entry.end_us for entry in result.entries()] == [9]


def test_a_provisional_view_claims_nothing_final() -> None:
    """While an iteration runs, what is missing may come, and what completes late is not lost."""
    programs = [op(1), coll(2, 0)], [op(1), op(3)]
    (finding,) = merged(*programs, provisional=True).findings
    assert finding.provisional
    assert "rank 1 has not arrived so far" in finding.text
    (finding,) = merged([coll(1, 0)], provisional=True).findings
    assert "rank 1 reported nothing so far" in finding.text
    (finding,) = merged([message(1, EventKind.SEND, 1)], [op(1)], provisional=True).findings
    assert "no other end so far on rank 1" in finding.text


def test_a_rank_that_was_not_waited_for_is_not_said_to_have_stayed_away() -> None:
    """The iteration was merged at its deadline: what the rank did later nobody knows."""
    (finding,) = merged([op(1), coll(2, 0)], [op(1)], late=(1,), late_count=1).findings
    assert "rank 1 had not arrived in time" in finding.text
    assert not finding.provisional


def test_a_rank_that_waits_elsewhere_is_said_to() -> None:
    """Who is missing because it waits for a third is named with the call it waits in."""
    trio = ProcessGroup("trio", (0, 1, 2))
    pair = ProcessGroup("pair", (1, 2))
    result = merged(
        [coll(1, 0, group="trio", end_position=OPEN)],
        [coll(1, 4, group="pair", end_position=OPEN)],
        [op(1)],
        groups=(trio, pair),
    )
    texts = [finding.text for finding in result.findings if finding.ranks == (1,)]
    assert len(texts) == 1
    assert "it waits in all_reduce 'AllReduce' number 4 of group 'pair'" in texts[0]


@pytest.mark.parametrize(
    "calls",
    [
        (coll(2, 3, end_position=OPEN), coll(2, 5, group="other", end_position=OPEN)),
        (
            message(2, EventKind.RECV, 1, end_position=OPEN),
            message(2, EventKind.RECV, 0, end_position=OPEN),
        ),
    ],
)
def test_ranks_that_stand_still_for_each_other_are_a_circle(calls) -> None:
    """Each waits in a call that the other never comes to: one circle, nobody is called missing."""
    one, other = calls
    (finding,) = merged([op(1), one], [op(1), other]).findings
    assert (finding.kind, finding.ranks) == (FindingKind.CYCLE, (0, 1))
    assert (finding.group, finding.sequence) == (one.group, one.sequence)
    assert "nobody gets any further" in finding.text


@pytest.mark.parametrize("named", [(), {0: (1, 4), 1: (1, 4)}])
def test_a_gap_is_counted_and_withdraws_what_it_may_explain(named) -> None:
    """The lost event may be the call; a call that cannot be it is still claimed."""
    full = [op(1), coll(2, 0), coll(3, 1), coll(4, 2)]
    (gap,) = merged(full, [op(1), coll(2, 0), coll(4, 2)], spans=dict(named)).findings
    assert (gap.kind, gap.ranks, gap.position) == (FindingKind.GAP, (1,), 3)
    assert "1 event of rank 1 was lost at position 3" in gap.text
    kinds = [
        f.kind for f in merged(full, [coll(2, 0), coll(3, 1), op(4)], spans={1: (1, 4)}).findings
    ]
    assert kinds == [FindingKind.GAP, FindingKind.MISSING_MEMBER]


def test_a_rank_whose_every_event_was_lost_is_not_silent() -> None:
    """It said how many there are: a gap, and no claim that it did nothing."""
    (gap,) = merged([op(1), coll(2, 0)], spans={0: (1, 2), 1: (1, 2)}).findings
    assert (gap.kind, gap.ranks) == (FindingKind.GAP, (1,))
    assert "2 events of rank 1 were lost between positions 1 and 2" in gap.text


def test_ranks_of_one_program_disagree_at_the_first_operator_that_differs() -> None:
    """The minority is named with its operator, where it stands, and what the others did."""
    four = ProcessGroup("world", (0, 1, 2, 3))
    usual = [op(1, "A"), coll(2, 0), op(3, "B"), op(4, "C")]
    other = [op(1, "A"), coll(2, 0), op(3, "X"), op(4, "C")]
    (finding,) = merged(usual, usual, other, usual, groups=(four,)).findings
    assert (finding.kind, finding.ranks) == (FindingKind.SEQUENCE_DIFFERENCE, (2,))
    assert (finding.name, finding.position) == ("X", 3)
    for word in ["rank 2 executed 'X' at position 3", "ranks 0 1 3", "executed 'B'"]:
        assert word in finding.text


def test_a_rank_that_is_on_its_way_agrees_as_far_as_it_got() -> None:
    """A beginning is no difference; another operator in it is one, and an end is one, too."""
    usual = [op(1, "A"), coll(2, 0), op(3, "B"), op(4, "C")]
    late: dict[str, Any] = {"late": (1,), "late_count": 1}
    assert merged(usual, usual[:3], **late).findings == ()
    (finding,) = merged(usual, [*usual[:2], op(3, "X")], **late).findings
    assert (finding.kind, finding.ranks) == (FindingKind.SEQUENCE_DIFFERENCE, (1,))
    (finding,) = merged(usual, usual[:3]).findings
    assert "rank 1 executed nothing more as operator 2 of graph 0" in finding.text
    assert "executed 'C'" in finding.text


def test_stages_of_a_pipeline_run_different_programs() -> None:
    """They send to each other, so meeting in one barrier makes them no equals; replicas are."""
    world = ProcessGroup("world", (0, 1, 2, 3))
    first, second = ProcessGroup("dp0", (0, 1)), ProcessGroup("dp1", (2, 3))

    def stage(names: str, group: str, kind: EventKind, peer: int) -> list[Event]:
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
