"""Which framework a model is of; its adapter is imported only when one of its models is there."""

from __future__ import annotations

from typing import Any

from rankdump.values import IterationHook, Recorder

_KNOWN = "torch.nn.Module"


def hook_of(model: Any, recorder: Recorder, *, graph: int) -> IterationHook | None:
    """Return what observes a model; None, which is said once, for one of no known framework."""
    if not _is_torch_module(model):
        recorder.warn_once(f"cannot attach to {_kind_of(model)}; known: {_KNOWN}")
        return None
    from rankdump.adapters import torch as adapter

    return adapter.attach(model, recorder, graph=graph)


def mark(target: object, enabled: object) -> None:
    """Mark a model and what is inside it for `dump_mode` 2, or take the mark away.

    ValueError when target is of no known framework, or enabled no bool.
    """
    if not _is_torch_module(target):
        allowed = f"is not allowed; a {_KNOWN} is"
        raise ValueError(f"set_dump: target of type {_kind_of(target)} {allowed}")
    from rankdump.adapters import torch as adapter

    adapter.set_dump(target, enabled)


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_torch_module(value: object) -> bool:
    # By name, so that a job without torch need not import it.
    return any(base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__)
