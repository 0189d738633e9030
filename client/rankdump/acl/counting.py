"""A session whose iterations are the calls of its models: inference has no steps."""

from __future__ import annotations

from typing import Any

from rankdump.session import Session
from rankdump.session.frameworks import Outermost, outermost_of
from rankdump.session.guard import never_raises


class CallSession(Session):
    """Begins an iteration with every outermost call of a model, until the script itself does.

    A model is called once at most in an iteration; models that take turns share one.
    """

    _outermost: Outermost | None = None
    _told = False
    _iteration = 0

    @never_raises
    def attach(self, model: Any, name: str = "") -> None:
        """Observe a model's operators, and count its calls."""
        if self.active:
            self._watch(model)
        super().attach(model, name)

    def step(self, iteration: int | None = None) -> None:
        """Begin an iteration, by default the next one: from now on calls are not counted."""
        self._told = True
        super().step(iteration)

    def close(self) -> None:
        """Leave the models alone, and deliver what waits."""
        if self._outermost is not None:
            self._outermost.remove()
        super().close()

    def _watch(self, model: Any) -> None:
        if self._outermost is None:
            self._called: set[int] = set()
            self._outermost = outermost_of(model, self._begins)
        if self._outermost is not None:
            self._outermost.watch(model)

    def _begins(self, number: int) -> None:
        if self._told or not self.active:
            return
        if number in self._called:
            self._called.clear()
            self._iteration += 1
        self._called.add(number)
        super().step(self._iteration)
