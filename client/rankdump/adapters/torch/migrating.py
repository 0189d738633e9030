"""What the dump of a torch model's calls needs beside its hook: `session.apis.ApiFramework`."""

# torch's stubs leave the hooks of its classes untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import Module

from rankdump.adapters.api_calls import ApiOptions
from rankdump.adapters.torch.apis import ApiHook
from rankdump.adapters.torch.optimizing import Listener, StepWatch
from rankdump.values import Recorder

NAME = "torch"
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_STATE = "pt_net.pth"


def api_hook(model: Module, recorder: Recorder, *, graph: int, options: ApiOptions) -> ApiHook:
    """Return what observes the calls of a model's program, and counts them from now on."""
    return ApiHook(model, recorder, graph, options)


def without_dropout(model: Module) -> int:
    """Let no dropout of the model drop anything; return how many there are."""
    found = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    for module in found:
        module.p = 0.0
    return len(found)


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


def watch_steps(model: Module, listener: Listener) -> StepWatch:
    """Tell a listener of the model's calls and of its optimizers."""
    return StepWatch(model, listener)
