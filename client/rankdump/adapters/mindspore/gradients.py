"""Gradients of what calls read and returned, through hooks on the tensors themselves.

`Tensor.register_hook` brings every gradient inside `value_and_grad`, of results of functions,
methods and cells alike (seen with MindSpore 2.7.0): the cells' own backward hooks are not needed.
A hook hands back the gradient it was given: the numbers of the job stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rankdump.adapters.mindspore.framework import Parameter, records_gradients, register_hook
from rankdump.adapters.mindspore.interception import INTERCEPTION


class Gradients:
    """The hooks on the tensors of one model."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def wait(self, tensor: Any, take: Callable[[Any], None]) -> None:
        """Have `take`, which must not raise, given the gradient of a tensor when it arrives.

        Those of parameters arrive for the whole step: they are nobody's result.
        """
        if isinstance(tensor, Parameter) or not records_gradients():
            return
        # One that no gradient comes to refuses; there is nothing to ask it beforehand.
        with suppress(RuntimeError):
            self._handles.append(register_hook(tensor, _hook(take)))

    def release(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


def hook_parameter(parameter: Any, take: Callable[[Any], None]) -> Any:
    """Have `take` given a parameter's gradients; return what ends that."""
    return register_hook(parameter, _hook(take))


def _hook(take: Callable[[Any], None]) -> Callable[[Any], Any]:
    # MindSpore takes a function and nothing else that can be called.
    def arrived(gradient: Any) -> Any:
        with INTERCEPTION.silence():
            take(gradient)
        return gradient

    return arrived
