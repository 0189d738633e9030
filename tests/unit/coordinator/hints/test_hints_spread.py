"""Spreads of arrivals and dumping's part of them, against a job that is played without dumping."""

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


def told(calls: list[JobCall]) -> list[tuple[int, int]]:
    """Spread and part of all waits; a send has none."""
    order = merge_iteration(view_of(events(calls), iteration=0))
    kinds = order.calls.columns["kind"]
    return sorted(
        (each.spread_us, each.dump_us)
        for each in measure_call_spreads(order, {}, {})
        if kinds[each.call] != 11
    )


@settings(deadline=None)
@given(calls=jobs())
def test_the_part_is_what_a_job_without_dumping_would_not_have_waited(calls: list[JobCall]):
    """The same as two runs of the job, one of them without stalls."""
    assert told(calls) == sorted(dumped(calls))


@settings(deadline=None)
@given(calls=jobs(stalls=st.just(0)))
def test_without_stalls_dumping_has_no_part(calls: list[JobCall]):
    assert not any(part for _, part in told(calls))


@settings(deadline=None)
@given(calls=jobs(), deferred=st.data())
def test_the_part_is_never_more_than_the_spread(calls: list[JobCall], deferred: st.DataObject):
    """Whatever overlaps."""
    mixed = [
        JobCall(c.members, c.work_us, c.stall_us, deferred=deferred.draw(st.booleans()))
        for c in calls
        if not c.message
    ]
    assert all(0 <= part <= spread for spread, part in told(mixed))


@settings(deadline=None)
@given(rank=st.integers(0, 2), stall=st.integers(1, 10**9))
def test_one_rank_that_stalls_causes_all_of_the_wait(rank: int, stall: int):
    stalls = tuple(stall if each == rank else 0 for each in range(3))
    (spread,) = found([JobCall((0, 1, 2), (5, 5, 5), stalls)])
    assert (spread.spread_us, spread.dump_us, spread.last_rank) == (stall, stall, rank)


def test_a_delay_travels_through_a_third_rank():
    """Rank 0 stalls, rank 1 waits for it, and rank 2 waits for rank 1."""
    calls = [JobCall((0, 1), (5, 5), (700, 0)), JobCall((1, 2), (5, 10), (0, 0))]
    assert [(each.spread_us, each.dump_us) for each in found(calls)] == [(700, 700), (700, 700)]


def test_stalls_that_all_have_alike_are_nobodys_wait():
    """One sleeps; that all dump for as long does not make it dumping's wait."""
    (spread,) = found([JobCall((0, 1), (5, 9005), (700, 700))])
    assert (spread.spread_us, spread.dump_us) == (9000, 0)


@settings(deadline=None)
@given(rounds=st.lists(st.tuples(times, times, pairs, pairs), min_size=1, max_size=6))
def test_buckets_that_overlap_carry_delays_on(rounds: list[tuple[int, int, Pair, Pair]]):
    """As DDP reduces gradients: started one after the other, waited for where the last starts."""
    calls: list[JobCall] = []
    for work, more, stalls, later in rounds:
        calls.append(JobCall((0, 1), (work, work), stalls, deferred=True))
        calls.append(JobCall((0, 1), (more, more), later))
    assert told(calls) == sorted(dumped(calls))


def test_the_sum_of_a_new_session_starts_anew():
    """A lower sum of stalls is not a stall below zero."""
    programs = {0: RankTimeline(stall_us=10_000, delay_us=50), 1: RankTimeline(0, 0)}
    (spread,) = found([JobCall((0, 1), (0, 0), (30, 0))], programs)
    assert (spread.spread_us, spread.dump_us) == (30, 30)
    assert programs[0].stall_us == 30


def test_a_missing_member_counts_as_long_as_the_others_waited():
    """It was waited for until the others gave up."""
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
