"""Gradients of what calls read and returned, through hooks on the tensors themselves.

`Tensor.register_hook` brings every gradient inside `value_and_grad`, of results of functions,
methods and cells alike (seen with MindSpore 2.7.0): the cells' own backward hooks are not needed.
A hook hands back the gradient it was given: the numbers of the job stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rankdump.adapters.mindspore.framework import Parameter, records_gradients
from rankdump.adapters.mindspore.gradient_hooks import HOOKS, Hook
from rankdump.adapters.mindspore.interception import INTERCEPTION


class Gradients:
    """The hooks on the tensors of one model."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def wait(self, tensor: Any, take: Callable[[Any], None]) -> None:
        """Have `take`, which must not raise, given the gradient of a tensor when it arrives.

        Those of parameters arrive for the whole step: they are nobody's result.
        """
        if isinstance(tensor, Parameter) or not records_gradients():
            return
        # One that no gradient comes to refuses; there is nothing to ask it beforehand.
        with suppress(RuntimeError):
            self._hooks.append(hook_tensor(tensor, take))

    def release(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            HOOKS.remove(hook)


def hook_tensor(tensor: Any, take: Callable[[Any], None]) -> Hook:
    """Have `take` given the gradients of a tensor until the hook is removed."""

    # MindSpore takes a function and nothing else that can be called.
    def arrived(gradient: Any) -> Any:
        with INTERCEPTION.silence():
            take(gradient)
        return gradient

    HOOKS.add(tensor, arrived)
    return arrived
