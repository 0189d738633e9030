"""A governed rank: what it keeps at each level, what it says, and that its order stays whole."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, event_names, rows

import rankdump
from rankdump._core.drop_reasons import STEP_OVERHEAD
from rankdump._core.hook_meter import HOOK_METER, HookMeter
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    OutputSettings,
    TensorSelection,
    TriggerMode,
)
from rankdump._recorder.overhead_governor import RecordForm
from rankdump._recorder.plan_settings import SAMPLE_ELEMENTS, is_governed, list_record_forms
from rankdump._recorder.step_overhead import StepOverhead

LARGE = np.arange(4 * SAMPLE_ELEMENTS, dtype="f4").reshape(4, -1)
SMALL = np.ones(3, "f4")
FULL, SAMPLE, STATISTICS, NOTHING = RecordForm


def a_plan(share: float, trigger: TriggerMode = "always", **delivery) -> DumpPlan:
    return DumpPlan(
        OutputSettings("/x"),
        TensorSelection(trigger=trigger),
        delivery=DeliverySettings(max_step_overhead=share, **delivery),
    )


class FakeTime:
    """A clock that passes as it is told, and a rank's meter on it."""

    def __init__(self, plan: DumpPlan, timeout_us: int = 0) -> None:
        self.now_ns = 0
        self.lines: dict[str, str] = {}
        self.meter = HookMeter(lambda: self.now_ns)
        self.overhead = StepOverhead(
            plan,
            rank=3,
            find_timeout_us=lambda: timeout_us,
            warn=self._warn,
            meter=self.meter,
        )
        self.overhead.start()

    def _warn(self, text: str, about: str) -> None:
        self.lines.setdefault(about, text)

    def spend(self, cost_ms: int) -> None:
        assert self.meter.begin()
        self.now_ns += cost_ms * 1_000_000
        self.meter.end()

    def step(self, iteration: int, cost_ms: int, *, dumped: bool = True) -> RecordForm:
        """Run an iteration that takes 100 ms without dumping; return the form of the next."""
        self.now_ns += 100_000_000
        self.spend(cost_ms)
        self.overhead.end_iteration(iteration, dumped=dumped)
        return self.overhead.select_form()


def test_step_down_is_announced_once_with_its_figures():
    rank = FakeTime(a_plan(0.05))
    for number in range(200):
        full = rank.overhead.select_form() is FULL
        rank.step(number, 120 if full else 1)
    assert next(iter(rank.lines.values())) == (
        "rank 3, iteration 1: dumping took 120% of the step, 5% is allowed (max_step_overhead): "
        "instead of all that the plan selects it now keeps the first 1024 elements of each tensor"
    )
    assert len(rank.lines) <= 2
    text = rank.overhead.summarize()
    assert text.startswith("max_step_overhead is 5% of a step: of 200 iterations the rank kept all")


def test_iterations_that_the_plan_does_not_select_do_not_count():
    rank = FakeTime(a_plan(0.05))
    assert [rank.step(number, 90, dumped=False) for number in range(20)] == [FULL] * 20
    assert rank.overhead.summarize() == ""


def test_quarter_of_a_timeout_ends_the_form_within_the_iteration():
    """Law: other ranks do not wait for half of their budget because this one dumps."""
    rank = FakeTime(a_plan(1.0), timeout_us=400_000)
    rank.step(0, 10)
    rank.spend(99)
    assert rank.overhead.select_form() is FULL
    rank.spend(1)
    assert rank.overhead.select_form() is NOTHING
    assert rank.step(1, 0) is SAMPLE
    assert "a quarter of a timeout of communication" in next(iter(rank.lines.values()))


@pytest.mark.parametrize(
    ("plan", "forms"),
    [
        (a_plan(0.1), (FULL, SAMPLE, STATISTICS, NOTHING)),
        (a_plan(0.1, strict=True), (FULL, SAMPLE, STATISTICS)),
        (replace(a_plan(0.1), content=ContentSettings("statistic")), (FULL, NOTHING)),
        (replace(a_plan(0.1), content=ContentSettings("full")), (FULL, STATISTICS, NOTHING)),
        (
            replace(a_plan(0.1), output=OutputSettings("/x", file_format="bin")),
            (FULL, STATISTICS, NOTHING),
        ),
    ],
)
def test_ladder_has_the_forms_that_the_plan_can_mark(plan, forms):
    assert list_record_forms(plan) == forms


@pytest.mark.parametrize(("share", "trigger", "governed"), [
    (0.1, "always", True),
    (0.0, "always", False),
    (0.1, "overflow", False),
    (0.1, "exception", False),
])  # fmt: skip
def test_only_plans_that_keep_what_runs_are_governed(share, trigger, governed):
    assert is_governed(a_plan(share, trigger)) is governed


def run(running: RunningFakeAgent, share: float, steps: int = 20) -> None:
    with rankdump.Session(a_plan(share), agent=running.address) as session:
        for step in range(steps):
            session.step(step)
            session.dump("Large", f"large-{step}", "output", 0, LARGE)
            session.dump("Small", f"small-{step}", "output", 0, SMALL)


def test_each_level_keeps_and_counts_every_tensor(running, caplog):
    """Law: expected = kept + dropped in every iteration; what is less is marked with its reason."""
    caplog.set_level(logging.INFO)
    run(running, 1e-9)
    assert not HOOK_METER.is_on
    records = {(each.iteration, each.op_type): each for each in bodies(running, "record")}
    whole = records[1, "Large"]
    assert (whole.shape, whole.layout) == (LARGE.shape, None)
    first = records[2, "Large"]
    assert first.shape == (SAMPLE_ELEMENTS,)
    assert np.frombuffer(first.data, "f4").tolist() == LARGE.ravel()[:SAMPLE_ELEMENTS].tolist()
    assert str(first.layout) == "only the first 1024 elements of [4, 1024]"
    small = records[2, "Small"]
    assert (small.shape, small.layout) == (SMALL.shape, None)
    figures = {(each.iteration, each.op_type): each for each in rows(running)}
    assert {each.degraded for each in figures.values()} == {STEP_OVERHEAD}
    assert figures[7, "Large"].shape == LARGE.shape
    ends = {each.iteration: each for each in bodies(running, "iteration_end")}
    assert dict(ends[19].dropped) == {STEP_OVERHEAD: 2}
    kept = Counter(iteration for iteration, _ in (*records, *figures))
    for number, end in ends.items():
        assert end.expected == 2 == kept[number] + sum(end.dropped.values())
    assert "max_step_overhead" in bodies(running, "session_end")[0].notes[0]
    assert sum("it now keeps" in record.message for record in caplog.records) == 3


def test_order_of_a_governed_rank_is_whole(running, address):
    """Law: whatever the level, every event is recorded."""
    run(running, 1e-9)
    governed = event_names(running)
    running.agent.frames.clear()
    run(running, 0.0)
    assert governed == event_names(running)
    assert len({*governed}) == 40
