"""Operators whose arrays a script hands over one by one, and the constants of such a job.

Consecutive arrays under one name are one operator; it is over when the next one begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankdump.adapters.stack import lines_now
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.graph import GraphNode, SourceLine, TensorType
from rankdump.contract.key import Side
from rankdump.contract.selection import type_in
from rankdump.hook import PARAMETER, is_gradient
from rankdump.values import Begun, Observation, Recorder, TensorSource

logger = logging.getLogger(__name__)

UNSUPPORTED_DTYPE = "unsupported_dtype"
UNREADABLE = "unreadable_array"
_SIDES = tuple(side.value for side in Side)
_NUMBERS = range(1 << 32)
"""What slots and graphs may be."""


def fault_of(side: object, slot: object, graph: object) -> str:
    """Return what is wrong with the place of an array; empty when nothing is."""
    if side in _SIDES and slot in _NUMBERS and graph in _NUMBERS:
        return ""
    allowed = f"{' or '.join(_SIDES)}, and whole numbers from 0 to {_NUMBERS[-1]}"
    return f"side {side!r}, slot {slot!r}, graph {graph!r}; allowed: {allowed}"


def nodes_of(names: Sequence[str], op_types: Sequence[str] | None) -> list[GraphNode] | str:
    """Return the nodes of a compiled graph, types read off the names where none are given.

    A text says what is wrong with them.
    """
    kinds = [type_in(name) for name in names] if op_types is None else op_types
    if len(kinds) != len(names):
        return f"{len(kinds)} op_types for {len(names)} names; allowed: as many"
    return [GraphNode(name, kind) for name, kind in zip(names, kinds, strict=True)]


@dataclass(slots=True)
class _Open:
    """The operator whose arrays are being handed over."""

    graph: int
    op_type: str
    name: str
    begun: Begun
    source: tuple[SourceLine, ...]
    inputs: set[int] = field(default_factory=set[int])
    outputs: dict[int, TensorType] = field(default_factory=dict[int, TensorType])

    @property
    def node(self) -> GraphNode:
        """Its part in the graph; where its inputs came from is not known."""
        return GraphNode(
            name=self.name,
            op_type=self.op_type,
            inputs=("",) * len(self.inputs),
            outputs=tuple(kind for _, kind in sorted(self.outputs.items())),
            source=self.source,
        )


class ArrayCalls:
    """The operators of one session; each thread has one open at most."""

    def __init__(self, recorder: Recorder, source_of: Callable[[Any], TensorSource | str]) -> None:
        """`source_of` returns what reads an array, or the reason why nothing can."""
        self._recorder = recorder
        self._source_of = source_of
        self._open: dict[int, _Open] = {}
        self._constants: dict[tuple[int, str], Observation] = {}

    def dump(
        self, op_type: str, op_name: str, side: Side, slot: int, array: Any, graph: int
    ) -> None:
        """Hand over one array; one that no file can hold is lost."""
        operator = self._operator(graph, op_type, op_name)
        place = (graph, op_type, op_name, side, slot)
        wanted = self._recorder.wants(graph, op_name, side)
        source = self._source(place, array, wanted=wanted)
        if source is None:
            return
        if side is Side.INPUT:
            operator.inputs.add(slot)
        else:
            operator.outputs[slot] = TensorType(source.dtype, source.shape)
        if wanted:
            state = _is_state(op_type, op_name)
            self._recorder.observe(Observation(*place, "", source, state=state))

    def constant(self, name: str, array: Any, graph: int) -> None:
        """Hand over a constant, in the first armed iteration from now on."""
        place = (graph, PARAMETER, name, Side.OUTPUT, 0)
        wanted = self._recorder.wants(graph, name, Side.OUTPUT)
        source = self._source(place, array, wanted=wanted)
        if source is not None:
            found = Observation(*place, "constant", source, state=True, constant=True)
            self._constants[graph, name] = found
            self.armed()

    def armed(self) -> None:
        """Hand over the constants that waited for an armed iteration."""
        if self._recorder.armed:
            waiting, self._constants = self._constants, {}
            for constant in waiting.values():
                if self._recorder.wants(constant.graph, constant.op_name, constant.side):
                    self._recorder.observe(constant)

    def finish(self, *, raised: bool = False) -> None:
        """End the open operators of every thread; the calling thread's own may have raised."""
        for thread in list(self._open):
            self._finish(thread, raised=raised and thread == threading.get_ident())

    def _operator(self, graph: int, op_type: str, name: str) -> _Open:
        thread = threading.get_ident()
        current = self._open.get(thread)
        if current is None or (current.graph, current.name) != (graph, name):
            self._finish(thread)
            lines = lines_now() if self._recorder.describing else ()
            if not _is_state(op_type, name):
                self._recorder.entered(graph, name)
            begun = self._recorder.started(graph=graph, name=name)
            current = _Open(graph, op_type, name, begun, lines)
            self._open[thread] = current
        return current

    def _finish(self, thread: int, *, raised: bool = False) -> None:
        operator = self._open.pop(thread, None)
        if operator is None:
            return
        self._recorder.finished(operator.begun)
        if self._recorder.describing:
            self._recorder.describe(operator.graph, operator.node)
        self._recorder.settled(operator.graph, operator.name, raised=raised)

    def _source(
        self, place: tuple[int, str, str, Side, int], array: Any, *, wanted: bool
    ) -> TensorSource | None:
        """Return what reads an array; where it cannot be read, count it if it was wanted."""
        try:
            source = self._source_of(array)
            if not isinstance(source, str):
                return source
            reason = source
        except (UnsupportedError, TypeError, ValueError) as error:
            logger.debug("array of %s refused: %s", place[2], error)
            reason = UNSUPPORTED_DTYPE
        except Exception as error:  # the script's own object decides how numpy views it
            self._recorder.warn_once(f"numpy cannot view an array: {error}")
            reason = UNREADABLE
        if wanted:
            self._recorder.lose(*place, reason)
        return None


def _is_state(op_type: str, op_name: str) -> bool:
    """Return whether it is a weight as it stands: nothing that the program ran."""
    return op_type == PARAMETER and not is_gradient(op_name)
