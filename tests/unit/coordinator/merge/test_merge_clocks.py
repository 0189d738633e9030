"""Correction of clocks by the times at which members leave a collective."""

from __future__ import annotations

import random as randomness
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.order_jobs import Program, on_clocks, view_of
from support.order_rules import as_corrected

from rankdump._core.events import EventColumns, EventKind, ProcessGroup, RankEvent
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration

HOUR_US = 3_600_000_000
OPERATORS = 6
GAP_US = 100
ROUND_US = (OPERATORS + 2) * GAP_US

Meetings = Sequence[ProcessGroup]
"""The group of each collective of a job, one after the other."""


def rounds(meetings: Meetings, ranks: int, *, noise: int = 0) -> Program:
    """Return programs that meet every ROUND_US and run operators between, on a true clock."""
    random = randomness.Random(3)
    program: Program = {rank: [] for rank in range(ranks)}
    numbers: dict[ProcessGroup, int] = {}
    for turn, group in enumerate(meetings):
        number = numbers[group] = numbers.get(group, -1) + 1
        for rank, own in program.items():
            for step in range(OPERATORS):
                at = turn * ROUND_US + (step + 1) * GAP_US - 7 * rank
                own.append(
                    event(len(own) + 1, f"Op{step}", EventKind.OPERATOR, at, at + GAP_US // 2)
                )
            if rank in group.ranks:
                begun = turn * ROUND_US + (OPERATORS + 1) * GAP_US - 11 * rank
                end = (turn + 1) * ROUND_US + random.randint(-noise, noise)
                kind = EventKind.ALL_REDUCE
                call = event(
                    len(own) + 1, "All", kind, begun, end, group=group.name, sequence=number
                )
                own.append(call)
    return program


def event(position: int, name: str, kind: EventKind, start: int, end: int, **more) -> RankEvent:
    return RankEvent(0, 7, position, position, name, kind, start, end, **more)


def merged(program: Program, meetings: Meetings, hosts: int = 0) -> GlobalOrder:
    groups = tuple(dict.fromkeys(meetings))
    events = {rank: [EventColumns.from_events(own, groups)] for rank, own in program.items()}
    clocks = {rank: f"host{rank // hosts}" for rank in program} if hosts else {}
    return merge_iteration(view_of(events, clocks=clocks))


def expect_within_collectives(order: GlobalOrder, program: Program) -> None:
    """Every operator starts and ends after the collective before it and before the one after."""
    members = order.calls.members
    ends = dict(
        zip(
            zip(members["rank"].tolist(), members["position"].tolist(), strict=True),
            members["end_us"].tolist(),
            strict=True,
        )
    )
    lines = (order.columns[f].tolist() for f in ("call", "rank", "position", "end_us"))
    ends |= {(r, p): end for call, r, p, end in zip(*lines, strict=True) if call < 0}
    for rank, own in as_corrected(program, order).items():
        left = None
        before: list[RankEvent] = []
        for each in own:
            if each.kind is EventKind.OPERATOR:
                before.append(each)
                assert left is None or left <= each.start_us
                assert each.start_us <= ends[rank, each.position]
            else:
                assert all(ends[rank, op.position] <= each.start_us for op in before), (rank, each)
                left = ends[rank, each.position]
                before.clear()


def starts(program: Program) -> list[int]:
    return [each.start_us for own in program.values() for each in own]


def world(ranks: int) -> ProcessGroup:
    return ProcessGroup("world", tuple(range(ranks)))


@pytest.mark.parametrize("by", [-HOUR_US, HOUR_US])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@settings(max_examples=30, deadline=None)
@given(at=st.integers(3 * ROUND_US, 10 * ROUND_US), host=st.integers(0, 3))
def test_clock_step_is_corrected_where_it_happened(by, ranks, at, host) -> None:
    """Events stay within the collectives around them, wherever the clock is set."""
    meetings = [world(ranks)] * 13
    true = rounds(meetings, ranks)

    def clock(rank: int, true_us: int) -> int:
        return true_us + by * (rank == host % ranks and true_us >= at)

    program = on_clocks(true, clock)
    order = merged(program, meetings)
    assert order.findings == ()
    expect_within_collectives(order, program)
    if ranks > 2:
        # The others agree on what the time is, so it comes out as it was.
        assert order.skews == {f"rank {host % ranks}": -by}
        assert starts(as_corrected(program, order)) == starts(true)


def test_constant_clock_offset_is_corrected() -> None:
    """The offset found at the first collective also applies before it."""
    meetings = [world(3)] * 6
    true = rounds(meetings, 3)
    program = on_clocks(true, lambda rank, true_us: true_us + 5000 * (rank == 1))
    order = merged(program, meetings)
    assert order.skews == {"rank 1": -5000}
    first = {own[0].start_us for own in as_corrected(program, order).values()}
    assert first == {GAP_US, GAP_US - 7, GAP_US - 14}


def test_clock_drift_is_corrected() -> None:
    """A drift of a tenth of a percent is corrected to within the noise."""
    meetings = [world(3)] * 400
    true = rounds(meetings, 3)
    program = on_clocks(true, lambda rank, true_us: true_us + true_us // 1000 * (rank == 2))
    result = as_corrected(program, merged(program, meetings))
    for found, was in zip(result[2], true[2], strict=True):
        assert abs(found.start_us - was.start_us) <= 110


@pytest.mark.parametrize("noise", [0, 40, 5000])
def test_late_exits_do_not_change_a_clock(noise) -> None:
    """Ranks leave some collectives late without a clock difference."""
    meetings = [world(4)] * 60
    program = rounds(meetings, 4, noise=noise)
    order = merged(program, meetings)
    assert order.skews == {}
    assert starts(as_corrected(program, order)) == starts(program)


def test_few_exits_correct_large_differences_only() -> None:
    """At two collectives a few milliseconds may be chance; a second is not."""
    meetings = [world(3)] * 2
    for offset, corrected in ((5000, False), (1_000_000, True)):

        def clock(rank: int, true_us: int, offset: int = offset) -> int:
            return true_us + offset * (rank == 1)

        order = merged(on_clocks(rounds(meetings, 3), clock), meetings)
        assert bool(order.skews) is corrected


def test_clocks_are_compared_across_connected_groups() -> None:
    """No collective has all ranks, so clocks are compared through common ones."""
    chain = [ProcessGroup(f"g{at}", (at, at + 1)) for at in range(4)]
    meetings = chain * 8
    true = rounds(meetings, 5)
    program = on_clocks(true, lambda rank, true_us: true_us + 40_000 * rank * rank)
    order = merged(program, meetings)
    result = as_corrected(program, order)
    offsets = {
        found.start_us - was.start_us
        for rank, own in result.items()
        for found, was in zip(own, true[rank], strict=True)
    }
    # All on one clock, whichever it is.
    assert len(offsets) == 1


def test_clock_correction_applies_to_all_ranks_of_host() -> None:
    """Only one rank of the host meets ranks of other hosts."""
    across, inside = ProcessGroup("across", (0, 2, 4)), ProcessGroup("inside", (2, 3))
    meetings = [across, inside] * 8
    true = rounds(meetings, 6)
    program = on_clocks(true, lambda rank, true_us: true_us - 70_000 * (rank in (2, 3)))
    order = merged(program, meetings, hosts=2)
    assert order.skews == {"host1": 70_000}
    assert starts(as_corrected(program, order)) == starts(true)


def test_clock_step_within_an_event_corrects_each_end() -> None:
    """The event began before the step and ended after it."""
    meetings = [world(3)] * 12
    true = rounds(meetings, 3)
    at = 5 * ROUND_US + 3 * GAP_US + 10

    def clock(rank: int, true_us: int) -> int:
        return true_us - HOUR_US * (rank == 0 and true_us >= at)

    order = merged(on_clocks(true, clock), meetings)
    took = order.columns["end_us"] - order.columns["start_us"]
    assert took[order.columns["call"] < 0].tolist() == [GAP_US // 2] * (3 * 12 * OPERATORS)
