"""Hooks in Python on all that rankdump observes of a model, which only look at each tensor: what
torch and the interpreter take for any tool of this kind, before it measures or keeps anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankdump._frameworks.torch.apis.api_names import TorchApiCatalogue

from .training import Trainer


class TensorGlance:
    """Looks at tensors and, where they have one, at their gradients."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, torch.Size, torch.dtype]] = []

    def end_step(self, model: nn.Module) -> None:
        """Look at parameters and their gradients, and forget what was seen."""
        for parameter in model.parameters():
            self.look_at((parameter, parameter.grad))
        self._seen.clear()

    def look_at(self, values: Iterable[object]) -> None:
        """Look at the tensors among some values, and later at their gradients."""
        for value in values:
            if isinstance(value, Tensor):
                self._look(value)
                if value.requires_grad and not isinstance(value, nn.Parameter):
                    value.register_hook(self._look)

    def _look(self, tensor: Tensor) -> None:
        self._seen.append((tensor.data_ptr(), tensor.shape, tensor.dtype))


class FunctionGlance(TorchFunctionMode):
    """Looks at arguments and results of the calls that an API dump has."""

    def __init__(self, glance: TensorGlance) -> None:
        super().__init__()
        self._glance = glance
        self._catalogue = TorchApiCatalogue()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call."""
        if self._catalogue[func] is None:
            return func(*args, **(kwargs or {}))
        self._glance.look_at(args)
        result = func(*args, **(kwargs or {}))
        self._glance.look_at((result,))
        return result


def observe_modules(trainer: Trainer) -> Callable[[], None]:
    """Hook the modules of a model; return its step with them."""
    glance = TensorGlance()
    for module in trainer.model.modules():
        module.register_forward_pre_hook(
            lambda _, args, kwargs: glance.look_at((*args, *kwargs.values())), with_kwargs=True
        )
        module.register_forward_hook(
            lambda _, args, kwargs, result: glance.look_at((result,)),
            with_kwargs=True,
            always_call=True,
        )
    return lambda: _run_step(trainer, glance)


def observe_functions(trainer: Trainer) -> Callable[[], None]:
    """Return the step of a model under a mode that sees its calls of torch."""
    glance = TensorGlance()

    def step() -> None:
        with FunctionGlance(glance):
            _run_step(trainer, glance)

    return step


def _run_step(trainer: Trainer, glance: TensorGlance) -> None:
    trainer.step()
    glance.end_step(trainer.model)
