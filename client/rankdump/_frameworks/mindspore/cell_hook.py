"""Observation of one attached model cell by cell: each call is an operator with MindSpore's name.
Also the cells that are marked for `dump_mode` 2, and the observer of outermost calls of models.

In PyNative mode all cells are observed. Of compiled code only the calls from Python are observed,
with arguments and results, under the name of the called cell or function. `mindspore.set_dump` sets
a flag on a cell and the cells inside it, and an attribute on primitives; both are compiled into the
program, so `rankdump.set_dump` stores its marks outside of the cells.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from rankdump._core.graph import GraphNode, SourceLine
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import ForwardPass, Recorder, StartedEvent
from rankdump._frameworks.mindspore.backward import (
    MindSporeGradientObserver,
    MindSporeParameterObserver,
    RecomputedRegions,
)
from rankdump._frameworks.mindspore.card_observer import MindSporeCardObserver
from rankdump._frameworks.mindspore.cell_tree import (
    COMPILED_WARNING,
    NO_ARGUMENTS_WARNING,
    CellOperator,
    CompiledCall,
    CompiledCallFinder,
    find_cell_operators,
    iterate_parameter_names,
    match_returned_gradients,
    read_cell_arguments,
)
from rankdump._frameworks.mindspore.framework import (
    MINDSPORE_FOLDER,
    Cell,
    has_marked_primitive,
    iterate_cells,
    read_dump_flag,
)
from rankdump._frameworks.mindspore.interception import (
    CALL_INTERCEPTION,
    KeywordArguments,
    MindSporeCallListener,
    PositionalArguments,
)
from rankdump._frameworks.mindspore.tensors import (
    MindSporeObserver,
    is_tensor,
    make_mindspore_source,
    read_tensor_type,
)
from rankdump._frameworks.model_observer import (
    BACKWARD_SIDE,
    capture_source_lines,
    check_mark_state,
    make_mark_target_error,
)
from rankdump._frameworks.operator_names import (
    CallLeaf,
    OperatorCallNames,
    OperatorScope,
    list_call_leaves,
    list_result_leaves,
)


class CellMarks:
    """Marks of the cells of this process; a mark keeps no cell alive."""

    def __init__(self) -> None:
        # Each mark is stored with the value that MindSpore's flag had at that time: if the flag has
        # changed since, it is newer than the mark.
        self._by_cell: weakref.WeakKeyDictionary[Any, tuple[bool, bool | None]]
        self._by_cell = weakref.WeakKeyDictionary()
        self.changes = 0
        """Number of calls of `rankdump.set_dump`."""

    def set_mark(self, cell: Any, enabled: bool) -> None:
        """Mark a cell and all cells inside it, or remove their marks."""
        for _, inside in iterate_cells(cell):
            self._by_cell[inside] = (enabled, read_dump_flag(inside))
        self.changes += 1

    def is_marked(self, cell: Any) -> bool:
        """Return whether a cell is marked, which includes MindSpore's mark on one of its
        primitives.
        """
        flag = read_dump_flag(cell)
        enabled, flag_then = self._by_cell.get(cell, (None, None))
        if enabled is not None and flag == flag_then:
            return enabled
        return bool(flag) or has_marked_primitive(cell)


cell_marks = CellMarks()
"""Marks of this process."""


def set_dump(cell: object, enabled: object = True) -> None:
    """Mark a cell and all cells inside it, or remove their marks; the last call counts.

    The mark takes effect with the next call of one of the cells. ValueError if the arguments are
    not a cell and a bool, as in MindSpore (API reference of mindspore.set_dump).
    """
    if not isinstance(cell, Cell):
        raise make_mark_target_error(cell, "mindspore.nn.Cell")
    cell_marks.set_mark(cell, check_mark_state(enabled))


class CellMarkReporter:
    """Reports the marked cells of one model to its recorder."""

    def __init__(self, model: Any, observer: MindSporeObserver) -> None:
        self._model = model
        self._observer = observer
        self._marked: dict[int, bool] = {}
        self._changes = -1

    def report_marks(self, operators: dict[int, CellOperator]) -> None:
        """Report which operators and parameters of the model are marked."""
        self._changes = cell_marks.changes
        self._marked = {
            number: cell_marks.is_marked(each.cell) for number, each in operators.items()
        }
        scopes = {each.scope.path for number, each in operators.items() if self._marked[number]}
        names = (
            scopes.union(iterate_parameter_names(self._model, cell_marks.is_marked))
            if scopes
            else scopes
        )
        self._observer.recorder.set_marks(self._observer.graph, frozenset(names))

    def report_changed_marks(self, operators: dict[int, CellOperator], cell: Any = None) -> None:
        """Report the marks again if `rankdump.set_dump` was called since, or if MindSpore's flag on
        `cell` has changed.
        """
        known = self._marked.get(id(cell))
        if self._changes != cell_marks.changes or (
            known is not None and cell_marks.is_marked(cell) != known
        ):
            self.report_marks(operators)


@dataclass(slots=True, eq=False)
class MindSporeCellCall:
    """Forward call of a cell, with the gradients that have arrived so far."""

    scope: OperatorScope
    names: OperatorCallNames
    forward_pass: ForwardPass
    arrived_slots: set[tuple[TensorSide, int]] = field(default_factory=set[tuple[TensorSide, int]])


@dataclass(slots=True, eq=False)
class _OpenCellCall:
    call: MindSporeCellCall
    name: str
    begun: StartedEvent
    inputs: int
    source: tuple[SourceLine, ...]
    arguments: dict[str, str]
    compiled: CompiledCall | None = None
    """The call of compiled code that runs the model; None if the call is one of a cell of the
    model.
    """


class MindSporeCellHook(MindSporeCallListener):
    """Hook of one attached model; it costs nothing in iterations that are not armed."""

    def __init__(self, model: Any, recorder: Recorder, graph: int) -> None:
        self._model = model
        self._observer = MindSporeObserver(recorder, graph)
        self._gradients = MindSporeGradientObserver()
        self._parameters = MindSporeParameterObserver(model, self._observer)
        self._card: MindSporeCardObserver | None = None
        if recorder.card is not None:
            self._card = MindSporeCardObserver(recorder.card, model, graph)
        self._mark_reporter = CellMarkReporter(model, self._observer)
        self._compiled_calls = CompiledCallFinder(model)
        self._regions: RecomputedRegions[MindSporeCellCall] = RecomputedRegions()
        self._operators: dict[int, CellOperator] = {}
        self._numbers: dict[OperatorScope, int] = {}
        self._iteration = -1
        self._listening = False
        self._ran_compiled_code = False

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Observe calls if the iteration is armed; call numbers restart in each iteration."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._numbers = {}
            self._ran_compiled_code = False
            self._parameters.restart()
            if self._card is not None:
                self._card.begin_step(iteration)
        self._observer.run_shielded(self._arm if armed else self._disarm)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record the parameters of the model."""
        if armed:
            self._observer.run_shielded(self._mark_reporter.report_changed_marks, self._operators)
            self._observer.run_shielded(self._parameters.record_all)
            if self._ran_compiled_code and not self._numbers:
                self._observer.recorder.warn_once(COMPILED_WARNING)
        self._observer.run_shielded(self._gradients.remove_hooks)
        self._regions.clear()

    def detach(self) -> None:
        """Restore the replaced attributes of MindSpore."""
        self._observer.run_shielded(self._disarm)

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Begin the call of a cell of the model."""
        operator = self._operators.get(id(cell))
        if operator is None or not self._observer.armed:
            return None
        return self._observer.run_shielded(
            self._begin_cell, operator, list_call_leaves(args, kwargs)
        )

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """End the call of a cell, or of compiled code."""
        if isinstance(token, _OpenCellCall):
            self._observer.run_shielded(self._end_call, token, list_result_leaves(result), raised)
            if token.compiled is not None and not raised:
                self._observer.run_shielded(self._record_returned_gradients, token.compiled, result)

    def compiled_begins(
        self, call: CompiledCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Begin a call of compiled code that runs the model."""
        if not self._observer.armed:
            return None
        return self._observer.run_shielded(
            self._begin_compiled, call, list_call_leaves(args, kwargs)
        )

    def optimizer_begins(
        self, optimizer: Any, args: PositionalArguments, kwargs: KeywordArguments
    ) -> None:
        """Record the gradients passed to an optimizer that no hook has seen."""
        if self._observer.armed:
            if self._card is not None:
                self._observer.run_shielded(self._card.observe_optimizer, optimizer)
            given = args[0] if args else kwargs.get("gradients")
            self._observer.run_shielded(self._record_given_gradients, optimizer, given)

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Begin a recomputed region."""
        return self._regions.begin_region(id(cell), again=again)

    def _arm(self) -> None:
        self._operators = find_cell_operators(self._model)
        self._compiled_calls.clear()
        self._mark_reporter.report_marks(self._operators)
        self._parameters.start()
        if not self._listening:
            self._listening = True
            CALL_INTERCEPTION.add_listener(self)

    def _disarm(self) -> None:
        if self._listening:
            self._listening = False
            CALL_INTERCEPTION.remove_listener(self)
        self._operators = {}
        self._compiled_calls.clear()
        self._parameters.stop()
        self._gradients.remove_hooks()
        self._regions.clear()

    def _begin_cell(self, operator: CellOperator, leaves: Sequence[CallLeaf]) -> _OpenCellCall:
        if self._card is not None and operator.cell is self._model:
            self._observer.run_shielded(self._card.observe_call, leaves)
        self._mark_reporter.report_changed_marks(self._operators, operator.cell)
        recorder = self._observer.recorder
        wanted = recorder.wants_arguments or recorder.is_describing
        return self._open_call(
            operator.scope, leaves, read_cell_arguments(operator.cell) if wanted else {}
        )

    def _begin_compiled(
        self, call: CompiledCall, leaves: Sequence[CallLeaf]
    ) -> _OpenCellCall | None:
        own = id(call.program) in self._operators
        scope = self._compiled_calls.find_scope(call, self._operators)
        self._ran_compiled_code = True
        if self._card is not None:
            self._observer.run_shielded(self._card.observe_call, leaves)
        if own or scope is not None:
            self._observer.recorder.warn_once(COMPILED_WARNING)
        if scope is None:
            return None
        if self._observer.recorder.wants_arguments:
            self._observer.recorder.warn_once(NO_ARGUMENTS_WARNING)
        opened = self._open_call(scope, leaves, None)
        opened.compiled = call
        return opened

    def _open_call(
        self, scope: OperatorScope, leaves: Sequence[CallLeaf], arguments: dict[str, str] | None
    ) -> _OpenCellCall:
        observer = self._observer
        origin = self._regions.take_repeated_call(lambda known: known.scope == scope)
        call = origin or self._number_call(scope)
        self._regions.add_call(call)
        name = call.names.forward if origin is None else call.names.recomputation
        if origin is None:
            observer.recorder.begin_call(observer.graph, name)
            if observer.recorder.wants_arguments and arguments is not None:
                observer.recorder.record_arguments(observer.graph, scope.op_type, name, arguments)
        source = (
            capture_source_lines(besides=(MINDSPORE_FOLDER,))
            if observer.recorder.is_describing
            else ()
        )
        self._record_tensors(call, name, TensorSide.INPUT, leaves)
        self._watch_gradients(call, TensorSide.INPUT, leaves)
        return _OpenCellCall(
            call, name, observer.start_event(name), len(leaves), source, arguments or {}
        )

    def _number_call(self, scope: OperatorScope) -> MindSporeCellCall:
        number = self._numbers.get(scope, 0)
        self._numbers[scope] = number + 1
        forward_pass = self._observer.recorder.declared_pass
        return MindSporeCellCall(scope, scope.call_names(number), forward_pass)

    def _record_returned_gradients(self, call: CompiledCall, result: object) -> None:
        self._parameters.record_returned_gradients(match_returned_gradients(call, result))

    def _record_given_gradients(self, optimizer: Any, given: object) -> None:
        gradients = cast("Sequence[object]", given) if isinstance(given, (tuple, list)) else ()
        if len(gradients) == len(optimizer.parameters):
            self._parameters.record_returned_gradients(
                zip(optimizer.parameters, gradients, strict=True)
            )

    def _end_call(self, opened: _OpenCellCall, leaves: Sequence[CallLeaf], raised: bool) -> None:
        observer, call = self._observer, opened.call
        try:
            if not raised:
                self._record_tensors(call, opened.name, TensorSide.OUTPUT, leaves)
                self._watch_gradients(call, TensorSide.OUTPUT, leaves)
        finally:
            observer.recorder.finish_event(opened.begun)
            if observer.recorder.is_describing:
                self._describe(opened, leaves)
            observer.end_call(opened.name, raised=raised)

    def _describe(self, opened: _OpenCellCall, leaves: Sequence[CallLeaf]) -> None:
        node = GraphNode(
            name=opened.name,
            op_type=opened.call.scope.op_type,
            inputs=("",) * opened.inputs,
            outputs=tuple(read_tensor_type(leaf.value) for leaf in leaves if is_tensor(leaf.value)),
            attributes=opened.arguments,
            source=opened.source,
        )
        self._observer.recorder.describe(self._observer.graph, node)

    def _record_tensors(
        self, call: MindSporeCellCall, name: str, side: TensorSide, leaves: Sequence[CallLeaf]
    ) -> None:
        if not self._observer.is_selected(name, side):
            return
        for leaf in leaves:
            if is_tensor(leaf.value):
                self._observer.record_tensor(
                    call.scope.op_type,
                    name,
                    side,
                    leaf.slot,
                    leaf.argument,
                    make_mindspore_source,
                    leaf.value,
                    forward_pass=call.forward_pass,
                )

    def _watch_gradients(
        self, call: MindSporeCellCall, side: TensorSide, leaves: Sequence[CallLeaf]
    ) -> None:
        for leaf in leaves:
            if is_tensor(leaf.value):
                # The callback keeps no tensor of the forward alive.
                place = call, side, leaf.slot, leaf.argument
                take = partial(self._observer.run_shielded, self._record_gradient, *place)
                self._gradients.watch_gradient(leaf.value, take)

    def _record_gradient(
        self, call: MindSporeCellCall, side: TensorSide, slot: int, argument: str, gradient: Any
    ) -> None:
        """Record a gradient. A gradient of a recomputed call is recorded once, as that of the
        forward call.
        """
        place = (side, slot)
        if not self._observer.armed or place in call.arrived_slots:
            return
        name = call.names.gradient
        if not call.arrived_slots:
            self._observer.record_event(name)
        call.arrived_slots.add(place)
        leaf = CallLeaf(slot, argument, gradient)
        self._record_tensors(call, name, BACKWARD_SIDE[side], [leaf])
        self._observer.end_call(name)


class _CallDepth(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.repeating = 0


class MindSporeOutermostWatch(MindSporeCallListener):
    """Reports the outermost calls of models until `remove`; calls inside another model's call do
    not count.
    """

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` is called with the number of the model, before the call is observed."""
        self._model_called = begins
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._thread = _CallDepth()
        CALL_INTERCEPTION.add_listener(self, first=True)

    def watch(self, model: Any) -> None:
        """Watch another model; models are numbered from 0 in the order of these calls."""
        self._numbers.setdefault(id(model), (len(self._numbers), model))

    def remove(self) -> None:
        """Restore the replaced attributes of MindSpore."""
        CALL_INTERCEPTION.remove_listener(self)

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Report an outermost call; a recomputation does not count as such a call."""
        known = self._numbers.get(id(cell))
        thread = self._thread
        if known is None or thread.repeating:
            return None
        thread.depth += 1
        if thread.depth == 1:
            self._model_called(known[0])
        return known

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Count the end of a call."""
        if token is not None:
            self._thread.depth -= 1

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Note that the calling thread repeats a forward."""
        if not again:
            return bool
        self._thread.repeating += 1
        return self._end_repetition

    def _end_repetition(self) -> None:
        self._thread.repeating -= 1
