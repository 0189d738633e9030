"""Reads outputs of operators at once and again after others, to see who else writes there.

What a watched operator wrote is referred to until its iteration ends: that memory stays in use.
Tensors of the job are never changed, and nothing but the outputs of watched operators is kept.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rankdump.contract.exchange import OperatorArguments
from rankdump.contract.key import Side
from rankdump.contract.plan import Watched
from rankdump.contract.selection import named_in, watch_name
from rankdump.filter import Filter
from rankdump.pipeline.course import Course
from rankdump.pipeline.outlet import Outlet
from rankdump.pipeline.reading import Lost, Reading
from rankdump.values import Observation

_MOST_OPERATORS = 1 << 12
"""Call numbers make names; a loop without steps must not keep memory for ever."""


@dataclass(slots=True)
class _Ran:
    """What a watched operator wrote last in the running iteration."""

    outputs: dict[int, Observation] = field(default_factory=dict[int, Observation])
    lost: list[Lost] = field(default_factory=list[Lost])


class Watching:
    """A trigger: outputs of watched operators, and again after each other layer of their model."""

    def __init__(
        self,
        watched: Watched,
        selection: Filter,
        reading: Reading,
        outlet: Outlet,
        course: Course,
    ) -> None:
        self._layers = watched.layers
        self._filter = selection
        self._reading = reading
        self._outlet = outlet
        self._course = course
        self._lock = threading.Lock()
        self._ran: dict[tuple[int, str], _Ran] = {}

    def wants(self, op_name: str, side: Side, graph: int) -> bool:
        """Return whether it is the output of a watched operator."""
        return self._filter.decide(op_name, side, graph).keep

    def take(self, observation: Observation) -> None:
        """Read the tensor and send it, and refer to it until the iteration is over."""
        if self._filter.leaves_out(observation[:5]):
            return
        self._outlet.send(self._reading.read(observation), self._course.iteration)
        lasting = observation._replace(tensor=observation.tensor.memory())
        with self._lock:
            outputs = self._of(observation.graph, observation.op_name).outputs
            outputs[observation.slot] = lasting

    def note(self, graph: int, op_name: str, item: Lost | OperatorArguments) -> None:
        """Send the loss of an output, and remember it: it is as lost after every layer."""
        if isinstance(item, Lost):
            self._outlet.send(item, self._course.iteration)
            with self._lock:
                self._of(graph, op_name).lost.append(item)

    def settled(self, graph: int, op_name: str, *, raised: bool) -> None:
        """Read other operators' outputs again if this one is a layer, however it ended."""
        self._reading.over(graph, op_name)
        if self._layers and not named_in(self._layers, op_name):
            return
        with self._lock:
            ran = [
                (name, list(found.outputs.values()), list(found.lost))
                for (of_graph, name), found in self._ran.items()
                if of_graph == graph and name != op_name
            ]
        for name, outputs, lost in ran:
            again = watch_name(op_name, name)
            for output in outputs:
                item = self._reading.read_again(output._replace(op_name=again))
                self._outlet.send(item, self._course.iteration)
            for item in lost:
                self._outlet.send(self._reading.lost(again, item.reason), self._course.iteration)
            self._reading.over(graph, again)

    def end(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._ran.clear()

    def _of(self, graph: int, op_name: str) -> _Ran:
        found = self._ran.get((graph, op_name))
        if found is None:
            if len(self._ran) >= _MOST_OPERATORS:
                self._ran.pop(next(iter(self._ran)))
            found = self._ran[graph, op_name] = _Ran()
        return found
