"""What the dump of a MindSpore model's calls needs beside its hook: `session.apis.ApiFramework`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rankdump.adapters.api_calls import ApiOptions, StepListener
from rankdump.adapters.mindspore.apis import ApiHook
from rankdump.adapters.mindspore.framework import cells_of, is_built_in
from rankdump.adapters.mindspore.stepping import StepWatch
from rankdump.values import Recorder

logger = logging.getLogger("rankdump")

NAME = "mindspore"


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
