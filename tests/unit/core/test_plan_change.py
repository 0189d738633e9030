"""Tests of changes of a plan: what they set, and which plan an iteration has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._core.job_control import (
    NO_ITERATIONS,
    PlanChange,
    PlanSchedule,
    describe_operators,
    is_changeable_to,
)
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
    plan_from_json,
    plan_to_json,
)
from rankdump._core.selection import parse_iterations

ONE = OperatorSelection(everything=False, types=("conv",))
PLAN = DumpPlan(
    OutputSettings("/x"), TensorSelection(models=(("a", ONE),)), ContentSettings(saved="statistic")
)
FIRST = IterationSelection("3", ((3, 3),))


def saved_in(schedule: PlanSchedule, iterations: range) -> list[str]:
    return [schedule.begin_iteration(each).plan.content.saved for each in iterations]


@pytest.mark.parametrize(
    "change",
    [
        PlanChange(),
        PlanChange(iterations=NO_ITERATIONS),
        PlanChange(operators=ONE, saved="full"),
        PlanChange(parse_iterations("0|5-8"), OperatorSelection(), "tensor"),
    ],
)
def test_change_sets_what_it_names_and_survives_the_wire(change):
    changed = change.apply_to(PLAN)
    assert changed.selection.iterations == (change.iterations or PLAN.selection.iterations)
    assert changed.content.saved == (change.saved or "statistic")
    assert changed.selection.get_operators("a") == (change.operators or ONE)
    assert plan_from_json(plan_to_json(changed)) == changed
    assert is_changeable_to(PLAN, changed)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, output=OutputSettings("/y")),
        replace(PLAN, selection=replace(PLAN.selection, devices=(1,))),
        replace(PLAN, content=replace(PLAN.content, fingerprints=True)),
    ],
)
def test_everything_else_stays_for_good(other):
    assert not is_changeable_to(PLAN, other)


def test_no_iteration_is_selected_after_a_stop():
    assert all(each not in NO_ITERATIONS for each in (0, 1, 1 << 40))


def test_change_holds_from_its_iteration_on():
    schedule = PlanSchedule(PLAN)
    assert schedule.add(PlanChange(saved="tensor"), 2) == 2
    assert saved_in(schedule, range(4)) == ["statistic", "statistic", "tensor", "tensor"]


def test_change_that_is_late_holds_from_the_next_iteration_on():
    schedule = PlanSchedule(PLAN)
    saved_in(schedule, range(5))
    assert schedule.add(PlanChange(saved="tensor"), 2) == 5
    assert saved_in(schedule, range(5, 6)) == ["tensor"]


def test_change_is_not_lost_when_the_script_leaves_out_its_iteration():
    schedule = PlanSchedule(PLAN)
    schedule.add(PlanChange(saved="tensor"), 3)
    assert saved_in(schedule, range(0, 10, 5)) == ["statistic", "tensor"]


def test_changes_add_up_in_their_order():
    schedule = PlanSchedule(PLAN)
    schedule.add(PlanChange(saved="tensor", iterations=FIRST), 1)
    schedule.add(PlanChange(saved="full"), 1)
    found = schedule.begin_iteration(1)
    assert (found.plan.content.saved, found.plan.selection.iterations) == ("full", FIRST)
    assert found.ends_switch
    assert not schedule.begin_iteration(2).ends_switch


def test_change_for_some_iterations_ends_by_itself():
    schedule = PlanSchedule(PLAN)
    schedule.add(PlanChange(saved="full", iterations=IterationSelection()), 1, 2)
    found = [schedule.begin_iteration(each) for each in range(4)]
    assert [each.overrides_switch for each in found] == [False, True, True, False]
    assert not any(each.ends_switch for each in found)
    assert [each.plan == PLAN for each in found] == [True, False, False, True]


def test_change_for_good_within_a_passing_one_is_there_after_it():
    schedule = PlanSchedule(PLAN)
    schedule.add(PlanChange(saved="full"), 0, 2)
    schedule.add(PlanChange(saved="tensor"), 1)
    assert saved_in(schedule, range(3)) == ["full", "full", "tensor"]


def test_latest_plan_has_changes_that_are_due_later():
    schedule = PlanSchedule(PLAN)
    schedule.add(PlanChange(saved="full"), 100)
    assert schedule.find_latest().content.saved == "full"
    assert schedule.plan.content.saved == "statistic"


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        (TensorSelection(), "all"),
        (TensorSelection(operators=ONE), "conv"),
        (
            TensorSelection(
                operators=replace(
                    ONE, names=("Default/a",), patterns=(".*b",), ranges=(("c", "d"),)
                )
            ),
            "Default/a, conv, name-regex(.*b), c to d",
        ),
        (
            TensorSelection(operators=replace(ONE, types=tuple(f"t{at}" for at in range(12)))),
            "t0, t1, t2, t3, t4, t5, t6, t7 and 4 more",
        ),
        (
            TensorSelection(operators=OperatorSelection(without_names=(TensorExclusion("a"),))),
            "all but for exclusions",
        ),
        (TensorSelection(operators=replace(ONE, marked=True)), "those that the script marks"),
        (TensorSelection(models=(("a", ONE),)), "those of each model"),
        (TensorSelection(watched=WatchedOperators((), ("a",))), "those that are watched"),
    ],
)
def test_selected_operators_are_described(selection, text):
    assert describe_operators(selection) == text
