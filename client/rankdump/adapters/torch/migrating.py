"""What the dump of a torch model's calls needs beside its hook: `session.apis.ApiFramework`."""

# torch's stubs leave the hooks of its classes untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.nn import Module

from rankdump.adapters.api_calls import ApiOptions, StepListener
from rankdump.adapters.torch.apis import ApiHook
from rankdump.adapters.torch.dropping import without_dropout
from rankdump.adapters.torch.optimizing import StepWatch
from rankdump.values import Recorder

__all__ = ["NAME", "api_hook", "save_state", "watch_steps", "without_dropout"]

NAME = "torch"
_STATE = "pt_net.pth"


def api_hook(model: Module, recorder: Recorder, *, graph: int, options: ApiOptions) -> ApiHook:
    """Return what observes the calls of a model's program, and counts them from now on."""
    return ApiHook(model, recorder, graph, options)


def save_state(model: Module, folder: Path) -> None:
    """Write `pt_net.pth`, the model's `state_dict`, in the place of an earlier one."""
    path = folder / _STATE
    hidden = folder / f".{_STATE}.{os.getpid()}"
    try:
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
            torch.save(model.state_dict(), file)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def watch_steps(model: Module, listener: StepListener) -> StepWatch:
    """Tell a listener of the model's calls and of its optimizers."""
    return StepWatch(model, listener)
