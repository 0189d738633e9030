"""Which framework a model is of; its adapter is imported only when one of its models is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rankdump.adapters.arrays import ArraySource
from rankdump.values import IterationHook, Recorder, TensorSource

_KNOWN = "torch.nn.Module, mindspore.nn.Cell"


def hook_of(model: Any, recorder: Recorder, *, graph: int) -> IterationHook | None:
    """Return what observes a model; None, which is said once, for one of no known framework."""
    if is_mindspore_cell(model):
        from rankdump.adapters import mindspore

        return mindspore.CellHook(model, recorder, graph=graph)
    if not is_torch_module(model):
        recorder.warn_once(f"cannot attach to {_kind_of(model)}; known: {_KNOWN}")
        return None
    from rankdump.adapters import torch as adapter

    return adapter.attach(model, recorder, graph=graph)


def name_of(model: Any) -> str:
    """Return what a model is called where nobody says it: its class, wrappers left out."""
    if not is_torch_module(model):
        return type(model).__name__
    from rankdump.adapters import torch as adapter

    return adapter.class_name(model)


class MakesHook(Protocol):
    """Makes what observes a model."""

    def __call__(self, recorder: Recorder, *, graph: int) -> IterationHook | None:
        """Return the hook; None when there is nothing to observe, which was said."""
        ...


class Outermost(Protocol):
    """Tells of the calls of models that are not inside another call."""

    def watch(self, model: Any) -> None:
        """Watch a model too."""
        ...

    def remove(self) -> None:
        """Leave the models as they were."""
        ...


def outermost_of(model: Any, begins: Callable[[int], None]) -> Outermost | None:
    """Return what watches calls of models like this one; `begins` gets the number of the model.

    None for a model of no known framework.
    """
    if is_mindspore_cell(model):
        from rankdump.adapters import mindspore

        return mindspore.Outermost(begins)
    if not is_torch_module(model):
        return None
    from rankdump.adapters import torch as adapter

    return adapter.Outermost(begins)


def mark(target: object, enabled: object) -> None:
    """Mark a model and what is inside it for `dump_mode` 2, or take the mark away.

    ValueError when target is of no known framework, or enabled no bool.
    """
    if is_mindspore_cell(target):
        from rankdump.adapters import mindspore

        mindspore.set_dump(target, enabled)
        return
    if not is_torch_module(target):
        allowed = "is not allowed; a mindspore.nn.Cell or torch.nn.Module is"
        raise ValueError(f"set_dump: target of type {_kind_of(target)} {allowed}")
    from rankdump.adapters import torch as adapter

    adapter.set_dump(target, enabled)


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def source_of(array: Any) -> TensorSource | str:
    """Return what reads an array, or the reason why nothing can.

    A tensor of torch is read as its adapter does: numpy has no bfloat16, and sees no gradients.
    """
    if any(
        kind.__name__ == "Tensor" and kind.__module__ == "torch" for kind in type(array).__mro__
    ):
        from rankdump.adapters.torch import source_of as source_of_tensor

        return source_of_tensor(array)
    return ArraySource(array)


def is_torch_module(value: object) -> bool:
    """Return whether a value is a module of torch; it need not be installed."""
    return _inherits(value, "torch.nn.modules.module")


def is_mindspore_cell(value: object) -> bool:
    """Return whether a value is a cell of MindSpore; it need not be installed."""
    return _inherits(value, "mindspore.nn.cell")


def _inherits(value: object, module: str) -> bool:
    # By name, so that a job without a framework need not import it.
    return any(base.__module__ == module for base in type(value).__mro__)
