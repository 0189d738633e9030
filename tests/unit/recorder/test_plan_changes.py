"""Tests of a pipeline whose plan changes while its job runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agent_double import FakeSlab, RunningFakeAgent, bodies, kinds, rows

import rankdump
from rankdump._core.job_control import NO_ITERATIONS, PlanChange
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
    WatchedOperators,
    plan_from_json,
)
from rankdump._recorder.pipeline import DumpPipeline

PLAN = DumpPlan(
    OutputSettings("/x"), TensorSelection(iterations=IterationSelection("0", ((0, 0),)))
)
EVERY = IterationSelection()
TENSOR = np.arange(4, dtype="f4")


def pipeline_of(session: rankdump.Session) -> DumpPipeline:
    pipeline = session._pipeline
    assert pipeline is not None
    return pipeline


def run_steps(session: rankdump.Session, iterations: range, *operators: str) -> None:
    for iteration in iterations:
        session.step(iteration)
        for name in operators or ("a",):
            session.dump("Add", name, "output", 0, TENSOR)


def dumped(running: RunningFakeAgent) -> list[tuple[int, str]]:
    found = [*bodies(running, "record"), *rows(running)]
    return sorted((each.iteration, each.op_name) for each in found)


def changed_plans(running: RunningFakeAgent) -> list[tuple[int, DumpPlan]]:
    found = bodies(running, "changed_plan")
    return [(each.iteration, plan_from_json(each.plan_json)) for each in found]


def test_iterations_are_replaced_from_one_on(running):
    with rankdump.Session(PLAN, agent=running.address) as session:
        change = PlanChange(iterations=IterationSelection("3-4", ((3, 4),)))
        assert pipeline_of(session).change_plan(change, 2) == 2
        run_steps(session, range(6))
    assert dumped(running) == [(0, "a"), (3, "a"), (4, "a")]
    assert [(at, plan.selection.iterations.text) for at, plan in changed_plans(running)] == [
        (2, "3-4")
    ]
    assert not any(each.switched_on for each in bodies(running, "record"))


@pytest.mark.parametrize("with_slab", [False, True])
def test_changed_plan_is_between_the_records_of_both_plans(running, tmp_path: Path, with_slab):
    """Nothing of an iteration overtakes the plan that it was made for."""
    if with_slab:
        running.agent.slab = FakeSlab(tmp_path / "slab", 1 << 20)
    plan = replace(PLAN, selection=TensorSelection())
    with rankdump.Session(plan, agent=running.address) as session:
        pipeline_of(session).change_plan(PlanChange(saved="statistic"), 1)
        pipeline_of(session).change_plan(PlanChange(saved="full"), 2)
        run_steps(session, range(3), "a", "b", "c")
    wanted = {"record", "figure_rows", "changed_plan"}
    assert [each for each in kinds(running) if each in wanted] == [
        *["record"] * 3,
        "changed_plan",
        "figure_rows",
        "changed_plan",
        *["record"] * 3,
    ]
    assert [each.expected for each in bodies(running, "iteration_end")] == [3, 3, 3]


def test_operators_are_replaced_and_expected_counts_follow(running):
    plan = replace(PLAN, selection=TensorSelection())
    with rankdump.Session(plan, agent=running.address) as session:
        only = OperatorSelection(everything=False, patterns=("b.*",))
        pipeline_of(session).change_plan(PlanChange(operators=only), 1)
        run_steps(session, range(2), "a", "b1", "b2")
    assert dumped(running) == [(0, "a"), (0, "b1"), (0, "b2"), (1, "b1"), (1, "b2")]
    assert [each.expected for each in bodies(running, "iteration_end")] == [3, 2]


def test_passing_change_is_taken_back(running):
    plan = replace(PLAN, content=ContentSettings(saved="statistic"))
    with rankdump.Session(plan, agent=running.address) as session:
        change = PlanChange(iterations=EVERY, saved="full")
        assert pipeline_of(session).change_plan(change, 2, iterations=2) == 2
        run_steps(session, range(6))
    assert [each.iteration for each in rows(running)] == [0]
    assert [each.iteration for each in bodies(running, "record")] == [2, 3]
    assert [at for at, _ in changed_plans(running)] == [2, 4]
    assert changed_plans(running)[1][1] == plan


def test_change_of_iterations_ends_the_switch_of_the_script(running):
    with rankdump.Session(PLAN, agent=running.address) as session:
        session.dump_start()
        pipeline_of(session).change_plan(PlanChange(iterations=NO_ITERATIONS), 2)
        run_steps(session, range(4))
        session.dump_start()
        run_steps(session, range(4, 5))
    assert [each for each, _ in dumped(running)] == [0, 1, 4]
    assert all(each.switched_on for each in bodies(running, "record"))


def test_passing_change_leaves_the_switch_of_the_script(running):
    with rankdump.Session(PLAN, agent=running.address) as session:
        session.dump_stop()
        pipeline_of(session).change_plan(PlanChange(iterations=EVERY), 1, iterations=1)
        run_steps(session, range(3))
    assert dumped(running) == [(1, "a")]


def test_late_change_names_its_iteration(running):
    with rankdump.Session(PLAN, agent=running.address) as session:
        run_steps(session, range(3))
        assert pipeline_of(session).change_plan(PlanChange(iterations=EVERY), 1) == 3
        run_steps(session, range(3, 4))
    assert dumped(running) == [(0, "a"), (3, "a")]


@pytest.mark.parametrize(
    ("selection", "change", "reason"),
    [
        (TensorSelection(devices=(7,)), PlanChange(), "support_device"),
        (
            TensorSelection(watched=WatchedOperators((), ("a",))),
            PlanChange(operators=OperatorSelection()),
            "watches operators",
        ),
    ],
)
def test_change_that_is_impossible_is_refused(running, selection, change, reason):
    with rankdump.Session(replace(PLAN, selection=selection), agent=running.address) as session:
        assert reason in str(pipeline_of(session).change_plan(change, 1))


def test_layout_that_needs_statistics_keeps_them(running):
    plan = DumpPlan(
        OutputSettings("/x", layout="api-torch", started="20260101000000"),
        content=ContentSettings(saved="full"),
    )
    with rankdump.Session(plan, agent=running.address) as session:
        refusal = pipeline_of(session).change_plan(PlanChange(saved="tensor"), 1)
    assert "does not support saved_data 'tensor'" in str(refusal)


def test_agent_of_an_earlier_release_gets_no_changed_plan(running):
    running.agent.changes_plans = False
    with rankdump.Session(PLAN, agent=running.address) as session:
        assert "earlier release" in str(pipeline_of(session).change_plan(PlanChange(EVERY), 1))
        run_steps(session, range(2))
    assert changed_plans(running) == []
