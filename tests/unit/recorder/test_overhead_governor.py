"""Decisions of the governor on modelled costs: what is held, and that levels do not alternate."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankdump._recorder.overhead_governor import (
    MAX_INTERVAL,
    ROOM_SHARE,
    FidelityLevel,
    GovernorDecision,
    GovernorState,
    LevelReason,
    OverheadGovernor,
    RecordForm,
    StepCost,
    make_cycle_level,
)

FULL, SAMPLE, STATISTICS, NOTHING = RecordForm
STEP_NS = 100_000_000


def play(
    governor: OverheadGovernor,
    cost_of: Callable[[RecordForm], float],
    steps: int,
    state: GovernorState | None = None,
) -> tuple[GovernorState, list[float], list[GovernorDecision]]:
    """Return the state after so many iterations, the share of each, and what was decided."""
    state = state or GovernorState()
    shares: list[float] = []
    decisions: list[GovernorDecision] = []
    for _ in range(steps):
        shares.append(cost_of(state.form))
        cost = StepCost(int(shares[-1] * STEP_NS), STEP_NS)
        decisions.append(governor.advance(state, cost))
        state = decisions[-1].state
    return state, shares, decisions


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def count_moves(decisions: list[GovernorDecision]) -> int:
    moves = (LevelReason.OVER, LevelReason.ROOM, LevelReason.TIMEOUT)
    return sum(each.reason in moves for each in decisions)


COSTS = st.tuples(*(st.floats(0.001, 5) for _ in range(3)), st.just(0.0005))


@settings(max_examples=20, deadline=None)  # of thousands of iterations each
@given(allowed=st.floats(0.02, 1), costs=COSTS)
def test_steady_cost_stays_within_the_allowed_share(allowed, costs):
    """Law: whatever each form costs, in any order, the share is held, with few moves."""
    governor = OverheadGovernor(allowed, tuple(RecordForm))
    state, _, _ = play(governor, lambda form: costs[form], 3000)
    cycle = state.level.cycle_length
    _, shares, decisions = play(governor, lambda form: costs[form], 20 * cycle + 400, state)
    tail = shares[len(shares) % cycle :]
    # Trials of richer levels, of which there are fewer and fewer, may cost a little.
    assert mean(tail) <= allowed * 1.05
    assert count_moves(decisions) <= 4


@pytest.mark.parametrize("allowed", [0.05, 0.2])
@pytest.mark.parametrize(
    ("costs", "base"),
    [
        ((1.3, 0.01, 0.04, 0.002), SAMPLE),
        ((1.3, 0.3, 0.7, 0.002), NOTHING),
        ((3.0, 0.4, 0.01, 0.002), STATISTICS),
    ],
)
def test_room_below_the_allowed_share_is_used(allowed, costs, base):
    """Law: forms alternate so that the share comes within a fifth of the allowed one."""
    governor = OverheadGovernor(allowed, tuple(RecordForm))
    state, shares, _ = play(governor, lambda form: costs[form], 1500)
    assert state.level.base is base
    used = mean(shares[-20 * state.level.cycle_length :])
    assert ROOM_SHARE * allowed * 0.95 <= used <= allowed


def test_cheap_dump_is_not_changed():
    governor = OverheadGovernor(0.05, tuple(RecordForm))
    state, _, decisions = play(governor, lambda form: 0.03, 200)
    assert state.level.is_full
    assert count_moves(decisions) == 0


def test_one_expensive_iteration_ends_the_window_early():
    governor = OverheadGovernor(0.05, tuple(RecordForm))
    costs = {FULL: 2.0, SAMPLE: 0.04, STATISTICS: 0.05, NOTHING: 0.001}
    _, _, decisions = play(governor, costs.__getitem__, 2)
    assert decisions[1].state.level == FidelityLevel(SAMPLE)
    assert (decisions[1].reason, round(decisions[1].share, 6)) == (LevelReason.OVER, 2.0)


def test_richer_level_returns_when_there_is_room():
    governor = OverheadGovernor(0.1, tuple(RecordForm))
    slow, _, _ = play(governor, lambda form: (2.0, 0.01, 0.03, 0.001)[form], 300)
    assert not slow.level.is_full
    fast, _, decisions = play(governor, lambda form: 0.02, 400, slow)
    assert fast.level.is_full
    assert LevelReason.ROOM in {each.reason for each in decisions}


def test_trial_that_costs_a_little_too_much_gives_up_few_iterations():
    """As many keep the richer form as the share allows, not one in two."""
    governor = OverheadGovernor(0.2, tuple(RecordForm))
    state, _, _ = play(governor, lambda form: (1.0, 0.03, 0.03, 0.001)[form], 300)
    state, _, _ = play(governor, lambda form: (0.1, 0.03, 0.03, 0.001)[form], 400, state)
    assert state.level.is_full
    assert state.rose
    _, _, decisions = play(governor, lambda form: (0.22, 0.03, 0.03, 0.001)[form], 8, state)
    level = next(each.state.level for each in decisions if each.reason is LevelReason.OVER)
    assert (level.form, level.kept_per_cycle, level.cycle_length) == (FULL, 4, 5)


def test_trial_that_fails_again_is_made_less_often():
    """A form whose cost explodes only when every iteration has it, as with a full ring."""
    governor, state, failures = OverheadGovernor(0.5, tuple(RecordForm)), GovernorState(), []
    for number in range(4000):
        blocked = state.form is FULL and state.level.mean_interval == 1
        share = 3.0 if blocked else 0.4 if state.form is FULL else 0.01
        decision = governor.advance(state, StepCost(int(share * STEP_NS), STEP_NS))
        if decision.reason is LevelReason.OVER:
            failures.append(number)
        state = decision.state
    gaps = [after - before for before, after in itertools.pairwise(failures[1:])]
    assert len(failures) < 14
    assert gaps == sorted(gaps)


def test_budget_of_an_iteration_lowers_the_level_at_once():
    """Half of a timeout must not be used, whatever the allowed share."""
    governor = OverheadGovernor(1.0, tuple(RecordForm))
    held_up = StepCost(STEP_NS // 10, STEP_NS)
    decision = governor.advance(GovernorState(), held_up, budget_ns=STEP_NS // 10)
    assert decision.reason is LevelReason.TIMEOUT
    assert decision.state.level == FidelityLevel(SAMPLE)
    later, _, _ = play(governor, lambda form: 0.001, 500, decision.state)
    assert later.level == FidelityLevel(SAMPLE), "it is not tried again soon"


def test_poorest_form_above_the_share_is_reported():
    governor = OverheadGovernor(0.01, (FULL, NOTHING))
    state, _, decisions = play(governor, lambda form: 0.05, 40)
    assert state.level == FidelityLevel(NOTHING)
    assert decisions[-1].reason in (LevelReason.LEAST, LevelReason.STAY)
    assert LevelReason.LEAST in {each.reason for each in decisions}


@pytest.mark.parametrize("interval", [1, 2, 2.25, 7, 7.9, 8, 9.5, MAX_INTERVAL])
def test_level_gives_every_kth_iteration_the_richer_form(interval):
    level = make_cycle_level(FULL, interval, STATISTICS)
    forms = [level.select_form(number) for number in range(1, 2 * level.cycle_length + 1)]
    assert forms[: level.cycle_length] == forms[level.cycle_length :]
    assert forms.count(FULL) == 2 * level.kept_per_cycle
    assert interval <= level.mean_interval < interval + 1
    kept = [number for number, form in enumerate(forms) if form is FULL]
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1
