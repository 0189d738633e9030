"""Laws of the merged order, over random programs."""

from __future__ import annotations

import random as randomness
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.event_lists import find_waiting_ranks
from support.order_jobs import (
    STEPS,
    WORLD,
    batches,
    on_clocks,
    program_view,
    simulated,
    spans_of,
    view_of,
)
from support.order_rules import check, disagreeing

from rankdump._core.events import OPEN_END_POSITION, EventKind, FindingKind
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration


def expect_only_differences(result: GlobalOrder, expected: set[int]) -> None:
    """Fail on findings other than differences: random ranks run different programs."""
    assert {finding.kind for finding in result.findings} <= {FindingKind.SEQUENCE_DIFFERENCE}
    assert {rank for finding in result.findings for rank in finding.ranks} == expected


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 20), st.booleans())
def test_order_of_run_without_fault_keeps_all_rules(steps, cut, waiting) -> None:
    """Rules 1 to 4 hold for random programs and clocks, and no member is missing."""
    program = simulated(steps, waiting=waiting)
    result = merge_iteration(program_view(program, cut, spans=spans_of(program)))
    check(result, program)
    expect_only_differences(result, disagreeing(program))
    assert not result.calls.missing
    assert len(list(result.entries())) == len(result)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_equal_programs_give_no_findings(steps) -> None:
    everywhere = [("everywhere", 0, b, False, jump) for _, _, b, _, jump in steps]
    world = [("collective", 0, 0, delay, jump) for _, _, _, delay, jump in steps]
    mixed = [pair[i % 2] for i, pair in enumerate(zip(everywhere, world, strict=True))]
    program = simulated(mixed)
    result = merge_iteration(program_view(program, spans=spans_of(program)))
    check(result, program)
    assert result.findings == ()


@settings(max_examples=60, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_order_is_independent_of_arrival_of_events(steps, random) -> None:
    """Batches are cut, shuffled and repeated, with open events before or after complete ones."""
    program = simulated(steps)
    once = {rank: batches(rank, events, 3) for rank, events in program.items()}
    again = {}
    for rank, events in program.items():
        begun = [
            replace(e, end_position=OPEN_END_POSITION, end_us=e.start_us)
            for e in events
            if random.random() < 0.5
        ]
        mixed = random.sample([*events, *begun], len(events) + len(begun))
        again[rank] = [*batches(rank, mixed, len(mixed) // 2), *once[rank]]
    one, two = merge_iteration(view_of(once)), merge_iteration(view_of(again))
    assert list(one.entries()) == list(two.entries())
    assert one.findings == two.findings
    assert [find_waiting_ranks(one.calls, call) for call in range(len(one.calls))] == [()] * len(
        one.calls
    )


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_order_without_a_rank_keeps_all_rules(steps, lost) -> None:
    """The rank that reported nothing is named as missing."""
    program = simulated(steps)
    program.pop(lost, None)
    result = merge_iteration(program_view(program))
    order = list(result.entries())
    for rank in program:
        names = [e.name for e in order if e.kind is EventKind.OPERATOR and e.ranks == (rank,)]
        own = sorted(program[rank], key=lambda event: event.position)
        assert names == [event.name for event in own if event.kind is EventKind.OPERATOR]
    assert all(entry.missing in ((), (lost,)) for entry in order)
    silent = [f.ranks for f in result.findings if f.kind is FindingKind.SILENT_RANK]
    assert silent == [(lost,)] * any(entry.missing for entry in order)
    assert len(result.findings) - len(silent) == sum(
        f.kind is FindingKind.SEQUENCE_DIFFERENCE for f in result.findings
    )


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_lost_events_are_a_gap_and_no_absence(steps, rank, random) -> None:
    """One gap with the right number, and no absence of that rank."""
    program = simulated(steps)
    spans = spans_of(program)
    own = program.get(rank, [])
    lost = random.sample(own, random.randint(0, len(own)))
    rest = {**program, rank: [event for event in own if event not in lost]}
    rest = {each: events for each, events in rest.items() if events}
    result = merge_iteration(program_view(rest, spans=spans))
    gaps = [finding for finding in result.findings if finding.kind is FindingKind.GAP]
    assert [gap.ranks for gap in gaps] == [(rank,)] * bool(lost)
    for gap in gaps:
        assert f"{len(lost)} event" in gap.text
        assert gap.position == min(event.position for event in lost)
    others = [finding for finding in result.findings if finding not in gaps]
    expect_only_differences(
        replace(result, findings=tuple(others)),
        disagreeing(rest, ignored=[rank] if lost else ()),
    )
    assert not result.calls.missing


CLOCKS = st.lists(
    st.tuples(
        st.integers(-50_000, 50_000),
        st.sampled_from([0.0, 0.0, 1e-5, -5e-5]),
        st.lists(
            st.tuples(st.integers(1000, 9000), st.sampled_from([-3_600_000_000, 3_600_000_000])),
            max_size=2,
        ),
    ),
    min_size=WORLD // 2,
    max_size=WORLD // 2,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, CLOCKS, st.integers(0, 20))
def test_order_keeps_rules_with_any_clocks(steps, clocks, cut) -> None:
    """With offsets, drift and steps the rules hold by the corrected times."""

    def clock(rank: int, true_us: int) -> int:
        offset, drift, jumps = clocks[rank // 2]
        stepped = sum(by for at, by in jumps if true_us >= at)
        return true_us + offset + int(true_us * drift) + stepped

    program = simulated(steps, lockstep=True)
    hosts = {rank: f"host{rank // 2}" for rank in program}
    result = merge_iteration(program_view(on_clocks(program, clock), cut, clocks=hosts))
    check(result, program)
    expect_only_differences(result, disagreeing(program))
    assert set(result.skews) <= set(hosts.values())


@pytest.mark.slow
def test_order_of_many_operators_equals_plain_sort() -> None:
    """More events than are sorted at once, by time, then rank, then position."""
    random = randomness.Random(5)
    steps = [("operator", rank, 0, False, random.choice([0, 1, 3])) for rank in range(4)] * 60_000
    program = simulated(steps)
    result = merge_iteration(program_view(program, 10_000))
    plain = sorted(
        (event.start_us, rank, event.position) for rank, own in program.items() for event in own
    )
    lines = (result.columns[field].tolist() for field in ("start_us", "rank", "position"))
    assert list(zip(*lines, strict=True)) == plain
