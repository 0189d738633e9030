"""Observes a model cell by cell: each call of one is an operator, named as MindSpore names it.

In PyNative mode all cells are seen; of compiled code only calls that Python makes: what they were
given and returned, under the name of the cell or function that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rankdump.adapters.mindspore.arguments import arguments_of
from rankdump.adapters.mindspore.compiled import (
    COMPILED,
    NO_ARGUMENTS,
    CompiledBoundary,
    CompiledCall,
    returned_gradients,
)
from rankdump.adapters.mindspore.framework import FOLDER
from rankdump.adapters.mindspore.gradients import Gradients
from rankdump.adapters.mindspore.interception import INTERCEPTION
from rankdump.adapters.mindspore.listener import Arguments, Keywords, Listener
from rankdump.adapters.mindspore.marks import CellMarking
from rankdump.adapters.mindspore.observing import Observer, reader_of
from rankdump.adapters.mindspore.parameters import Parameters
from rankdump.adapters.mindspore.recomputation import Regions
from rankdump.adapters.mindspore.scopes import CellOperator, operators_of
from rankdump.adapters.mindspore.tensors import is_tensor, type_of
from rankdump.adapters.stack import lines_now
from rankdump.contract.graph import GraphNode, SourceLine
from rankdump.contract.key import Side
from rankdump.hook import Leaf, Names, Scope, leaves_of_call, leaves_of_result
from rankdump.values import Begun, Recorder

# Seen from the backward, what the forward wrote is read and what it read is written.
_BACKWARD_SIDE = {Side.INPUT: Side.OUTPUT, Side.OUTPUT: Side.INPUT}


@dataclass(slots=True, eq=False)
class Call:
    """One forward call of a cell, and what of its backward has come."""

    scope: Scope
    names: Names
    arrived: set[tuple[Side, int]] = field(default_factory=set[tuple[Side, int]])


@dataclass(slots=True, eq=False)
class _Open:
    call: Call
    name: str
    begun: Begun
    inputs: int
    source: tuple[SourceLine, ...]
    arguments: dict[str, str]
    compiled: CompiledCall | None = None
    """Set when it is no call of a cell of the model, but of compiled code that runs the model."""


class CellHook(Listener):
    """One attached model; costs nothing in iterations that are not armed."""

    def __init__(self, model: Any, recorder: Recorder, graph: int) -> None:
        self._model = model
        self._observer = Observer(recorder, graph)
        self._gradients = Gradients()
        self._parameters = Parameters(model, self._observer)
        self._marking = CellMarking(model, self._observer)
        self._boundary = CompiledBoundary(model)
        self._regions: Regions[Call] = Regions()
        self._operators: dict[int, CellOperator] = {}
        self._numbers: dict[Scope, int] = {}
        self._iteration = -1
        self._listening = False
        self._saw_other_code = False

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Listen in an armed iteration, and in no other; calls are numbered anew in each."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._numbers = {}
            self._saw_other_code = False
            self._parameters.restart()
        self._observer.shielded(self._arm if armed else self._disarm)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Hand over parameters."""
        if armed:
            self._observer.shielded(self._marking.refresh, self._operators)
            self._observer.shielded(self._parameters.finish)
            if self._saw_other_code and not self._numbers:
                self._observer.recorder.warn_once(COMPILED)
        self._observer.shielded(self._gradients.release)
        self._regions.clear()

    def detach(self) -> None:
        """Leave MindSpore as it was before."""
        self._observer.shielded(self._disarm)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Begin the call of a cell of the model."""
        operator = self._operators.get(id(cell))
        if operator is None or not self._observer.armed:
            return None
        return self._observer.shielded(self._begin, operator, leaves_of_call(args, kwargs))

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """End the call of a cell, or of compiled code."""
        if isinstance(token, _Open):
            self._observer.shielded(self._end, token, leaves_of_result(result), raised)
            if token.compiled is not None and not raised:
                self._observer.shielded(self._take_returned, token.compiled, result)

    def compiled_begins(self, call: CompiledCall, args: Arguments, kwargs: Keywords) -> object:
        """Begin a call of compiled code that runs the model."""
        if not self._observer.armed:
            return None
        return self._observer.shielded(self._begin_compiled, call, leaves_of_call(args, kwargs))

    def optimizer_begins(self, optimizer: Any, args: Arguments, kwargs: Keywords) -> None:
        """Take the gradients that no hook has seen, as an optimizer is given them."""
        if self._observer.armed:
            given = args[0] if args else kwargs.get("gradients")
            self._observer.shielded(self._take_given, optimizer, given)

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take the begin of a recomputed region."""
        return self._regions.begin(id(cell), again=again)

    def _arm(self) -> None:
        self._operators = operators_of(self._model)
        self._boundary.forget()
        self._marking.tell(self._operators)
        self._parameters.start()
        if not self._listening:
            self._listening = True
            INTERCEPTION.listen(self)

    def _disarm(self) -> None:
        if self._listening:
            self._listening = False
            INTERCEPTION.leave(self)
        self._operators = {}
        self._boundary.forget()
        self._parameters.stop()
        self._gradients.release()
        self._regions.clear()

    def _begin(self, operator: CellOperator, leaves: Sequence[Leaf]) -> _Open:
        self._marking.refresh(self._operators, operator.cell)
        recorder = self._observer.recorder
        wanted = recorder.wants_arguments or recorder.describing
        return self._open(operator.scope, leaves, arguments_of(operator.cell) if wanted else {})

    def _begin_compiled(self, call: CompiledCall, leaves: Sequence[Leaf]) -> _Open | None:
        own = id(call.program) in self._operators
        scope = self._boundary.scope(call, self._operators)
        self._saw_other_code = True
        if own or scope is not None:
            self._observer.recorder.warn_once(COMPILED)
        if scope is None:
            return None
        if self._observer.recorder.wants_arguments:
            self._observer.recorder.warn_once(NO_ARGUMENTS)
        opened = self._open(scope, leaves, None)
        opened.compiled = call
        return opened

    def _open(
        self, scope: Scope, leaves: Sequence[Leaf], arguments: dict[str, str] | None
    ) -> _Open:
        observer = self._observer
        origin = self._regions.repeated(lambda known: known.scope == scope)
        call = origin or self._numbered(scope)
        self._regions.note(call)
        name = call.names.forward if origin is None else call.names.recomputation
        if origin is None:
            observer.recorder.entered(observer.graph, name)
            if observer.recorder.wants_arguments and arguments is not None:
                observer.recorder.arguments(observer.graph, scope.op_type, name, arguments)
        source = lines_now(besides=(FOLDER,)) if observer.recorder.describing else ()
        self._tensors(scope.op_type, name, Side.INPUT, leaves)
        self._wait(call, Side.INPUT, leaves)
        return _Open(call, name, observer.begins(name), len(leaves), source, arguments or {})

    def _numbered(self, scope: Scope) -> Call:
        number = self._numbers.get(scope, 0)
        self._numbers[scope] = number + 1
        return Call(scope, scope.names(number))

    def _take_returned(self, call: CompiledCall, result: object) -> None:
        self._parameters.returned(returned_gradients(call, result))

    def _take_given(self, optimizer: Any, given: object) -> None:
        gradients = cast("Sequence[object]", given) if isinstance(given, (tuple, list)) else ()
        if len(gradients) == len(optimizer.parameters):
            self._parameters.returned(zip(optimizer.parameters, gradients, strict=True))

    def _end(self, opened: _Open, leaves: Sequence[Leaf], raised: bool) -> None:
        observer, call = self._observer, opened.call
        try:
            if not raised:
                self._tensors(call.scope.op_type, opened.name, Side.OUTPUT, leaves)
                self._wait(call, Side.OUTPUT, leaves)
        finally:
            observer.recorder.finished(opened.begun)
            if observer.recorder.describing:
                self._describe(opened, leaves)
            observer.settled(opened.name, raised=raised)

    def _describe(self, opened: _Open, leaves: Sequence[Leaf]) -> None:
        node = GraphNode(
            name=opened.name,
            op_type=opened.call.scope.op_type,
            inputs=("",) * opened.inputs,
            outputs=tuple(type_of(leaf.value) for leaf in leaves if is_tensor(leaf.value)),
            attributes=opened.arguments,
            source=opened.source,
        )
        self._observer.recorder.describe(self._observer.graph, node)

    def _tensors(self, op_type: str, name: str, side: Side, leaves: Sequence[Leaf]) -> None:
        if not self._observer.wants(name, side):
            return
        for leaf in leaves:
            if is_tensor(leaf.value):
                read = reader_of(leaf.value)
                self._observer.tensor(op_type, name, side, leaf.slot, leaf.argument, read)

    def _wait(self, call: Call, side: Side, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            if is_tensor(leaf.value):
                self._gradients.wait(leaf.value, self._arrival(call, side, leaf))

    def _arrival(self, call: Call, side: Side, leaf: Leaf) -> Callable[[Any], None]:
        slot, argument = leaf.slot, leaf.argument

        def take(gradient: Any) -> None:
            self._observer.shielded(self._arrived, call, side, Leaf(slot, argument, gradient))

        return take

    def _arrived(self, call: Call, side: Side, leaf: Leaf) -> None:
        """Hand over a gradient; those of a recomputed call once, as its forward's."""
        place = (side, leaf.slot)
        if not self._observer.armed or place in call.arrived:
            return
        name = call.names.gradient
        if not call.arrived:
            self._observer.event(name)
        call.arrived.add(place)
        self._tensors(call.scope.op_type, name, _BACKWARD_SIDE[side], [leaf])
        self._observer.settled(name)
