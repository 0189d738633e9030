"""The state of iterations: which are dumped, and which count."""

from __future__ import annotations

import pytest

from rankdump._core.plan import DumpPlan, IterationSelection, OutputSettings, TensorSelection
from rankdump._recorder.iteration_state import IterationState

FIVE_TO_EIGHT = IterationSelection("5-8", ((5, 8),))


def course(device: int = 0, **selection) -> IterationState:
    return IterationState(
        DumpPlan(output=OutputSettings("/x"), selection=TensorSelection(**selection)), device
    )


@pytest.mark.parametrize(
    ("iteration", "device", "armed"), [(5, 0, True), (4, 0, False), (9, 0, False), (5, 1, False)]
)
def test_plan_arms_iterations_of_its_devices(iteration, device, armed):
    one = course(device, iterations=FIVE_TO_EIGHT, devices=(0,))
    one.begin(iteration)
    assert one.armed is one.ever_armed is armed
    assert one.end(ran=True) is armed
    assert (one.iterations_seen, one.iterations_armed) == (1, armed)


def test_switch_replaces_only_the_iterations_of_the_plan():
    """Law: after the first use the plan's iterations are ignored, its devices are not."""
    one = course(iterations=FIVE_TO_EIGHT)
    one.begin(5)
    one.set_dumping(False)
    assert (one.armed, one.switched) == (False, True)
    assert one.end(ran=True), "it was armed at first"
    one.begin(6)
    assert not one.armed
    assert not one.end(ran=True)
    one.begin(99)
    one.set_dumping(True)
    assert one.armed
    one.set_dumping(False)
    assert one.end(ran=True)
    elsewhere = course(device=1, devices=(0,))
    elsewhere.set_dumping(True)
    assert not elsewhere.armed


def test_stop_after_current_finishes_the_running_iteration():
    one = course()
    one.begin(3)
    one.stop_after_current()
    one.set_dumping(True)
    assert one.armed
    one.begin(4)
    assert (one.armed, one.retired_in) == (False, 3)


def test_first_dumped_iteration_is_described():
    one = course(iterations=FIVE_TO_EIGHT)
    for iteration, describing in [(4, False), (5, True), (6, False)]:
        one.begin(iteration)
        assert one.is_describing is describing
        one.end(ran=True)
    one.describe_again()
    one.begin(7)
    assert one.is_describing


def test_iteration_without_operators_does_not_count():
    one = course()
    one.begin(0)
    assert not one.end(ran=False)
    one.active = True
    assert one.end(ran=False)
    assert one.iterations_seen == 1


def test_iterations_start_at_the_initial_iteration_of_the_plan():
    assert course(initial_iteration=100).iteration == 100
