"""Where steps and micro-batches begin in loops that call no callbacks."""

from __future__ import annotations

import pytest

from rankdump.integrations._watched_loop import OptimizerStepCounter, StepPlace


def place_after(counter: OptimizerStepCounter, program: str) -> list[tuple[int, int]]:
    """Return the places that begin in a program of forwards, backwards and optimizer steps."""
    called = {"f": counter.begin_forward, "b": counter.end_backward, "s": counter.end_step}
    begun = (called[each]() for each in program)
    return [(each.iteration, each.microbatch) for each in begun if each is not None]


@pytest.mark.parametrize(
    ("program", "begun"),
    [
        ("fbs fbs fbs", [(1, 0), (2, 0)]),
        ("fbfbs fbfbs", [(0, 1), (1, 0), (1, 1)]),
        ("ffbs ffbs", [(1, 0)]),  # two forward passes for one loss
        ("fbss fbss", [(1, 0)]),  # two optimizers, or one step reported twice
        ("fbsb f", [(1, 0)]),  # a second backward pass of the same graph
        ("fs fs", [(1, 0)]),  # the loop calls `loss.backward` itself
        # The model itself is never called, only parts of it.
        ("bs bs", [(0, 1), (1, 0), (1, 1), (2, 0)]),
        ("bss bss", [(0, 1), (1, 0), (1, 1), (2, 0)]),
        ("bbs", [(0, 1), (0, 2), (1, 0)]),
        ("ss", [(1, 0), (2, 0)]),
    ],
)
def test_place_begins_with_the_first_forward_after_a_step_or_backward(
    program: str, begun: list[tuple[int, int]]
) -> None:
    assert place_after(OptimizerStepCounter(), program.replace(" ", "")) == begun


def test_place_continues_after_the_first_step_that_is_given() -> None:
    assert place_after(OptimizerStepCounter(100), "fbsf") == [(101, 0)]


def test_marked_entries_begin_places_at_once() -> None:
    counter = OptimizerStepCounter(3)
    assert counter.begin_entry(ends_step=False) == StepPlace(3, 1)
    assert counter.begin_entry(ends_step=True) == StepPlace(4)
