"""API dumps of MindSpore (protocol `ApiFramework`): the hook that observes cells, functions,
methods and primitives; the recorder of their tensors, stacks and gradients; and the observer of
steps.

Only calls that the program itself makes count, not calls inside an observed call, an optimizer or
compiled code. A call that is not recorded is still counted, so that call numbers are those of the
run.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, StartedEvent, TensorSource
from rankdump._frameworks.api_calls import (
    LAYER_MARK_PLACE,
    ApiCallCounter,
    ApiLeaf,
    ApiOptions,
    ApiStepWatch,
    CallStackCache,
    StepListener,
    find_scalar_type,
    format_api_argument,
    format_layer_name,
    list_input_leaves,
    list_output_leaves,
    make_layer_mark,
    make_layer_value,
)
from rankdump._frameworks.arrays import ArraySource
from rankdump._frameworks.mindspore.api_locations import MindSporeApi
from rankdump._frameworks.mindspore.backward import MindSporeGradientObserver, RecomputedRegions
from rankdump._frameworks.mindspore.cell_hook import MindSporeOutermostWatch
from rankdump._frameworks.mindspore.cell_tree import COMPILED_APIS_WARNING, CompiledCall
from rankdump._frameworks.mindspore.framework import (
    MINDSPORE_FOLDER,
    has_optimizers,
    is_built_in,
    is_loss,
    is_recording_gradients,
    is_training_step,
    iterate_cells,
)
from rankdump._frameworks.mindspore.interception import (
    CALL_INTERCEPTION,
    KeywordArguments,
    MindSporeCallListener,
    PositionalArguments,
)
from rankdump._frameworks.mindspore.tensors import (
    MindSporeObserver,
    is_float_data,
    is_tensor,
    make_mindspore_source,
)
from rankdump._layout.api_tree import ApiCall

_logger = logging.getLogger("rankdump")

NAME = "mindspore"


@dataclass(slots=True, eq=False)
class OpenMindSporeApiCall:
    """API call that has begun and not ended."""

    call: ApiCall
    gradient: ApiCall
    """Backward of the call; for a call that repeats a forward call, the backward of that forward
    call.
    """
    arrived_places: set[str] = field(default_factory=set[str])
    """Places whose gradients have arrived; a repetition shares them with the call that
    it repeats.
    """
    recomputed: bool = False
    begun: StartedEvent | None = None


class MindSporeApiRecorder:
    """Records selected calls, with one recorder and one set of options."""

    def __init__(
        self, observer: MindSporeObserver, options: ApiOptions, gradients: MindSporeGradientObserver
    ) -> None:
        self.observer = observer
        self.options = options
        self._gradients = gradients
        self._stacks = CallStackCache(
            f"{MINDSPORE_FOLDER}{os.sep}", users_only=options.filter_stack
        )

    def begin_call(
        self, open_call: OpenMindSporeApiCall, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Record the start of a call, and its arguments as they are now."""
        observer, name = self.observer, open_call.call.name
        if not open_call.recomputed:
            observer.recorder.begin_call(observer.graph, name)
        self._record_stack(name)
        open_call.begun = observer.start_event(name)
        self._record_leaves(open_call, TensorSide.INPUT, list_input_leaves(args, kwargs))

    def end_call(self, open_call: OpenMindSporeApiCall, result: object, raised: bool) -> None:
        """Record the results of a call, and hook them to receive their gradients."""
        try:
            if not raised:
                leaves = list_output_leaves(result)
                self._record_leaves(open_call, TensorSide.OUTPUT, leaves)
                self._watch_gradients(open_call, leaves)
        finally:
            if open_call.begun is not None:
                self.observer.recorder.finish_event(open_call.begun)
            self.observer.end_call(open_call.call.name, raised=raised)

    def record_layer_mark(self, call: ApiCall, path: str) -> None:
        """Record the mark of a cell that was called, by its path with dots."""
        self.observer.record_event(call.name)
        self._record_stack(format_layer_name(path))
        self._record_single_tensor(
            call, 0, LAYER_MARK_PLACE.argument, ArraySource, make_layer_value()
        )

    def _record_gradient(
        self, open_call: OpenMindSporeApiCall, slot: int, argument: str, gradient: Any
    ) -> None:
        """Record a gradient. A gradient of a recomputed call is recorded once, as that of the
        forward call.
        """
        if not self.observer.armed or argument in open_call.arrived_places:
            return
        open_call.arrived_places.add(argument)
        self.observer.record_event(open_call.gradient.name)
        self._record_single_tensor(
            open_call.gradient, slot, argument, make_mindspore_source, gradient
        )

    def _record_single_tensor(
        self,
        call: ApiCall,
        slot: int,
        argument: str,
        read: Callable[[Any], TensorSource | str],
        value: object,
    ) -> None:
        """Record the only tensor of a mark or of a backward."""
        if self.observer.is_selected(call.name, TensorSide.INPUT):
            self.observer.record_tensor(
                call.op_type, call.name, TensorSide.INPUT, slot, argument, read, value
            )
        self.observer.end_call(call.name)

    def _record_leaves(
        self, open_call: OpenMindSporeApiCall, side: TensorSide, leaves: Sequence[ApiLeaf]
    ) -> None:
        """Record the tensors and numbers of one side that the options select."""
        call = open_call.call
        if not self.observer.is_selected(call.name, side):
            return
        for leaf in leaves:
            if not self._is_recorded(leaf.value):
                continue
            scalar = find_scalar_type(leaf.value)
            argument = format_api_argument(side, leaf.path, leaf.word, scalar, open_call.recomputed)
            self.observer.record_tensor(
                call.op_type,
                call.name,
                side,
                leaf.slot,
                argument,
                ArraySource if scalar else make_mindspore_source,
                leaf.value,
            )

    def _is_recorded(self, value: object) -> bool:
        if is_tensor(value):
            return not self.options.filter_data or is_float_data(value)
        return not self.options.filter_data and bool(find_scalar_type(value))

    def _watch_gradients(self, open_call: OpenMindSporeApiCall, leaves: Sequence[ApiLeaf]) -> None:
        if not self.options.retain_backward:
            return
        for leaf in leaves:
            if is_tensor(leaf.value) and self._is_recorded(leaf.value):
                # The callback keeps no tensor of the forward alive.
                argument = format_api_argument(TensorSide.INPUT, leaf.path, leaf.word)
                place = open_call, leaf.slot, argument
                take = partial(self.observer.run_shielded, self._record_gradient, *place)
                self._gradients.watch_gradient(leaf.value, take)

    def _record_stack(self, name: str) -> None:
        stack = self._stacks.read_stack(inspect.currentframe())
        self.observer.recorder.record_call_stack(self.observer.graph, name, stack)


