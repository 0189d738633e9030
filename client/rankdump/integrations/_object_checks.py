"""Checks of the objects that a script hands to `attach`, and notifications by their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from rankdump._frameworks.model_observer import format_type
from rankdump._session.framework_adapters import MODEL_TYPES, is_mindspore_cell, is_torch_module


def check_models(caller: str, models: Sequence[Any]) -> None:
    """Raise TypeError if there is no model, or one of a framework that cannot be observed."""
    if not models:
        raise TypeError(f"{caller}: no model is given; allowed: {MODEL_TYPES}")
    for model in models:
        if not (is_torch_module(model) or is_mindspore_cell(model)):
            raise TypeError(
                f"{caller}: a model of type {format_type(model)} is not allowed; "
                f"allowed: {MODEL_TYPES}"
            )


def check_owner(caller: str, owner: Any, members: Sequence[str], allowed: str) -> None:
    """Raise TypeError if an object lacks a member of the framework's class; `allowed` is named."""
    missing = [name for name in members if not hasattr(owner, name)]
    if missing:
        raise TypeError(
            f"{caller}: an object of type {format_type(owner)}, without `{missing[0]}`, is not "
            f"allowed; allowed: {allowed}"
        )


def notify_around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Let a method of one object call `before` ahead of its work, and `after` when it has done that
    without an error.
    """
    method = getattr(owner, name)

    @wraps(method)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, notifying)
