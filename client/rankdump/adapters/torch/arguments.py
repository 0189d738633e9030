"""Reads what a module was configured with from its public attributes.

Only plain values count, which print the same in every run; never tensors, modules or hooks.
"""

# torch's stubs leave what stands in a module untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_NOT_CONFIGURED = frozenset(("training", "call_super_init", "dump_patches"))
"""Attributes that every module has: a state, and what concerns the class."""
_ABSENT = object()
_MAX_CHARACTERS = 1024
_MAX_PARTS = 64


def arguments_of(module: Module) -> dict[str, str]:
    """Return the module's arguments as texts, sorted by name.

    `bias` of a module that keeps it as a parameter says whether there is one.
    """
    found = {
        name: str(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NOT_CONFIGURED and _plain(value)
    }
    bias = getattr(module, "bias", _ABSENT)
    if bias is None or isinstance(bias, Tensor):
        found.setdefault("bias", str(bias is not None))
    return dict(sorted(found.items()))


def _plain(value: object, depth: int = 2) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_CHARACTERS
    if isinstance(value, tuple):
        parts = cast("tuple[Any, ...]", value)
        return depth > 0 and len(parts) <= _MAX_PARTS and all(_plain(p, depth - 1) for p in parts)
    return isinstance(value, _PLAIN)
