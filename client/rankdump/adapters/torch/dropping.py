"""Lets dropout drop nothing for the rest of the process: two runs are to be compared."""

# torch's stubs leave functions of `functional` untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.nn import Module, functional

_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_replaced: set[Callable[..., Any]] = set()


def without_dropout(model: Module) -> int:
    """Set the p of the model's dropouts to 0, and that of every functional one; count the model's.

    It is not undone: what follows is to be compared as well.
    """
    found = [module for module in model.modules() if isinstance(module, _MODULES)]
    for module in found:
        module.p = 0.0
    for name in _FUNCTIONS:
        before = getattr(functional, name)
        if before not in _replaced:
            setattr(functional, name, _harmless(before))
    return len(found)


def _harmless(before: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(before)
    def harmless(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        return before(input, 0.0, *args, **kwargs)

    _replaced.add(harmless)
    return harmless
