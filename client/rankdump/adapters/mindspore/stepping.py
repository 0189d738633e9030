"""Tells where iterations begin and end: calls of models, and their optimizers' steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankdump.adapters.api_calls import StepListener
from rankdump.adapters.mindspore.framework import (
    has_optimizers,
    is_training_step,
    records_gradients,
)
from rankdump.adapters.mindspore.interception import INTERCEPTION, Arguments, Keywords
from rankdump.adapters.mindspore.watching import Deaf

_LOOKS = 64
"""Calls of a model without an optimizer's step after which none is looked for any more."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.repeating = 0


class Outermost(Deaf):
    """Watches models until `remove`; calls of one inside another's do not count."""

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` is given the number of the model, before anything of its call is observed."""
        self._begins = begins
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._thread = _Thread()
        INTERCEPTION.listen(self, first=True)

    def watch(self, model: Any) -> None:
        """Watch a model too; it has the next number, from 0."""
        self._numbers.setdefault(id(model), (len(self._numbers), model))

    def remove(self) -> None:
        """Leave MindSpore as it was before."""
        INTERCEPTION.leave(self)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Tell of an outermost call; one that repeats a forward is none."""
        known = self._numbers.get(id(cell))
        thread = self._thread
        if known is None or thread.repeating:
            return None
        thread.depth += 1
        if thread.depth == 1:
            self._begins(known[0])
        return known

    def cell_ends(self, opened: object, result: object, *, raised: bool) -> None:
        """Count a call out."""
        if opened is not None:
            self._thread.depth -= 1

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take note that a forward is repeated on this thread."""
        if not again:
            return bool
        self._thread.repeating += 1
        return self._repeated

    def _repeated(self) -> None:
        self._thread.repeating -= 1


class StepWatch:
    """Tells a listener of the steps of one model, until it is removed."""

    def __init__(self, model: Any, listener: StepListener) -> None:
        self._model = model
        self._listener = listener
        self._calls = 0
        self._found = False
        self._outermost = Outermost(self._called)
        self._outermost.watch(model)
        self._ends = _Ends(self)
        INTERCEPTION.listen(self._ends)

    def optimized(self) -> bool:
        """Return whether there is an optimizer whose steps can be waited for."""
        if not self._found and self._calls < _LOOKS:
            self._found = has_optimizers()
        return self._found

    def remove(self) -> None:
        """Leave MindSpore as it was before."""
        self._outermost.remove()
        INTERCEPTION.leave(self._ends)

    def stepped(self, optimizer: Any) -> None:
        """Tell of the step of an optimizer that holds a parameter of the model."""
        own = {id(parameter) for parameter in self._model.get_parameters()}
        if any(id(parameter) in own for parameter in optimizer.parameters):
            self._found = True
            self._listener.stepped()

    def _called(self, number: int) -> None:
        self._calls += 1
        trains = records_gradients()
        manner = f"{'training' if self._model.training else 'evaluation'}, gradients {trains}"
        self._listener.called(manner, trains=trains)


class _Ends(Deaf):
    """Hears optimizers, and cells that run one or leave it out, as a loss scaler may."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def optimized(self, optimizer: Any) -> None:
        """Tell of an optimizer's step."""
        self._watch.stepped(optimizer)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Wait for the end of a whole training step."""
        return cell if is_training_step(cell) else None

    def cell_ends(self, opened: Any, result: object, *, raised: bool) -> None:
        """Tell of a whole training step."""
        if opened is not None:
            self._watch.stepped(opened.optimizer)
