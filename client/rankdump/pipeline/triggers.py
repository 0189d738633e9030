"""When an operator is kept: always, when it overflowed, or when it raised (mindspore-dump.md 1.9).

Weights, buffers and constants are no operators: only the first kind keeps them. The gradient of a
weight is what a backward operator wrote, as in MindSpore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from rankdump.contract.exchange import OperatorArguments
from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan
from rankdump.filter import Filter
from rankdump.held import Held
from rankdump.pipeline.course import Course
from rankdump.pipeline.outlet import Item, Outlet
from rankdump.pipeline.reading import Lost, Reading
from rankdump.pipeline.watching import Watching
from rankdump.values import Observation

logger = logging.getLogger(__name__)

CHANGED_IN_PLACE = "changed_in_place"


class Trigger(Protocol):
    """Decides on operators by what becomes of them."""

    def wants(self, op_name: str, side: Side, graph: int) -> bool:
        """Return whether tensors on that side of an operator are to be handed over."""
        ...

    def take(self, observation: Observation) -> None:
        """Take a wanted tensor."""
        ...

    def note(self, graph: int, op_name: str, item: Lost | OperatorArguments) -> None:
        """Take anything else that is said of a wanted operator."""
        ...

    def settled(self, graph: int, op_name: str, *, raised: bool) -> None:
        """End an operator."""
        ...

    def end(self) -> None:
        """End every operator: nothing more is said of them."""
        ...


class Always:
    """Keeps what the plan selects."""

    def __init__(self, selection: Filter, reading: Reading, outlet: Outlet, course: Course) -> None:
        self._filter = selection
        self._reading = reading
        self._outlet = outlet
        self._course = course

    def wants(self, op_name: str, side: Side, graph: int) -> bool:
        """Return whether the plan selects that side of the operator."""
        return self._filter.decide(op_name, side, graph).keep

    def take(self, observation: Observation) -> None:
        """Read the tensor and send it."""
        if not self._filter.leaves_out(observation[:5]):
            self._outlet.send(self._reading.read(observation), self._course.iteration)

    def note(self, graph: int, op_name: str, item: Lost | OperatorArguments) -> None:
        """Send it."""
        self._outlet.send(item, self._course.iteration)

    def settled(self, graph: int, op_name: str, *, raised: bool) -> None:
        """All was sent; what comes under the name from now on is another call."""
        self._reading.over(graph, op_name)

    def end(self) -> None:
        """Do nothing: all was sent."""


class OnOverflow:
    """Keeps operators that wrote something not finite, with copies of what they read.

    Tensors are copied where they are observed, because operators may write in place.
    """

    def __init__(
        self,
        selection: Filter,
        reading: Reading,
        outlet: Outlet,
        course: Course,
        *,
        limit: int,
        warn: Callable[[str], None],
    ) -> None:
        self._filter = selection
        self._reading = reading
        self._outlet = outlet
        self._course = course
        self._warn = warn
        self._held: Held[Item] = Held(limit)

    def wants(self, op_name: str, side: Side, graph: int) -> bool:
        """Return whether it is selected; outputs are wanted for their values in any case."""
        if self._held.full and not self._held.keeps((graph, op_name)):
            return False
        if self._filter.decide(op_name, side, graph).keep:
            return True
        return side is Side.OUTPUT and self._filter.decide(op_name, Side.INPUT, graph).keep

    def take(self, observation: Observation) -> None:
        """Hold a copy until its operator is known to be good or bad."""
        graph, _, name, side = observation[:4]
        call = (graph, name)
        if observation.state:
            return
        if side is Side.OUTPUT and not self._held.keeps(call) and not self._finite(observation):
            self._keep(call)
        kept = self._filter.decide(name, side, graph).keep
        if kept and not self._filter.leaves_out(observation[:5]):
            self._put(call, self._reading.read(observation))

    def note(self, graph: int, op_name: str, item: Lost | OperatorArguments) -> None:
        """Hold it with the tensors of its operator."""
        self._put((graph, op_name), item)

    def settled(self, graph: int, op_name: str, *, raised: bool) -> None:
        """Forget an operator that was good."""
        self._outlet.forget(self._held.settle((graph, op_name)))
        self._reading.over(graph, op_name)

    def end(self) -> None:
        """Forget every operator that was not bad so far."""
        self._outlet.forget(self._held.clear())

    def _put(self, call: tuple[int, str], item: Item) -> None:
        if self._held.keeps(call):
            self._outlet.send(item, self._course.iteration)
        else:
            self._outlet.forget(self._held.hold(call, item))

    def _keep(self, call: tuple[int, str]) -> None:
        for item in self._held.keep(call):
            self._outlet.send(item, self._course.iteration)
        if self._held.full:
            self._course.retire()

    def _finite(self, observation: Observation) -> bool:
        try:
            return observation.tensor.finite()
        except Exception:  # a tensor that cannot be read must not end the training
            logger.debug("finiteness unknown", exc_info=True)
            self._warn(f"{observation.op_name} could not be checked for an overflow")
            return True


class OnException:
    """Keeps the inputs of the operator that raised, read when it raised.

    Until then they are only referred to, so nothing is copied for operators that work; a tensor
    that is known to have changed since is lost.
    """

    def __init__(self, selection: Filter, reading: Reading, outlet: Outlet, course: Course) -> None:
        self._filter = selection
        self._reading = reading
        self._outlet = outlet
        self._course = course
        self._held: Held[Observation | Lost | OperatorArguments] = Held()

    def wants(self, op_name: str, side: Side, graph: int) -> bool:
        """Return whether it is a selected input: what raised has no outputs."""
        return side is Side.INPUT and self._filter.decide(op_name, side, graph).keep

    def take(self, observation: Observation) -> None:
        """Refer to the tensor until its operator is over."""
        if not (observation.state or self._filter.leaves_out(observation[:5])):
            self._held.hold((observation.graph, observation.op_name), observation)

    def note(self, graph: int, op_name: str, item: Lost | OperatorArguments) -> None:
        """Hold it until the operator is over."""
        self._held.hold((graph, op_name), item)

    def settled(self, graph: int, op_name: str, *, raised: bool) -> None:
        """Send what an operator that raised had read; forget any other."""
        for item in self._held.settle((graph, op_name)):
            if raised:
                self._outlet.send(self._now(item), self._course.iteration)
        self._reading.over(graph, op_name)

    def end(self) -> None:
        """Forget the operators that did not raise."""
        self._held.clear()

    def _now(self, item: Observation | Lost | OperatorArguments) -> Item:
        if not isinstance(item, Observation):
            return item
        try:
            if item.tensor.changed():
                return self._reading.lost(item.op_name, CHANGED_IN_PLACE)
        except Exception:  # as if unknown: the copy tells whether it can be read at all
            logger.debug("change unknown", exc_info=True)
        return self._reading.read_again(item)


def trigger_of(
    plan: DumpPlan,
    selection: Filter,
    reading: Reading,
    outlet: Outlet,
    course: Course,
    *,
    warn: Callable[[str], None],
) -> Trigger:
    """Return the trigger that the plan names."""
    if plan.selection.watched is not None:
        return Watching(plan.selection.watched, selection, reading, outlet, course)
    if plan.selection.trigger == "overflow":
        limit = plan.selection.overflow_limit
        return OnOverflow(selection, reading, outlet, course, limit=limit, warn=warn)
    if plan.selection.trigger == "exception":
        return OnException(selection, reading, outlet, course)
    return Always(selection, reading, outlet, course)
