"""Tests of a rank's answers to orders: each is carried out once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._core.job_control import ControlAction, ControlOrder, PlanSchedule
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._recorder.order_responder import NOT_ASKED, OrderResponder

ASKED = ControlOrder("o", "job", ControlAction.SAVED_DATA, ("full",))
APPLIED = ControlOrder("o", "job", ControlAction.SAVED_DATA, ("full",), iteration=9)


class ResponderRig:
    """A responder with a schedule, and a clock that a test sets."""

    def __init__(self, fault: str = "") -> None:
        self.now_ns = 0
        self.schedule = PlanSchedule(DumpPlan(OutputSettings("/x")))
        self.responder = OrderResponder(
            self.schedule,
            lambda change: fault,
            lambda change, begin: fault or self.schedule.add(change, begin),
            lambda change: f"{change.saved} is odd",
            lambda: self.now_ns,
        )

    def run(self, iteration: int, step_us: int) -> None:
        self.responder.begin_iteration(iteration)
        self.schedule.begin_iteration(iteration)
        self.now_ns += step_us * 1000


def test_position_is_told_with_a_short_step():
    rig = ResponderRig()
    for iteration, step_us in enumerate((900, 300, 500, 5000)):
        rig.run(iteration, step_us)
    answer = rig.responder.answer(ASKED)
    assert (answer.applied, answer.iteration, answer.step_us) == (False, 3, 300)
    assert (answer.refused, answer.pending) == ("", 0)


def test_step_of_a_rank_in_its_first_iteration_is_as_long_as_that():
    rig = ResponderRig()
    rig.run(0, 70)
    assert rig.responder.answer(ASKED).step_us == 70


def test_order_is_carried_out_once():
    rig = ResponderRig()
    rig.run(0, 1)
    assert rig.responder.answer(ASKED).begun is None
    first = rig.responder.answer(APPLIED)
    rig.run(1, 1)
    assert (first.applied, first.iteration, first.note) == (True, 9, "full is odd")
    assert rig.responder.answer(APPLIED) == first
    asked = rig.responder.answer(ASKED)
    assert (asked.pending, asked.begun) == (9, 9)
    # Another coordinator, which has not learned of the answer, chooses another iteration.
    assert rig.responder.answer(replace(APPLIED, iteration=12)) == first
    assert rig.schedule.find_latest().content.saved == "full"


def test_order_that_comes_too_late_names_its_iteration():
    rig = ResponderRig()
    rig.run(8, 1)
    rig.responder.answer(ASKED)
    rig.run(20, 1)
    assert rig.responder.answer(APPLIED).iteration == 21


def test_order_without_a_question_is_not_carried_out():
    """Nobody waits for such a rank: it connected after all others were asked."""
    rig = ResponderRig()
    rig.run(0, 1)
    answer = rig.responder.answer(APPLIED)
    assert (answer.applied, answer.refused) == (True, NOT_ASKED)
    assert rig.responder.answer(ASKED).begun is None
    assert rig.schedule.pending == 0


@pytest.mark.parametrize("order", [ASKED, APPLIED])
def test_plan_that_cannot_be_changed_is_the_reason(order):
    rig = ResponderRig("support_device excludes it")
    rig.responder.answer(ASKED)
    assert rig.responder.answer(order).refused == "support_device excludes it"


def test_values_that_are_not_allowed_are_the_reason():
    order = ControlOrder("o", "job", ControlAction.ITERATIONS, ("5-",), 9)
    answer = ResponderRig().responder.answer(order)
    assert answer.applied
    assert "'5-' is not allowed" in answer.refused
