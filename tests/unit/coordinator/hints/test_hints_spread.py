"""Spreads of arrivals and the share of dumping, compared with a simulated job without dumping."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st
from support.lockstep import JobCall, dumped, events
from support.order_jobs import view_of

from rankdumpd.coordinator.hints.spread_history import (
    CallSpread,
    RankTimeline,
    measure_call_spreads,
)
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration

Pair: TypeAlias = tuple[int, int]
times = st.integers(0, 1000)
pairs = st.tuples(times, times)


@st.composite
def jobs(draw: st.DrawFn, *, stalls: st.SearchStrategy[int] = times) -> list[JobCall]:
    """Any sequence of collectives of sub-groups and messages between pairs."""
    world = draw(st.integers(2, 5))
    calls: list[JobCall] = []
    for _ in range(draw(st.integers(1, 12))):
        message = draw(st.booleans())
        size = 2 if message else draw(st.integers(2, world))
        members = draw(st.permutations(range(world)))[:size]
        members = tuple(members if message else sorted(members))
        work = tuple(draw(times) for _ in members)
        stall = tuple(draw(stalls) for _ in members)
        calls.append(JobCall(members, work, stall, message))
    return calls


def found(
    calls: list[JobCall], programs: dict[int, RankTimeline] | None = None
) -> list[CallSpread]:
    order = merge_iteration(view_of(events(calls), iteration=0))
    return list(measure_call_spreads(order, {} if programs is None else programs, {}))


def measured_waits(calls: list[JobCall]) -> list[tuple[int, int]]:
    """Return spread and dump share of all waits; a send has none."""
    order = merge_iteration(view_of(events(calls), iteration=0))
    kinds = order.calls.columns["kind"]
    return sorted(
        (each.spread_us, each.dump_us)
        for each in measure_call_spreads(order, {}, {})
        if kinds[each.call] != 11
    )


@settings(deadline=None)
@given(calls=jobs())
def test_dump_share_equals_difference_to_job_without_dumping(calls: list[JobCall]):
    """Compared with a second run of the job without stalls."""
    assert measured_waits(calls) == sorted(dumped(calls))


@settings(deadline=None)
@given(calls=jobs(stalls=st.just(0)))
def test_dump_share_is_zero_without_stalls(calls: list[JobCall]):
    assert not any(part for _, part in measured_waits(calls))


@settings(deadline=None)
@given(calls=jobs(), deferred=st.data())
def test_dump_share_is_at_most_the_spread(calls: list[JobCall], deferred: st.DataObject):
    mixed = [
        JobCall(c.members, c.work_us, c.stall_us, deferred=deferred.draw(st.booleans()))
        for c in calls
        if not c.message
    ]
    assert all(0 <= part <= spread for spread, part in measured_waits(mixed))


@settings(deadline=None)
@given(rank=st.integers(0, 2), stall=st.integers(1, 10**9))
def test_dump_share_of_single_stalled_rank_is_whole_spread(rank: int, stall: int):
    stalls = tuple(stall if each == rank else 0 for each in range(3))
    (spread,) = found([JobCall((0, 1, 2), (5, 5, 5), stalls)])
    assert (spread.spread_us, spread.dump_us, spread.last_rank) == (stall, stall, rank)


def test_delay_propagates_through_third_rank():
    """Rank 0 stalls, rank 1 waits for it, and rank 2 waits for rank 1."""
    calls = [JobCall((0, 1), (5, 5), (700, 0)), JobCall((1, 2), (5, 10), (0, 0))]
    assert [(each.spread_us, each.dump_us) for each in found(calls)] == [(700, 700), (700, 700)]


def test_equal_stalls_cause_no_dump_share():
    """One rank sleeps, and all ranks dump for the same time."""
    (spread,) = found([JobCall((0, 1), (5, 9005), (700, 700))])
    assert (spread.spread_us, spread.dump_us) == (9000, 0)


@settings(deadline=None)
@given(rounds=st.lists(st.tuples(times, times, pairs, pairs), min_size=1, max_size=6))
def test_overlapping_calls_propagate_delays(rounds: list[tuple[int, int, Pair, Pair]]):
    """As with DDP, calls start one after the other and are all awaited at the start of the last."""
    calls: list[JobCall] = []
    for work, more, stalls, later in rounds:
        calls.append(JobCall((0, 1), (work, work), stalls, deferred=True))
        calls.append(JobCall((0, 1), (more, more), later))
    assert measured_waits(calls) == sorted(dumped(calls))


def test_stall_of_new_session_starts_at_zero():
    """A lower stall than before is not a negative one."""
    programs = {0: RankTimeline(stall_us=10_000, delay_us=50), 1: RankTimeline(0, 0)}
    (spread,) = found([JobCall((0, 1), (0, 0), (30, 0))], programs)
    assert (spread.spread_us, spread.dump_us) == (30, 30)
    assert programs[0].stall_us == 30


def test_missing_member_has_known_wait_as_spread():
    """The others waited for it until they gave up."""
    batches = events([JobCall((0, 1), (5, 5), (0, 0)), JobCall((0, 1), (5, 5), (0, 0))])
    late = batches[0][0]
    late.columns["end_us"][1] = late.columns["start_us"][1] + 20_000_000
    (kept,) = batches[1]
    batches[1] = [type(kept)(kept.names, kept.groups, {n: c[:1] for n, c in kept.columns.items()})]
    spread = list(measure_call_spreads(merge_iteration(view_of(batches, iteration=0)), {}, {}))[1]
    assert (spread.first_rank, spread.last_rank, spread.arrived) == (0, 1, False)
    assert (spread.spread_us, spread.dump_us) == (20_000_000, 0)
    order = merge_iteration(view_of(batches, iteration=0))
    for stalled_us, part_us in ((7_000_000, 7_000_000), (90_000_000, 20_000_000)):
        spread = list(measure_call_spreads(order, {}, {1: stalled_us}))[1]
        assert (spread.spread_us, spread.dump_us) == (20_000_000, part_us)
