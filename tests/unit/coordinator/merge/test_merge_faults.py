"""Findings about faults, and none about programs that only look faulty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.order_events import WORLD, coll, merged, message, op
from support.order_jobs import view_of

from rankdump._core.events import EventColumns, EventKind, FindingKind, ProcessGroup
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration


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
def test_mismatch_names_sequence_and_both_sides(change, kind, words) -> None:
    """A different kind, size or type gives one finding and one entry."""
    result = merged([op(1), coll(2, 4), coll(3, 5)], [op(1), coll(2, 4), coll(3, 5, **change)])
    (finding,) = result.findings
    for word in ["iteration 3", "number 5 of group 'world'", "(ranks 0-1)", "AllReduce", *words]:
        assert word in finding.text
    assert "elements" not in finding.text or "element_count" in change
    assert (finding.kind, finding.ranks, finding.iteration) == (kind, (1,), 3)
    assert (finding.group, finding.sequence, finding.name) == ("world", 5, "AllReduce")
    assert [e.ranks for e in result.entries() if e.kind.is_collective] == [(0, 1), (0, 1)]


def test_repeated_mismatch_is_one_finding() -> None:
    """A rank with another element type in every call; the finding has the number of calls."""
    program = [coll(at, at) for at in range(1, 41)]
    other = [coll(at, at, dtype="int8") for at in range(1, 41)]
    (finding,) = merged(program, other).findings
    assert (finding.kind, finding.sequence) == (FindingKind.DTYPE_MISMATCH, 1)
    assert "the same ranks differ in 39 more" in finding.text


@pytest.mark.parametrize(
    "change",
    [
        {"element_count": 0, "dtype": ""},
        {"kind": EventKind.SCATTER, "element_count": 0, "dtype": ""},
    ],
)
def test_unset_size_or_type_is_no_mismatch(change) -> None:
    both = {"kind": change.get("kind", EventKind.ALL_REDUCE)}
    assert merged([coll(1, 0, **both)], [coll(1, 0, **(both | change))]).findings == ()


def test_uneven_sizes_of_all_to_all_are_no_mismatch() -> None:
    kind = {"kind": EventKind.ALL_TO_ALL}
    assert merged([coll(1, 0, **kind)], [coll(1, 0, element_count=3, **kind)]).findings == ()


def test_missing_member_is_reported_with_its_last_operator() -> None:
    """The entry names the rank; one finding has its last operator and the number of calls."""
    result = merged(
        [op(1), coll(2, 0), coll(3, 1), coll(4, 2)],
        [op(1, "Default/Mul-op2"), coll(2, 0), op(3, "Default/Last-op9")],
    )
    (finding,) = result.findings
    for word in ["rank 1 never arrived", "number 1 of group 'world'", "and 1 more"]:
        assert word in finding.text
    assert "'Default/Last-op9' at position 3" in finding.text
    missing = [entry.missing for entry in result.entries() if entry.kind.is_collective]
    assert missing == [(), (1,), (1,)]


def test_silent_rank_is_one_finding_and_excluded_rank_none() -> None:
    """One finding covers all calls of a rank without events."""
    program = [coll(1, 0), coll(2, 0, group="other"), message(3, EventKind.SEND, 1)]
    (finding,) = merged(program).findings
    assert "rank 1 reported nothing" in finding.text
    assert "and 2 more" in finding.text
    result = merged(program, excluded=frozenset({1}))
    assert result.findings == ()
    assert all(entry.missing == () for entry in result.entries())


def test_absence_of_a_rank_that_an_error_ended_names_the_iteration() -> None:
    """In the iteration of the error, and in the one that the others had begun."""
    program = [op(1), coll(2, 0)]
    (finding,) = merged(program, [op(1)], raised={1: 3}).findings
    assert finding.kind is FindingKind.MISSING_MEMBER
    assert finding.text.endswith("and an error ended it in iteration 3")
    (finding,) = merged(program, raised={1: 2}).findings
    assert finding.kind is FindingKind.SILENT_RANK
    assert "rank 1 ended with an error in iteration 2 but is expected in" in finding.text


def test_groups_entered_in_opposite_order_are_one_cycle() -> None:
    """The cycle is reported once with both calls, and the older call comes first."""
    a, b = {"group": "world"}, {"group": "other"}
    result = merged(
        [op(1), coll(2, 0, **a), op(3), coll(4, 0, **b), op(5), coll(6, 1, **a)],
        [op(1), coll(2, 0, start_us=9, **b), op(3), coll(4, 0, **a), op(5), coll(6, 1, **a)],
    )
    (finding,) = result.findings
    assert "circle" in finding.text
    assert "group 'world'" in finding.text
    assert "group 'other'" in finding.text
    order = [
        (entry.group, entry.sequence) for entry in result.entries() if entry.kind.is_collective
    ]
    # Both are as old as 9: rank 0 entered `world` first.
    assert order == [("world", 0), ("other", 0), ("world", 1)]
    for rank in (0, 1):
        own = [e.start_us for e in result.entries() if e.ranks == (rank,)]
        assert own == sorted(own)


def test_cycle_is_broken_at_oldest_call() -> None:
    """The choice depends on time, not on names or numbers."""
    result = merged(
        [coll(1, 0, start_us=50), coll(2, 0, group="other", start_us=50)],
        [coll(1, 0, group="other", start_us=10), coll(2, 0, start_us=90)],
    )
    assert [entry.group for entry in result.entries()] == ["other", "world"]


def test_overlapping_calls_in_opposite_order_are_no_cycle() -> None:
    """Calls of one rank that overlap are not ordered."""
    a, b = {"group": "world"}, {"group": "other"}
    result = merged(
        [coll(1, 0, end_position=2, **a), coll(2, 0, **b)],
        [coll(1, 0, end_position=2, **b), coll(2, 0, **a)],
    )
    assert result.findings == ()


def test_asynchronous_receives_before_sends_are_no_cycle() -> None:
    """Both ranks post irecv, then isend, then wait; each send comes first."""
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


def test_blocking_receives_before_sends_are_a_cycle() -> None:
    """Both ranks wait for the other's send before their own: a deadlock of four calls."""
    (finding,) = merged(
        [message(1, EventKind.RECV, 1), message(2, EventKind.SEND, 1)],
        [message(1, EventKind.RECV, 0), message(2, EventKind.SEND, 0)],
    ).findings
    assert finding.kind is FindingKind.CYCLE
    assert finding.text.count("; then ") == 4


