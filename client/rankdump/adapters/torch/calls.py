"""Follows the calls of a model's operators: each one an event, its tensors observations.

Each thread keeps its own stack of open calls. Of the calls that an error passes through, only
the innermost one is said to have raised.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rankdump.adapters.torch.arguments import arguments_of
from rankdump.adapters.torch.describing import Describer, Sketch
from rankdump.adapters.torch.gradients import Gradients
from rankdump.adapters.torch.guard import shielded
from rankdump.adapters.torch.internals import backward_step
from rankdump.adapters.torch.marks import Marking
from rankdump.adapters.torch.numbering import Numbering
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.pairing import Call, Step
from rankdump.adapters.torch.raising import (
    Fault,
    comes_from,
    fault_of,
    handled_now,
    raised_since,
)
from rankdump.adapters.torch.scopes import Operator
from rankdump.contract.key import Side
from rankdump.hook import Leaf, leaves_of_call, leaves_of_result
from rankdump.values import Begun


@dataclass(slots=True, eq=False)
class Frame:
    """A call that has begun."""

    operator: Operator
    call: Call | None
    """None inside a compiled region's boundary, which is the same call."""
    again: bool
    """It is a recomputation."""
    handled: int
    """The error that the script was handling already."""
    begun: Begun | None = None
    fault: Fault | None = None
    """An error that came out of a call inside this one."""
    sketch: Sketch | None = None

    @property
    def name(self) -> str:
        """Full scope name."""
        if self.call is None:
            return ""
        names = self.call.names
        return names.recomputation if self.again else names.forward


class _Stack(threading.local):
    """The open calls of this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.generation = -1


class Calls:
    """Observes the module calls of one attached model."""

    def __init__(
        self,
        observer: Observer,
        numbering: Numbering,
        gradients: Gradients,
        describer: Describer,
        marking: Marking,
    ) -> None:
        self._observer = observer
        self._numbering = numbering
        self._gradients = gradients
        self._describer = describer
        self._marking = marking
        self._stack = _Stack()
        self._generation = 0

    def restart(self) -> None:
        """Forget the calls that are still open: an iteration begins, or nothing is seen any more.

        Those of another thread are over when that thread makes its next call.
        """
        self._generation += 1
        self._frames()

    def enter(
        self, operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call and hand over its arguments."""
        if not self._observer.armed:
            return
        self._marking.refresh()
        frames = self._frames()
        if frames and _inside_boundary(frames[-1].operator, operator):
            frames.append(Frame(operator, None, again=False, handled=handled_now()))
            return
        leaves = leaves_of_call(args, kwargs)
        call, again = self._numbered(operator, leaves)
        frame = Frame(operator, call, again, handled_now())
        frames.append(frame)
        graph = self._observer.graph
        try:
            if not again:
                self._observer.recorder.entered(graph, frame.name)
            self._read(frame, call, leaves)
        finally:
            frame.begun = self._observer.recorder.started(graph=graph, name=frame.name)

    def leave(self, operator: Operator, result: object) -> None:
        """Close a call and hand over its results; those of a call that raised are None."""
        closing = self._closed(operator)
        if not closing:
            return
        for frame in reversed(closing[1:]):
            self._settle(frame, [], raised=False)
        frame = closing[0]
        raised = self._raised(frame)
        leaves: list[Leaf] = []
        try:
            leaves = leaves_of_result(result)
            self._written(frame, leaves)
        finally:
            self._settle(frame, leaves, raised=raised)

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.failed(error)

    def _frames(self) -> list[Frame]:
        stack = self._stack
        if stack.generation != self._generation:
            self._finish(stack.frames)
            stack.frames.clear()
            stack.generation = self._generation
        return stack.frames

    def _read(self, frame: Frame, call: Call, leaves: Sequence[Leaf]) -> None:
        recorder, op_type = self._observer.recorder, call.scope.op_type
        if self._describer.active:
            shielded(self._sketch, self.failed, frame, call, leaves)
        if recorder.wants_arguments and not frame.again:
            values = arguments_of(frame.operator.module)
            recorder.arguments(self._observer.graph, op_type, frame.name, values)
        self._observer.tensors(op_type, frame.name, Side.INPUT, leaves)
        self._gradients.watch(call, Side.INPUT, leaves, again=frame.again)

    def _written(self, frame: Frame, leaves: Sequence[Leaf]) -> None:
        if frame.call is not None:
            op_type = frame.call.scope.op_type
            self._observer.tensors(op_type, frame.name, Side.OUTPUT, leaves)
            self._gradients.watch(frame.call, Side.OUTPUT, leaves, again=frame.again)

    def _sketch(self, frame: Frame, call: Call, leaves: Sequence[Leaf]) -> None:
        frame.sketch = self._describer.begun(call, frame.operator.module, leaves)

    def _settle(self, frame: Frame, leaves: Sequence[Leaf], *, raised: bool) -> None:
        """Say that a call is over."""
        call, sketch = frame.call, frame.sketch
        if call is None:
            return
        if sketch is not None:
            module = frame.operator.module
            ended = self._describer.ended
            shielded(ended, self.failed, call, frame.name, module, sketch, leaves)
        self._observer.settled(frame.name, raised=raised)

    def _raised(self, frame: Frame) -> bool:
        """Return whether a call raised an error of its own; tell the call around it."""
        error = raised_since(frame.handled)
        if error is None:
            return False
        own = frame.call is not None and not comes_from(error, frame.fault)
        frames = self._frames()
        if frames:
            frames[-1].fault = frame.fault if frame.call is None else fault_of(error)
        return own

    def _closed(self, operator: Operator) -> list[Frame]:
        """Take the operator's innermost call, and with it those inside that never returned."""
        frames = self._frames()
        at = len(frames) - 1
        while at >= 0 and frames[at].operator is not operator:
            at -= 1
        if at < 0:
            return []
        closing = frames[at:]
        del frames[at:]
        self._finish(closing)
        return closing

    def _finish(self, frames: Sequence[Frame]) -> None:
        for frame in reversed(frames):
            if frame.begun is not None:
                self._observer.recorder.finished(frame.begun)

    def _numbered(self, operator: Operator, leaves: Sequence[Leaf]) -> tuple[Call, bool]:
        tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, Tensor))
        first = next(tensors, None)
        step = backward_step()
        if step is not None:
            repeated = self._numbering.recomputation(operator.scope, first, Step(*step))
            if repeated is not None:
                return repeated, True
        return self._numbering.forward(operator.scope, first), False


def _inside_boundary(outer: Operator, inner: Operator) -> bool:
    return outer.boundary and not inner.boundary and outer.scope == inner.scope
