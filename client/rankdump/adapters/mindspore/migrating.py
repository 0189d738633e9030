"""What the dump of a MindSpore model's calls needs beside its hook: `session.apis.ApiFramework`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rankdump.adapters.api_calls import ApiOptions, StepListener
from rankdump.adapters.mindspore.apis import ApiHook
from rankdump.adapters.mindspore.framework import (
    cells_of,
    has_optimizers,
    is_built_in,
    is_training_step,
    records_gradients,
)
from rankdump.adapters.mindspore.interception import INTERCEPTION
from rankdump.adapters.mindspore.listener import Arguments, Keywords, Listener
from rankdump.adapters.mindspore.outermost import Outermost
from rankdump.values import Recorder

logger = logging.getLogger("rankdump")

NAME = "mindspore"
_LOOKS = 64
"""Calls of a model without an optimizer's step after which none is looked for any more."""


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


class _Ends(Listener):
    """Hears optimizers, and cells that run one or leave it out, as a loss scaler may."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def optimized(self, optimizer: Any) -> None:
        """Tell of an optimizer's step."""
        self._watch.stepped(optimizer)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Wait for the end of a whole training step."""
        return cell if is_training_step(cell) else None

    def cell_ends(self, token: Any, result: object, *, raised: bool) -> None:
        """Tell of a whole training step."""
        if token is not None:
            self._watch.stepped(token.optimizer)


def api_hook(model: Any, recorder: Recorder, *, graph: int, options: ApiOptions) -> ApiHook:
    """Return what observes the calls of a model's program, and counts them from now on."""
    return ApiHook(model, recorder, graph, options)


def without_dropout(model: Any) -> int:
    """Let no dropout of the model drop anything; return how many there are."""
    found = [cell for _, cell in cells_of(model) if _drops(cell)]
    for cell in found:
        # Each class asks one or two of them.
        for name, nothing in (("p", 0.0), ("prob", 0.0), ("keep_prob", 1.0)):
            if hasattr(cell, name):
                setattr(cell, name, nothing)
    return len(found)


def save_state(model: Any, folder: Path) -> None:
    """Write nothing: only the state of torch's own kinds of model is compared."""
    logger.warning("rankdump: compare_statedict is for torch; of MindSpore no state is saved")


def watch_steps(model: Any, listener: StepListener) -> StepWatch:
    """Tell a listener of the model's calls and of its optimizers."""
    return StepWatch(model, listener)


def _drops(cell: Any) -> bool:
    return is_built_in(cell) and type(cell).__name__.startswith("Dropout")