@pytest.mark.parametrize("kind", [EventKind.SEND, EventKind.RECV])
def test_message_with_one_end_is_a_finding(kind) -> None:
    """A send without a receive, or the reverse, is one finding on the peer."""
    result = merged([message(1, kind, 1, sequence=6)], [op(1)])
    (finding,) = result.findings
    for word in [kind.name.lower(), "number 6", "no counterpart on rank 1", "Default/Add-op1"]:
        assert word in finding.text
    assert [entry.missing for entry in result.entries() if entry.name == "Msg"] == [(1,)]


def test_message_ends_with_different_size_or_type_are_a_mismatch() -> None:
    (finding,) = merged(
        [message(1, EventKind.SEND, 1, element_count=4, dtype="int8")],
        [message(1, EventKind.RECV, 0, element_count=5, dtype="int8")],
    ).findings
    assert "4 elements on rank 0, 5 elements on rank 1" in finding.text
    assert "from rank 0" in finding.text


def test_groups_of_same_name_and_other_ranks_are_distinct() -> None:
    left, right = ProcessGroup("tp", (0, 1)), ProcessGroup("tp", (3, 2))
    program = [coll(1, 0, group="tp")]
    events = {
        rank: [EventColumns.from_events(program, (left if rank < 2 else right,))]
        for rank in range(4)
    }
    result = merge_iteration(view_of(events, iteration=3))
    assert [entry.ranks for entry in result.entries()] == [(0, 1), (2, 3)]
    assert result.findings == ()


def test_undeclared_group_is_found_in_batches_of_other_ranks() -> None:
    """A batch may lack its groups, and a group that no rank declared is no error."""
    program = [coll(1, 0)]
    bare, full = EventColumns.from_events(program), EventColumns.from_events(program, (WORLD,))
    assert merge_iteration(view_of({0: [full], 1: [bare]}, iteration=3)).findings == ()
    (entry,) = merge_iteration(view_of({0: [bare], 1: [bare]}, iteration=3)).entries()
    assert (entry.ranks, entry.missing) == ((0, 1), ())


def test_repeated_sequences_are_matched_by_order() -> None:
    """A framework without numbers reports 0 each time, so the n-th calls are matched."""
    program = [coll(1, 0), coll(2, 0), coll(3, 0)]
    result = merged(program, program)
    assert [entry.ranks for entry in result.entries()] == [(0, 1)] * 3
    assert result.findings == ()


def test_different_events_at_one_position_are_a_conflict() -> None:
    """The same event twice is a repetition, not a conflict."""
    first = [op(1), op(2)]
    assert merged([*first, *first]).findings == ()
    (finding,) = merged([*first, replace(first[0], name="Default/Else-op1")]).findings
    assert "rank 0 reported two different events at position 1" in finding.text


@pytest.mark.parametrize("big", [2**63, 2**64 - 1])
def test_merge_handles_extreme_numbers(big) -> None:
    """Hostile positions, numbers and times give an order, not an exception."""
    low, high = -(2**63), 2**63 - 1
    program = [
        op(0, start_us=high),
        coll(1, big, end_position=big, start_us=low),
        op(big, start_us=low),
    ]
    result = merged(program, program)
    assert len(result) == 5
    assert [entry.sequence for entry in result.entries() if entry.kind.is_collective] == [big]


def test_merge_of_no_events_is_empty() -> None:
    for events in ({}, {0: []}, {0: [EventColumns.from_events([])]}):
        result = merge_iteration(view_of(events, iteration=3))
        assert (len(result), list(result.entries()), result.findings) == (0, [], ())


def test_call_entry_combines_its_members() -> None:
    """Graph, name and kind from the lowest rank, earliest start, latest end, rising positions."""
    result = merged(
        [coll(1, 5, graph=2, start_us=40, end_us=60)], [coll(1, 5, start_us=30, end_us=50)]
    )
    (entry,) = result.entries(100)
    assert (entry.position, entry.graph, entry.iteration) == (100, 2, 3)
    assert (entry.start_us, entry.end_us, entry.group, entry.sequence) == (30, 60, "world", 5)
