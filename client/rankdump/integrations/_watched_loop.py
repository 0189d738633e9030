"""Loops that a script writes itself around an object of a framework: their steps are found from
calls of the models, from backward passes through that object, and from steps of the optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankdump._session import Session
from rankdump._session.framework_adapters import ModelStepWatch, find_api_framework
from rankdump.integrations._loop_session import LoopSession, shield
from rankdump.integrations._step_counter import OptimizerStepCounter, StepPlace


class WatchedLoop:
    """One loop: its session, the watches on its models, and the count of its steps."""

    def __init__(self, user: str, session: Session | None, *, first_step: int) -> None:
        """`user` is the integration, for the log; `first_step` is the number of the first step."""
        self._loop = LoopSession(user, session)
        self._first_step = first_step
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
        self._loop.begin_step(self._first_step, (), accumulates=True)
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
        """Begin a micro-batch that the loop marks; from now on nothing else is counted.

        With `ends_step` the micro-batch before it was the last one of its step.
        """
        if self._marks_entries:
            self._begin(self._counter.begin_entry(ends_step=ends_step))
        self._marks_entries = True

    def _begin(self, place: StepPlace | None) -> None:
        if place is None:
            return
        if place.microbatch:
            self._loop.begin_microbatch(place.microbatch)
        else:
            self._loop.begin_step(place.iteration, (), accumulates=True)
