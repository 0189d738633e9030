"""Loops that a script writes itself around an object of a framework: their steps and micro-batches
are determined from calls of the models, from backward passes through that object, and from steps of
the optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankdump._session import Session
from rankdump._session.framework_adapters import ModelStepWatch, find_api_framework
from rankdump.integrations._loop_session import LoopSession, shield


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Position of a loop: the step of its optimizer, and the micro-batch of the step, both counted
    from 0.
    """

    iteration: int
    microbatch: int = 0


class OptimizerStepCounter:
    """Determines where steps and micro-batches begin.

    A step begins with the first forward pass after a step of the optimizer, so an evaluation
    between two steps belongs to the first of them. A micro-batch begins with the first forward pass
    after a backward pass. A loop may call parts of its model instead of the model itself: if no
    forward pass comes before the first backward pass, forward passes are not waited for.

    >>> counter = OptimizerStepCounter()
    >>> counter.begin_forward(), counter.end_backward(), counter.begin_forward()
    (None, None, StepPlace(iteration=0, microbatch=1))
    """

    def __init__(self, first: int = 0) -> None:
        """`first` is the number of the first step, which has begun already."""
        self._place = StepPlace(first)
        self._following: StepPlace | None = None
        """Position that begins with the next forward pass."""
        self._has_forward = False
        self._has_backward: bool | None = None
        """Whether a backward pass came after the last step; None before the first backward pass."""

    def begin_forward(self) -> StepPlace | None:
        """Count a forward pass that trains; return the position that begins with it, if any."""
        self._has_forward = True
        return self._begin_following()

    def end_backward(self) -> StepPlace | None:
        """Count a backward pass; return the position that begins now, if any."""
        self._has_backward = True
        if self._following is None:
            self._following = StepPlace(self._place.iteration, self._place.microbatch + 1)
        return None if self._has_forward else self._begin_following()

    def end_step(self) -> StepPlace | None:
        """Count a step of the optimizer, which may be reported several times.

        Return the position that begins now, if any.
        """
        if self._has_backward is False and not self._has_forward:
            return None
        self._has_backward = None if self._has_backward is None else False
        self._following = StepPlace(self._place.iteration + 1)
        return None if self._has_forward else self._begin_following()

    def begin_entry(self, *, ends_step: bool) -> StepPlace | None:
        """Begin the next micro-batch; with `ends_step`, the first micro-batch of the next step.

        This is used for loops that mark each micro-batch themselves.
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


class WatchedLoop:
    """One loop: its session, the observers of its models, and the count of its steps."""

    def __init__(
        self, user: str, session: Session | None, *, first_step: int, accumulates: bool
    ) -> None:
        """`user` is the name of the integration in the log; `first_step` is the number of the first
        step.

        If `accumulates` is True, micro-batches are numbered from the first step on; otherwise from
        the first step that has several.
        """
        self._loop = LoopSession(user, session)
        self._first_step = first_step
        self._accumulates = accumulates
        self._counter = OptimizerStepCounter(first_step)
        self._watches: list[ModelStepWatch] = []
        self._marks_entries = False

    @property
    def session(self) -> Session:
        """The session of the loop."""
        return self._loop.session

    @shield
    def begin(self, observed: Sequence[Any], called: Sequence[Any]) -> None:
        """Open the session with the models to observe, and begin the first step.

        `called` are the same models as the script calls them, with the framework's wrappers.
        """
        self._loop.open(observed)
        if not self.session.active:
            return
        self._loop.begin_step(self._first_step, (), accumulates=self._accumulates)
        for model in called:
            framework = find_api_framework(model)
            if framework is not None:
                self._watches.append(framework.watch_steps(model, self))

    def end(self) -> None:
        """Restore the models, and close the session unless it is the script's."""
        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        self._loop.close()

    @shield
    def called(self, manner: str, *, trains: bool) -> None:
        """Count a call of a model."""
        if trains and not self._marks_entries:
            self._begin(self._counter.begin_forward())

    @shield
    def stepped(self) -> None:
        """Count a step of an optimizer."""
        if not self._marks_entries:
            self._begin(self._counter.end_step())

    @shield
    def end_backward(self) -> None:
        """Count a backward pass."""
        if not self._marks_entries:
            self._begin(self._counter.end_backward())

    @shield
    def begin_entry(self, *, ends_step: bool) -> None:
        """Begin a micro-batch that the loop marks itself; from now on nothing else is counted.

        `ends_step` says that the previous micro-batch was the last one of its step.
        """
        if self._marks_entries:
            self._begin(self._counter.begin_entry(ends_step=ends_step))
        self._marks_entries = True

    def _begin(self, place: StepPlace | None) -> None:
        if place is None:
            return
        if place.microbatch:
            self._accumulates = True
            self._loop.begin_microbatch(place.microbatch)
        else:
            self._loop.begin_step(place.iteration, (), accumulates=self._accumulates)
