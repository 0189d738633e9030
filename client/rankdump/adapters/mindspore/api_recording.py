"""Hands the calls of APIs to the recorder: their tensors, numbers, stacks and gradients."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankdump.adapters.api_calls import (
    MARK_PLACE,
    ApiLeaf,
    ApiOptions,
    argument_of,
    layer_name,
    layer_value,
    leaves_of_input,
    leaves_of_output,
    scalar_of,
)
from rankdump.adapters.api_stacks import Stacks
from rankdump.adapters.arrays import ArraySource
from rankdump.adapters.mindspore.framework import FOLDER
from rankdump.adapters.mindspore.gradients import Gradients
from rankdump.adapters.mindspore.observing import Observer, reader_of
from rankdump.adapters.mindspore.tensors import is_data, is_tensor
from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import ApiCall
from rankdump.values import Begun, TensorSource


@dataclass(slots=True, eq=False)
class Calling:
    """A call that has begun."""

    call: ApiCall
    gradient: ApiCall
    """Its backward, or that of the forward call it repeats."""
    arrived: set[str] = field(default_factory=set[str])
    """Places whose gradients have come; shared with the call it repeats."""
    recomputed: bool = False
    begun: Begun | None = None


class ApiRecording:
    """Records selected calls with one recorder, as the options say."""

    def __init__(self, observer: Observer, options: ApiOptions, gradients: Gradients) -> None:
        self.observer = observer
        self.options = options
        self._gradients = gradients
        self._stacks = Stacks(f"{FOLDER}{os.sep}", users_only=options.filter_stack)

    def begin(self, calling: Calling, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Record the begin of a call, and its arguments as they are now."""
        observer, name = self.observer, calling.call.name
        if not calling.recomputed:
            observer.recorder.entered(observer.graph, name)
        self._called(name)
        calling.begun = observer.begins(name)
        self._leaves(calling, Side.INPUT, leaves_of_input(args, kwargs))

    def end(self, calling: Calling, result: object, raised: bool) -> None:
        """Record what a call returned, and wait for its gradients."""
        try:
            if not raised:
                leaves = leaves_of_output(result)
                self._leaves(calling, Side.OUTPUT, leaves)
                self._wait(calling, leaves)
        finally:
            if calling.begun is not None:
                self.observer.recorder.finished(calling.begun)
            self.observer.settled(calling.call.name, raised=raised)

    def mark(self, call: ApiCall, path: str) -> None:
        """Record that a cell was called, by its path with dots."""
        self.observer.event(call.name)
        self._called(layer_name(path))
        self._lone(call, 0, MARK_PLACE.argument, _mark)

    def _arrived(self, calling: Calling, slot: int, argument: str, gradient: Any) -> None:
        """Record a gradient; those of a recomputed call once, as its forward's."""
        if not self.observer.armed or argument in calling.arrived:
            return
        calling.arrived.add(argument)
        self.observer.event(calling.gradient.name)
        self._lone(calling.gradient, slot, argument, reader_of(gradient))

    def _lone(
        self, call: ApiCall, slot: int, argument: str, read: Callable[[], TensorSource | str]
    ) -> None:
        """Record the one tensor of a mark, or of a backward."""
        if self.observer.wants(call.name, Side.INPUT):
            self.observer.tensor(call.op_type, call.name, Side.INPUT, slot, argument, read)
        self.observer.settled(call.name)

    def _leaves(self, calling: Calling, side: Side, leaves: Sequence[ApiLeaf]) -> None:
        """Hand over the tensors and numbers of one side that the options let pass."""
        call = calling.call
        if not self.observer.wants(call.name, side):
            return
        for leaf in leaves:
            if not self._passes(leaf.value):
                continue
            scalar = scalar_of(leaf.value)
            argument = argument_of(side, leaf.path, leaf.word, scalar, calling.recomputed)
            read = _number_reader(leaf.value) if scalar else reader_of(leaf.value)
            self.observer.tensor(call.op_type, call.name, side, leaf.slot, argument, read)

    def _passes(self, value: object) -> bool:
        if is_tensor(value):
            return not self.options.filter_data or is_data(value)
        return not self.options.filter_data and bool(scalar_of(value))

    def _wait(self, calling: Calling, leaves: Sequence[ApiLeaf]) -> None:
        if not self.options.retain_backward:
            return
        for leaf in leaves:
            if is_tensor(leaf.value) and self._passes(leaf.value):
                self._gradients.wait(leaf.value, self._arrival(calling, leaf))

    def _arrival(self, calling: Calling, leaf: ApiLeaf) -> Callable[[Any], None]:
        """Return what takes a gradient; it holds no tensor of the forward."""
        slot, argument = leaf.slot, argument_of(Side.INPUT, leaf.path, leaf.word)

        def take(gradient: Any) -> None:
            self.observer.shielded(self._arrived, calling, slot, argument, gradient)

        return take

    def _called(self, name: str) -> None:
        stack = self._stacks.above(inspect.currentframe())
        self.observer.recorder.called(self.observer.graph, name, stack)


def _number_reader(value: Any) -> Callable[[], TensorSource]:
    return lambda: ArraySource(value)


def _mark() -> TensorSource:
    return ArraySource(layer_value())
