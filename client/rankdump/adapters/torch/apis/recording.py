"""Tells the recorder of one call: where it came from, when it ran, what it read and wrote."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch

from rankdump.adapters.api_calls import (
    MARK_PLACE,
    ApiLeaf,
    ApiOptions,
    layer_call,
    layer_name,
    layer_value,
    leaves_of_input,
    leaves_of_output,
)
from rankdump.adapters.torch.apis.gradients import ApiGradients
from rankdump.adapters.torch.apis.repeats import Repeat, Repeats
from rankdump.adapters.torch.apis.sites import Sites
from rankdump.adapters.torch.apis.tensors import Tensors
from rankdump.adapters.torch.observing import Observer
from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import ApiCall
from rankdump.hook import Leaf
from rankdump.values import Begun

_MARK = Leaf(0, MARK_PLACE.argument, torch.from_numpy(layer_value()))


@dataclass(slots=True, eq=False)
class Calling:
    """A call that is observed, from its begin to its end."""

    call: ApiCall
    name: str
    """The call's own."""
    begun: Begun | None = None
    """None for as long as its inputs are read."""
    repeat: Repeat | None = None


class Records:
    """The calls of one attached model, as its recorder hears of them."""

    def __init__(self, observer: Observer, options: ApiOptions, sites: Sites) -> None:
        self._observer = observer
        self._options = options
        self._sites = sites
        self._tensors = Tensors(observer, filtered=options.filter_data)
        self._gradients = ApiGradients(observer)
        self._repeats = Repeats()
        self._marked: set[str] = set()
        self._lock = threading.Lock()

    def follow(self, options: ApiOptions) -> None:
        """Hand over as these options say from now on."""
        self._options = options
        self._tensors = Tensors(self._observer, filtered=options.filter_data)

    def restart(self) -> None:
        """Forget which calls may be repeated: an iteration begins."""
        self._repeats.restart()

    def release(self) -> None:
        """Leave tensors that may outlive the iteration."""
        self._gradients.release()

    def begin(
        self,
        calling: Calling,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        frame: FrameType | None,
    ) -> None:
        """Hand over what a call is given, before it may change any of it."""
        call, observer = calling.call, self._observer
        if not self._options.scope(call):
            return
        name, graph = calling.name, observer.graph
        try:
            observer.recorder.entered(graph, name)
            observer.recorder.called(graph, name, self._sites.stack(frame))
            leaves = leaves_of_input(args, kwargs)
            calling.repeat = self._repeats.of(call, leaves)
            self._hand_over(calling, Side.INPUT, leaves)
        finally:
            calling.begun = observer.recorder.started(graph=graph, name=name)

    def end(self, calling: Calling, result: object, *, raised: bool = False) -> None:
        """Hand over what a call returned; nothing of one that was not selected."""
        call, repeat, recorder = calling.call, calling.repeat, self._observer.recorder
        if calling.begun is None:
            return
        recorder.finished(calling.begun)
        try:
            written = self._hand_over(calling, Side.OUTPUT, leaves_of_output(result))
            if self._options.retain_backward and (repeat is None or repeat.has_gradients):
                original = None if repeat is None else repeat.original
                self._gradients.watch(original or call, written)
        finally:
            # A repetition is ended by an error once it has given all that is needed.
            recorder.settled(self._observer.graph, calling.name, raised=raised and repeat is None)

    def mark(self, layer: str, frame: FrameType | None) -> None:
        """Hand over the mark of a module, by its path with dots."""
        call, observer = layer_call(layer), self._observer
        once = self._options.layers_once
        if once and layer in self._marked:
            return
        if not self._options.scope(call) or (once and not self._first(layer)):
            return
        observer.recorder.entered(observer.graph, call.name)
        observer.recorder.called(observer.graph, layer_name(layer), self._sites.stack(frame))
        observer.event(call.name)
        observer.tensors(call.op_type, call.name, Side.INPUT, (_MARK,))
        observer.settled(call.name)

    def _first(self, layer: str) -> bool:
        """Return whether a mark, of those that are handed over once, was not handed over before."""
        with self._lock:
            known = layer in self._marked
            self._marked.add(layer)
        return not known

    def _hand_over(self, calling: Calling, side: Side, leaves: Sequence[ApiLeaf]) -> list[Leaf]:
        op_type, recomputed = calling.call.op_type, calling.repeat is not None
        return self._tensors.hand_over(op_type, calling.name, side, leaves, recomputed=recomputed)
