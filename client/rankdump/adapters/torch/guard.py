"""Keeps our failures out of the training, and the training's compiler and modes out of us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rankdump.adapters.torch.internals import leave_uncompiled, outside_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Keep the compiler from a hook that runs between two compiled regions.

    It would be compiled by itself, and a hook that is compiled observes nothing.
    """
    leave_uncompiled(function)
    return function


def shielded(body: Callable[..., None], failed: Callable[[Exception], None], *args: Any) -> None:
    """Run a hook's body; an error goes to `failed`, an interrupt passes through."""
    try:
        with outside_modes():
            body(*args)
    except Exception as error:
        failed(error)
