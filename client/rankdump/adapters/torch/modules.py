"""Hooks on modules: every call becomes an event, its arguments and results observations.

A hook runs once before a call, so that an in-place operator's input has its value from before,
and once after it, also when the call raised. Each thread keeps its own stack of open calls.
"""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.gradients import Arrivals, Gradients
from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import (
    backward_step,
    compiled_call,
    set_compiled_call,
    traced,
)
from rankdump.adapters.torch.numbering import Numbering
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.pairing import Call, Step
from rankdump.adapters.torch.scopes import Operator, Tree
from rankdump.contract.key import Side
from rankdump.hook import Leaf, leaves_of_call, leaves_of_result


@dataclass(slots=True, eq=False)
class Frame:
    """A call that has begun."""

    operator: Operator
    call: Call | None
    """None inside a compiled region's boundary, which is the same call."""
    again: bool
    """It is a recomputation."""
    begun: tuple[int, int] = (0, 0)
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def name(self) -> str:
        """Full scope name."""
        if self.call is None:
            return ""
        scope, number = self.call.scope, self.call.number
        return scope.recomputation(number) if self.again else scope.forward(number)


class _Stack(threading.local):
    """The open calls of this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.generation = -1


class Calls:
    """Observes the module calls of one attached model."""

    def __init__(self, observer: Observer, numbering: Numbering, gradients: Gradients) -> None:
        self._observer = observer
        self._numbering = numbering
        self._gradients = gradients
        self._stack = _Stack()
        self._generation = 0

    def restart(self) -> None:
        """Forget the calls that are still open: an iteration begins."""
        self._generation += 1

    def enter(
        self, operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call and hand over its arguments."""
        if not self._observer.armed:
            return
        frames = self._frames()
        if frames and _inside_boundary(frames[-1].operator, operator):
            frames.append(Frame(operator, None, again=False))
            return
        leaves = leaves_of_call(args, kwargs)
        call, again = self._numbered(operator, leaves)
        frame = Frame(operator, call, again)
        frames.append(frame)
        try:
            self._observer.tensors(operator.scope.op_type, frame.name, Side.INPUT, leaves)
            self._gradients.watch(call, Side.INPUT, leaves, frame.arrivals, again=again)
        finally:
            frame.begun = self._observer.recorder.started()

    def leave(self, operator: Operator, result: object) -> None:
        """Close a call and hand over its results; those of a call that raised are None."""
        frame = self._closed(operator)
        if frame is None or frame.call is None:
            return
        leaves = leaves_of_result(result)
        self._observer.tensors(operator.scope.op_type, frame.name, Side.OUTPUT, leaves)
        again = frame.again
        self._gradients.watch(frame.call, Side.OUTPUT, leaves, frame.arrivals, again=again)

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.failed(error)

    def _frames(self) -> list[Frame]:
        stack = self._stack
        if stack.generation != self._generation:
            stack.frames.clear()
            stack.generation = self._generation
        return stack.frames

    def _closed(self, operator: Operator) -> Frame | None:
        """Take the operator's innermost call, and with it those inside that never returned."""
        frames = self._frames()
        at = len(frames) - 1
        while at >= 0 and frames[at].operator is not operator:
            at -= 1
        if at < 0:
            return None
        closing = frames[at:]
        del frames[at:]
        recorder, graph = self._observer.recorder, self._observer.graph
        for frame in reversed(closing):
            if frame.call is not None:
                recorder.finished(frame.begun, graph=graph, name=frame.name)
        return closing[0]

    def _numbered(self, operator: Operator, leaves: Sequence[Leaf]) -> tuple[Call, bool]:
        tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, Tensor))
        first = next(tensors, None)
        step = backward_step()
        if step is not None:
            repeated = self._numbering.recomputation(operator.scope, first, Step(*step))
            if repeated is not None:
                return repeated, True
        return self._numbering.forward(operator.scope, first), False


class Installation:
    """The hooks of one tree of modules, from now until `remove`."""

    def __init__(self, tree: Tree, calls: Calls) -> None:
        self.tree = tree
        self._handles: list[RemovableHandle] = []
        self._bounded: list[tuple[Module, _Boundary]] = []
        for operator in tree.operators:
            if operator.in_place:
                self._bound(operator, calls)
            else:
                self._hook(operator, calls)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        for module, boundary in self._bounded:
            if compiled_call(module) is boundary:
                set_compiled_call(module, boundary.inner)
        self._handles.clear()
        self._bounded.clear()

    def _hook(self, operator: Operator, calls: Calls) -> None:
        module = operator.module
        before = module.register_forward_pre_hook(_Before(operator, calls), with_kwargs=True)
        after = module.register_forward_hook(
            _After(operator, calls), with_kwargs=True, always_call=True
        )
        self._handles += (before, after)

    def _bound(self, operator: Operator, calls: Calls) -> None:
        inner = compiled_call(operator.module)
        if inner is not None:
            boundary = _Boundary(operator, calls, inner)
            set_compiled_call(operator.module, boundary)
            self._bounded.append((operator.module, boundary))


class _OfOperator:
    """What stands in a module for us; a copy of the module gets one that does nothing."""

    def __init__(self, operator: Operator, calls: Calls) -> None:
        self._operator = operator
        self._calls = calls

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return in_a_copy, ()


class _Before(_OfOperator):
    @uncompiled
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        if not traced():
            shielded(self._calls.enter, self._calls.failed, self._operator, args, kwargs)


class _After(_OfOperator):
    @uncompiled
    def __call__(self, module: Module, args: Any, kwargs: Any, result: Any) -> None:
        if not traced():
            shielded(self._calls.leave, self._calls.failed, self._operator, result)


class _Boundary(_OfOperator):
    """Stands before the compiled call of a module."""

    def __init__(self, operator: Operator, calls: Calls, inner: Callable[..., Any]) -> None:
        super().__init__(operator, calls)
        self.inner = inner

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traced():
            return self.inner(*args, **kwargs)
        calls, operator, result = self._calls, self._operator, None
        shielded(calls.enter, calls.failed, operator, args, kwargs)
        try:
            result = self.inner(*args, **kwargs)
        finally:
            shielded(calls.leave, calls.failed, operator, result)
        return result


def inert(*args: object) -> None:
    """Stand in a copied or pickled module where a hook stood in the original."""


def in_a_copy() -> Callable[..., None]:
    """Return what an unpickled module gets instead of a hook."""
    return inert


def _inside_boundary(outer: Operator, inner: Operator) -> bool:
    return outer.boundary and not inner.boundary and outer.scope == inner.scope