class MindSporeApiHook(MindSporeCallListener):
    """Hook of one program's API calls; it counts them from its construction on."""

    def __init__(self, model: Any, recorder: Recorder, graph: int, options: ApiOptions) -> None:
        self._model = model
        self._graph = graph
        self._numbers = ApiCallCounter()
        self._gradients = MindSporeGradientObserver()
        self._regions: RecomputedRegions[OpenMindSporeApiCall] = RecomputedRegions()
        self._paths: dict[int, tuple[str, Any]] = {}
        self._record = MindSporeApiRecorder(
            MindSporeObserver(recorder, graph), options, self._gradients
        )
        self._marked: set[str] = set()
        self._refresh()
        CALL_INTERCEPTION.add_listener(self)

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Record with this recorder and these options from now on; call numbers continue."""
        self._record = MindSporeApiRecorder(
            MindSporeObserver(recorder, self._graph), options, self._gradients
        )

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Find the cells of the model again, because the script may have changed them."""
        self._record.observer.run_shielded(self._refresh)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Remove the hooks of gradients that did not arrive."""
        self._record.observer.run_shielded(self._gradients.remove_hooks)
        self._regions.clear()

    def detach(self) -> None:
        """Restore the replaced attributes of MindSpore."""
        CALL_INTERCEPTION.remove_listener(self)
        self._record.observer.run_shielded(self._gradients.remove_hooks)

    def call_begins(
        self, api: MindSporeApi, args: PositionalArguments, kwargs: KeywordArguments
    ) -> OpenMindSporeApiCall | None:
        """Count a call; record its arguments if the call is selected."""
        call = ApiCall(api.kind, api.name, self._numbers.next_number(f"{api.kind}_{api.name}"))
        if not self._record.observer.armed:
            return None
        return self._record.observer.run_shielded(self._begin_call, call, args, kwargs)

    def call_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Record what a selected call returned."""
        if isinstance(token, OpenMindSporeApiCall):
            self._record.observer.run_shielded(self._record.end_call, token, result, raised)

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Begin the call of a layer; for a container, only note its path."""
        if inside:
            return None
        path, _ = self._paths.get(id(cell), ("", None))
        if not self.is_api_call(cell):
            return path
        # The mark of a layer comes before the layer's own tensors, the mark of a container after
        # all calls inside it.
        self._record.observer.run_shielded(self._record_mark, path)
        return self.call_begins(MindSporeApi("NN", type(cell).__name__), args, kwargs)

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """End the call of a layer, or record the mark of a container."""
        if isinstance(token, str):
            self._record.observer.run_shielded(self._record_mark, token)
        self.call_ends(token, result, raised=raised)

    def is_api_call(self, cell: Any) -> bool:
        """Return whether a cell is a layer of the model, or a loss, which may be outside it."""
        return is_loss(cell) or (id(cell) in self._paths and is_built_in(cell))

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Begin a recomputed region."""
        return self._regions.begin_region(id(cell), again=again)

    def compiled_begins(
        self, call: CompiledCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Warn once that API calls inside compiled code are not dumped."""
        if self._record.observer.armed:
            self._record.observer.recorder.warn_once(COMPILED_APIS_WARNING)
        return None

    def _refresh(self) -> None:
        # The dictionary keeps cells alive, so that their identities stay unique.
        self._paths = {id(cell): (path, cell) for path, cell in iterate_cells(self._model)}

    def _begin_call(
        self, call: ApiCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> OpenMindSporeApiCall | None:
        open_call = self._make_open_call(call)
        if not self._record.options.scope(call):
            return None
        self._record.begin_call(open_call, args, kwargs)
        return open_call

    def _make_open_call(self, call: ApiCall) -> OpenMindSporeApiCall:
        gradient = ApiCall(call.kind, call.api, call.number, "backward")
        open_call = OpenMindSporeApiCall(call, gradient, recomputed=self._regions.is_recomputing)
        origin = self._regions.take_repeated_call(lambda known: known.call.op_type == call.op_type)
        if origin is not None:
            open_call.gradient, open_call.arrived_places = origin.gradient, origin.arrived_places
        self._regions.add_call(origin or open_call)
        return open_call

    def _record_mark(self, path: str) -> None:
        """Record the mark of a cell; the model itself and cells outside of it have none."""
        if not path or not self._record.observer.armed or self._regions.is_recomputing:
            return
        call, options = make_layer_mark(path), self._record.options
        if (options.layers_once and path in self._marked) or not options.scope(call):
            return
        if options.layers_once:
            self._marked.add(path)
        self._record.record_layer_mark(call, path)


class MindSporeStepWatch(ApiStepWatch):
    """Reports the calls and steps of one MindSpore model to a listener until `remove`."""

    def __init__(self, model: Any, listener: StepListener) -> None:
        super().__init__(model, listener)
        self._outermost = MindSporeOutermostWatch(self._model_called)
        self._outermost.watch(model)
        self._end_listener = _StepEndListener(self)
        CALL_INTERCEPTION.add_listener(self._end_listener)

    def remove(self) -> None:
        """Restore the replaced attributes of MindSpore."""
        self._outermost.remove()
        CALL_INTERCEPTION.remove_listener(self._end_listener)

    def stepped(self, optimizer: Any) -> None:
        """Report the step of an optimizer that holds a parameter of the model."""
        own = {id(parameter) for parameter in self._model.get_parameters()}
        if any(id(parameter) in own for parameter in optimizer.parameters):
            self._report_step()

    def _search_optimizer(self) -> bool:
        return has_optimizers()

    def _model_called(self, number: int) -> None:
        self._report_call(trains=is_recording_gradients())


class _StepEndListener(MindSporeCallListener):
    """Receives the steps of optimizers, and calls of cells that run or skip a step, as a loss
    scaler does.
    """

    def __init__(self, watch: MindSporeStepWatch) -> None:
        self._watch = watch

    def optimizer_ends(self, optimizer: Any) -> None:
        """Report an optimizer's step."""
        self._watch.stepped(optimizer)

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Note the call of a cell that runs a whole training step."""
        return cell if is_training_step(cell) else None

    def cell_ends(self, token: Any, result: object, *, raised: bool) -> None:
        """Report a whole training step."""
        if token is not None:
            self._watch.stepped(token.optimizer)


def api_hook(
    model: Any, recorder: Recorder, *, graph: int, options: ApiOptions
) -> MindSporeApiHook:
    """Return the hook that observes the calls of a model's program, and counts them from now on."""
    return MindSporeApiHook(model, recorder, graph, options)


def without_dropout(model: Any) -> int:
    """Turn off the dropout layers of a model; return how many there are."""
    found = [cell for _, cell in iterate_cells(model) if _is_dropout(cell)]
    for cell in found:
        # Each class of dropout uses one or two of these attributes.
        for name, nothing in (("p", 0.0), ("prob", 0.0), ("keep_prob", 1.0)):
            if hasattr(cell, name):
                setattr(cell, name, nothing)
    return len(found)


def save_state(model: Any, folder: Path) -> None:
    """Write nothing, and log the reason: troubleshooter compares the state of torch models only."""
    _logger.warning(
        "rankdump: compare_statedict is supported for torch only; the state of this MindSpore "
        "model is not saved"
    )


def watch_steps(model: Any, listener: StepListener) -> MindSporeStepWatch:
    """Report the model's calls and its optimizers' steps to a listener."""
    return MindSporeStepWatch(model, listener)


def _is_dropout(cell: Any) -> bool:
    return is_built_in(cell) and type(cell).__name__.startswith("Dropout")
