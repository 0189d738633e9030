"""Numbers of steps and micro-batches in a loop that calls no callbacks, from what can be seen of
it: forward passes that train, backward passes, and steps of the optimizer. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where a loop is: a step of its optimizer, and a micro-batch of it, both from 0."""

    iteration: int
    microbatch: int = 0


class OptimizerStepCounter:
    """Finds where steps and micro-batches begin.

    A step begins with the first forward pass after a step of the optimizer, so that an evaluation
    between two steps belongs to the first of them. A micro-batch begins with the first forward
    pass after a backward pass. A loop may call parts of its model without the model itself: where
    no forward pass comes before the first backward pass, none is waited for.

    >>> counter = OptimizerStepCounter()
    >>> counter.begin_forward(), counter.end_backward(), counter.begin_forward()
    (None, None, StepPlace(iteration=0, microbatch=1))
    """

    def __init__(self, first: int = 0) -> None:
        """`first` is the number of the first step, which has begun."""
        self._place = StepPlace(first)
        self._following: StepPlace | None = None
        """Place that begins with the next forward pass."""
        self._has_forward = False
        self._has_backward: bool | None = None
        """Whether a backward pass came after the last step; None before the first one."""

    def begin_forward(self) -> StepPlace | None:
        """Count a forward pass that trains; return the place that begins with it, if one does."""
        self._has_forward = True
        return self._begin_following()

    def end_backward(self) -> StepPlace | None:
        """Count a backward pass; return the place that begins now, if one does."""
        self._has_backward = True
        if self._following is None:
            self._following = StepPlace(self._place.iteration, self._place.microbatch + 1)
        return None if self._has_forward else self._begin_following()

    def end_step(self) -> StepPlace | None:
        """Count a step of the optimizer, or report it again.

        Return the place that begins now, if one does.
        """
        if self._has_backward is False and not self._has_forward:
            return None
        self._has_backward = None if self._has_backward is None else False
        self._following = StepPlace(self._place.iteration + 1)
        return None if self._has_forward else self._begin_following()

    def begin_entry(self, *, ends_step: bool) -> StepPlace | None:
        """Begin the next micro-batch, or the first one of the next step with `ends_step`.

        For loops that mark each micro-batch themselves.
        """
        step = self._place.iteration
        following = (
            StepPlace(step + 1) if ends_step else StepPlace(step, self._place.microbatch + 1)
        )
        self._following = following
        return self._begin_following()

    def _begin_following(self) -> StepPlace | None:
        following, self._following = self._following, None
        if following is not None:
            self._place = following
        return following
