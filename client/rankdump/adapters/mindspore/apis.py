"""Observes the calls of a program's APIs: cells, functions, methods and primitives.

Only what the program calls itself: nothing inside an observed call, an optimizer or compiled
code. A call that is not recorded is counted all the same, so that numbers are those of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankdump.adapters.api_calls import ApiOptions, CallNumbers, layer_call
from rankdump.adapters.mindspore.api_recording import ApiRecording, Calling
from rankdump.adapters.mindspore.catalogue import Api
from rankdump.adapters.mindspore.compiled import COMPILED_APIS, CompiledCall
from rankdump.adapters.mindspore.framework import cells_of, is_built_in, is_loss
from rankdump.adapters.mindspore.gradients import Gradients
from rankdump.adapters.mindspore.interception import INTERCEPTION
from rankdump.adapters.mindspore.listener import Arguments, Keywords, Listener
from rankdump.adapters.mindspore.observing import Observer
from rankdump.adapters.mindspore.recomputation import Regions
from rankdump.contract.layout.api_name import ApiCall
from rankdump.values import Recorder


class ApiHook(Listener):
    """The API calls of one program, named and numbered from construction on."""

    def __init__(self, model: Any, recorder: Recorder, graph: int, options: ApiOptions) -> None:
        self._model = model
        self._graph = graph
        self._numbers = CallNumbers()
        self._gradients = Gradients()
        self._regions: Regions[Calling] = Regions()
        self._paths: dict[int, tuple[str, Any]] = {}
        self._record = ApiRecording(Observer(recorder, graph), options, self._gradients)
        self._marked: set[str] = set()
        self._refresh()
        INTERCEPTION.listen(self)

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Record with another session from now on; numbers go on."""
        self._record = ApiRecording(Observer(recorder, self._graph), options, self._gradients)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Look up the cells of the model again: the script may have changed it."""
        self._record.observer.shielded(self._refresh)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Forget what waits for gradients that did not come."""
        self._record.observer.shielded(self._gradients.release)
        self._regions.clear()

    def detach(self) -> None:
        """Leave MindSpore as it was before."""
        INTERCEPTION.leave(self)
        self._record.observer.shielded(self._gradients.release)

    def call_begins(self, api: Api, args: Arguments, kwargs: Keywords) -> Calling | None:
        """Count a call; record its arguments if it is selected."""
        call = ApiCall(api.kind, api.name, self._numbers.next(f"{api.kind}_{api.name}"))
        if not self._record.observer.armed:
            return None
        return self._record.observer.shielded(self._begin, call, args, kwargs)

    def call_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Record what a selected call returned."""
        if isinstance(token, Calling):
            self._record.observer.shielded(self._record.end, token, result, raised)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Begin the call of a layer; of a cell that contains others remember its path."""
        if inside:
            return None
        path, _ = self._paths.get(id(cell), ("", None))
        if not self.hides(cell):
            return path
        # A layer's mark stands before its own tensors, that of a container behind all inside it.
        self._record.observer.shielded(self._mark, path)
        return self.call_begins(Api("NN", type(cell).__name__), args, kwargs)

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """End the call of a layer; mark one of a cell that contains others."""
        if isinstance(token, str):
            self._record.observer.shielded(self._mark, token)
        self.call_ends(token, result, raised=raised)

    def hides(self, cell: Any) -> bool:
        """Return whether a cell is a layer of the model, or a loss, which may stand beside it."""
        return is_loss(cell) or (id(cell) in self._paths and is_built_in(cell))

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take the begin of a recomputed region."""
        return self._regions.begin(id(cell), again=again)

    def compiled_begins(self, call: CompiledCall, args: Arguments, kwargs: Keywords) -> object:
        """Say once that compiled code is not looked into."""
        if self._record.observer.armed:
            self._record.observer.recorder.warn_once(COMPILED_APIS)
        return None

    def _refresh(self) -> None:
        # The cells are kept: their identities must not become another's.
        self._paths = {id(cell): (path, cell) for path, cell in cells_of(self._model)}

    def _begin(self, call: ApiCall, args: Arguments, kwargs: Keywords) -> Calling | None:
        calling = self._calling(call)
        if not self._record.options.scope(call):
            return None
        self._record.begin(calling, args, kwargs)
        return calling

    def _calling(self, call: ApiCall) -> Calling:
        gradient = ApiCall(call.kind, call.api, call.number, "backward")
        calling = Calling(call, gradient, recomputed=self._regions.recomputing)
        origin = self._regions.repeated(lambda known: known.call.op_type == call.op_type)
        if origin is not None:
            calling.gradient, calling.arrived = origin.gradient, origin.arrived
        self._regions.note(origin or calling)
        return calling

    def _mark(self, path: str) -> None:
        """Record that a cell was called; the model itself and cells beside it get no mark."""
        if not path or not self._record.observer.armed or self._regions.recomputing:
            return
        call, options = layer_call(path), self._record.options
        if (options.layers_once and path in self._marked) or not options.scope(call):
            return
        if options.layers_once:
            self._marked.add(path)
        self._record.mark(call, path)
