"""Hint state across iterations, projections, and the texts of hints."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.event_lists import list_events
from support.lockstep import JobCall, events
from support.order_jobs import view_of
from support.rank_limits import S, environment, session, torch

from rankdump._core.events import EventColumns, EventKind, ProcessGroup, RankEvent
from rankdump._core.timeouts import HintLevel, RankTimeouts, TimeoutHint
from rankdump._wire.status_messages import timeout_hint_from_wire, timeout_hint_to_wire
from rankdump.errors import CorruptedError
from rankdumpd.coordinator.fleet_views import GlobalOrder, JobFacts
from rankdumpd.coordinator.hints import spread_history as state_room
from rankdumpd.coordinator.hints.assessment import (
    NO_LAST_ITERATION,
    build_hints,
    find_last_selected_iteration,
    fit_spread_trend,
)
from rankdumpd.coordinator.hints.rank_warnings import build_warnings
from rankdumpd.coordinator.hints.spread_history import HintState, update_hint_state
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration


def order(iteration: int, *late_us: int, stall_us: int = 0, number: int = 1) -> GlobalOrder:
    """Return an order of two ranks that meet; the second one is late, partly because of dumping."""
    calls = [JobCall((0, 1), (0, late), (0, min(stall_us, late))) for late in late_us]
    calls = [JobCall(c.members, (0, c.work_us[1] - c.stall_us[1]), c.stall_us) for c in calls]
    batches = events(calls, iteration=iteration)
    for (batch,) in batches.values():
        batch.columns["sequence"][:] += np.uint64(number)
        # The sum since the session began, which all iterations before have added to.
        batch.columns["stall_us"][:] += np.uint64(iteration * 10**9)
    return merge_iteration(view_of(batches, iteration=iteration))


def facts(
    timeouts: RankTimeouts,
    *,
    selected: str = "all",
    framework: str = "torch 2.5.0",
    device: str = "CPU",
) -> JobFacts:
    sessions = {
        rank: session(rank, framework, device, world_size=2, selected=selected) for rank in range(2)
    }
    return JobFacts("j", {0: timeouts, 1: timeouts}, sessions)


def gloo(seconds: float) -> RankTimeouts:
    return torch("gloo", seconds, group="0-1")


def hint_after(orders: list[GlobalOrder], known: JobFacts) -> TimeoutHint:
    state = HintState()
    for each in orders:
        state = update_hint_state(state, each)
    (hint,) = build_hints(state, known)
    return hint


def test_hint_for_wait_by_dumping_has_share_and_setting():
    hint = hint_after([order(0, 100, 12 * S, stall_us=11 * S)], facts(gloo(20)))
    assert (hint.level, hint.share) == (HintLevel.WARNING, 0.6)
    assert (hint.group, hint.backend, hint.kind, hint.sequence) == ("0-1", "gloo", "all_reduce", 2)
    assert (hint.first_rank, hint.last_rank, hint.dump_us) == (0, 1, 11 * S)
    assert hint.settings == ("init_process_group(..., timeout=timedelta(seconds=28))",)
    assert hint.reason == (
        "rank 1 arrived 12 s after rank 0 at all_reduce 'call1', number 2 of group '0-1' in "
        "iteration 0; that is 60% of the 20 s limit (timeout of init_process_group); dumping "
        "caused 11 s of it; the suggested settings allow twice the expected wait; "
        "to shorten it, dump less: set `saved_data` to `statistic`, select fewer `kernels`, or set "
        "`rankdump.max_step_overhead`, which keeps less before half of a timeout is used"
    )


def test_hint_below_half_of_limit_has_no_settings():
    hint = hint_after([order(0, 9 * S)], facts(gloo(20)))
    assert (hint.level, hint.settings, hint.dump_us) == (HintLevel.OK, (), 0)
    assert not build_warnings([hint])


def test_wait_above_limit_is_exceeded():
    hint = hint_after([order(0, 21 * S)], facts(gloo(20)))
    assert hint.level is HintLevel.EXCEEDED
    (line,) = build_warnings([hint]).values()
    assert "rank 1 was late: rank 0 waited at least 20 s, 100% of the 20 s" in line


def test_hint_without_limit_has_only_the_spread():
    hint = hint_after([order(0, 21 * S)], JobFacts("j"))
    assert (hint.level, hint.limit, hint.share) == (HintLevel.OK, None, 0.0)
    assert "no limit that applies to this wait is known" in hint.reason
    assert not build_warnings([hint])


def test_first_collective_uses_connect_limit():
    """100 s of 120 s to connect are a larger share than 300 s of 1836 s later."""
    known = facts(environment(), framework="mindspore 2.3", device="Ascend")
    hint = hint_after([order(0, 100 * S, 300 * S, number=0)], known)
    assert hint.limit
    assert (hint.limit.name, hint.sequence) == ("HCCL_CONNECT_TIMEOUT", 0)
    assert hint.spread_us == 100 * S
    later = hint_after([order(0, 10 * S, 1000 * S, number=0)], known)
    assert later.limit
    assert (later.limit.name, later.sequence) == ("HCCL_EXEC_TIMEOUT", 1)


def test_rising_spread_is_projected_to_last_selected_iteration():
    orders = [order(i, (i + 1) * S // 10) for i in range(10)]
    hint = hint_after(orders, facts(gloo(20), selected="0-9|99"))
    assert (hint.projected_iteration, hint.projected_us) == (99, 10 * S)
    assert hint.level is HintLevel.WARNING
    assert hint.settings == ("init_process_group(..., timeout=timedelta(seconds=24))",)
    (line,) = build_warnings([hint]).values()
    assert "rises to 50% of the 20 s limit (timeout of init_process_group) by iteration 99" in line


def test_rising_spread_of_endless_plan_names_iteration_at_limit():
    orders = [order(i, (i + 1) * S // 10) for i in range(10)]
    hint = hint_after(orders, facts(gloo(20)))
    assert (hint.projected_iteration, hint.projected_us) == (NO_LAST_ITERATION, S)
    assert hint.level is HintLevel.OK
    assert "to half of the limit by iteration 99 and to all of it by iteration 199" in hint.reason


@settings(deadline=None)
@given(noise=st.lists(st.integers(0, 1000), min_size=64, max_size=64))
def test_spread_trend_ignores_noise(noise: list[int]):
    """Of a series and its reverse at most one rises, and their mixture never does."""
    mixed = [each for pair in zip(noise, reversed(noise), strict=True) for each in pair]
    assert fit_spread_trend(list(enumerate(mixed))) is None


@settings(deadline=None)
@given(slope=st.integers(100, 1000), start=st.integers(0, 1000), count=st.integers(5, 64))
def test_spread_trend_finds_a_line(slope: int, start: int, count: int):
    rise = fit_spread_trend([(i, start + slope * i) for i in range(count)])
    assert rise is not None
    assert abs(rise.spread_at(1000) - (start + slope * 1000)) <= 1
    assert rise.find_iteration_reaching(start + slope * 500) in (500, 501)
    assert fit_spread_trend([(i, start + slope * (count - i)) for i in range(count)]) is None
    assert fit_spread_trend([(i, start) for i in range(count)]) is None


@pytest.mark.parametrize(
    ("selections", "last"),
    [
        (["0|5-8"], 8),
        (["all"], NO_LAST_ITERATION),
        (["3", "7-9"], 9),
        (["3", "all"], NO_LAST_ITERATION),
        ([], NO_LAST_ITERATION),
        ([""], NO_LAST_ITERATION),
    ],
)
def test_last_selected_iteration_is_read_from_plans(selections: list[str], last: int):
    assert find_last_selected_iteration(selections) == last


def test_hint_state_round_trips_as_json():
    state = HintState()
    for iteration in range(3):
        state = update_hint_state(state, order(iteration, 5 * S, 100, stall_us=50, number=0))
    assert HintState.from_json(state.to_json()) == state
    assert HintState.from_json(HintState().to_json()) == HintState()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version":2}', '{"version":1,"iteration":0,"ranks":[[1]],"groups":[]}'],
)
def test_hint_state_rejects_other_texts(text: str):
    with pytest.raises(CorruptedError, match="not a valid state of timeout hints"):
        HintState.from_json(text)


def test_hint_state_continues_after_restart():
    """A restart between two iterations does not change the hints."""
    one, two = order(0, 5 * S, stall_us=S), order(1, 7 * S, stall_us=2 * S)
    whole = update_hint_state(update_hint_state(HintState(), one), two)
    assert (
        update_hint_state(HintState.from_json(update_hint_state(HintState(), one).to_json()), two)
        == whole
    )


def test_hint_state_bounds_history_and_groups(monkeypatch: pytest.MonkeyPatch):
    state = HintState()
    for iteration in range(70):
        state = update_hint_state(state, order(iteration, 5))
    (history,) = state.groups.values()
    assert [point[0] for point in history.history] == list(range(6, 70))
    monkeypatch.setattr(state_room, "MAX_HINT_GROUPS", 1)
    batches = {
        0: [EventColumns.from_events(list_events(events([JobCall((0, 2), (0, 9), (0, 0))])[0][0]))]
    }
    assert (
        len(update_hint_state(state, merge_iteration(view_of(batches, iteration=70))).groups) == 1
    )


def test_delays_are_cleared_by_iterations_that_were_not_dumped():
    """Iterations without a dump have collectives too, which even out delays."""
    state = update_hint_state(HintState(), order(0, 5 * S, stall_us=5 * S))
    assert state.delays == {0: 5 * S, 1: 5 * S}
    assert update_hint_state(state, order(10, 0)).iteration == 10


def test_group_of_one_rank_gives_no_hint():
    lone = {
        0: [
            EventColumns.from_events(
                list_events(events([JobCall((0,), (0,), (0,))])[0][0]), (ProcessGroup("0", (0,)),)
            )
        ]
    }
    assert (
        build_hints(
            update_hint_state(HintState(), merge_iteration(view_of(lone, iteration=0))),
            JobFacts("j"),
        )
        == ()
    )


def test_hints_with_extreme_values_fit_the_wire():
    """The largest times and numbers, and a plan with the last possible iteration."""
    orders = [order(i, (i + 1) * 10**15) for i in range(6)]
    state = HintState()
    for each in orders:
        each.calls.columns["sequence"][:] = np.uint64(2**64 - 1)
        each.calls.members["start_us"][:] = [-(2**63), 2**63 - 1 - (6 - each.iteration) * 10**17]
        state = update_hint_state(state, each)
    for selected in ("0-18446744073709551615", "0-9223372036854775807"):
        limits = {"a": float("nan"), "b": float("inf"), "c": -1.0, "hccl_timeout": 1e300}
        timeouts = RankTimeouts(limits=limits, groups=gloo(20).groups)
        (hint,) = build_hints(state, facts(timeouts, selected=selected))
        sent = timeout_hint_from_wire(timeout_hint_to_wire(hint))
        assert sent == hint
        assert len(build_warnings([hint])) == 1
        assert HintState.from_json(state.to_json()) == state


def test_receive_without_send_gives_no_hint():
    alone = RankEvent(
        0, 0, 1, 1, "Recv", EventKind.RECV, 5, 9, group="g", sequence=3, peer=-1, stall_us=7
    )
    batches = {0: [EventColumns.from_events([alone], (ProcessGroup("g", (0, 1)),))]}
    (hint,) = build_hints(
        update_hint_state(HintState(), merge_iteration(view_of(batches, iteration=0))),
        JobFacts("j"),
    )
    assert (hint.spread_us, hint.last_rank) == (0, 0)


def test_iteration_without_calls_changes_only_its_number():
    assert update_hint_state(HintState(), merge_iteration(view_of({}, iteration=3))) == HintState(3)


def test_warnings_are_limited_to_nearest_groups():
    hint = hint_after([order(0, 12 * S)], facts(gloo(20)))
    many = [replace(hint, group=f"g{n}", spread_us=(12 + n % 7) * S) for n in range(100)]
    said = build_warnings(many).values()
    assert len(said) == 8
    assert all("90% of" in line for line in said)


def test_hint_state_is_valid_json():
    state = update_hint_state(HintState(), order(0, 5))
    assert json.loads(state.to_json())["version"] == 1
