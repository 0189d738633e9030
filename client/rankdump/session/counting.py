"""A session whose iterations may be the calls of its models: inference has no steps."""

from __future__ import annotations

from typing import Any

from rankdump.contract.plan import DumpPlan
from rankdump.session.frameworks import Outermost, outermost_of
from rankdump.session.guard import never_raises
from rankdump.session.lifetime import Session
from rankdump.session.plans import PlanSource


class CallSession(Session):
    """Begins an iteration with every outermost call of a model, until the script itself does.

    Only where the plan comes from an `acl.json`: all others speak of steps. A model is called once
    at most in an iteration; models that take turns share one.
    """

    def __init__(self, plan: DumpPlan | PlanSource | None = None, **about: Any) -> None:
        self._outermost: Outermost | None = None
        self._told = not (isinstance(plan, DumpPlan) and plan.dialect == "acl")
        self._iteration = 0
        super().__init__(plan, **about)

    @never_raises
    def attach(self, model: Any, name: str = "") -> None:
        """Observe a model's operators, and count its calls."""
        if self.active and not self._told:
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
