"""Every hook of ours on a tensor of this process, and how to take hooks off while code is compiled.

A compiler of MindSpore reads the hooks of parameters, and of tensors that a call is given, as part
of the program: it would compile them, and fail. `Parameter.register_hook` also makes MindSpore
compile everything anew, so hooks are put on here without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from rankdump.adapters.mindspore.framework import Parameter, add_hook, hooks_of, remove_hook

Hook: TypeAlias = "Callable[[Any], Any]"
"""A function that is given a gradient and returns it."""
RemovedHooks: TypeAlias = "list[tuple[Any, Hook]]"
"""Tensors, each with a hook that was taken off."""


class GradientHooks:
    """The hooks of all models of this process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hook, int | None] = {}
        # Parameters outlive every call; of other tensors none is kept alive.
        self._parameters: dict[Hook, Any] = {}

    def add(self, tensor: Any, hook: Hook) -> None:
        """Have a function of its own called with a tensor's gradient.

        RuntimeError for a tensor that no gradient comes to.
        """
        with self._lock:
            self._numbers[hook] = add_hook(tensor, hook)
            if isinstance(tensor, Parameter):
                self._parameters[hook] = tensor

    def remove(self, hook: Hook) -> None:
        """Take a hook off for good."""
        with self._lock:
            number = self._numbers.pop(hook, None)
            self._parameters.pop(hook, None)
            if number is not None:
                remove_hook(number)

    def take_off(self, tensors: Iterable[Any]) -> RemovedHooks:
        """Take the hooks off all parameters and off these tensors, until `put_back`."""
        with self._lock:
            found = [(parameter, hook) for hook, parameter in self._parameters.items()]
            found += [(each, hook) for each in tensors for hook in hooks_of(each)]
            return [(tensor, hook) for tensor, hook in found if self._taken_off(hook)]

    def put_back(self, taken: RemovedHooks) -> None:
        """Put hooks back, except those that were removed meanwhile."""
        with self._lock:
            for tensor, hook in taken:
                if hook in self._numbers:
                    self._numbers[hook] = add_hook(tensor, hook)

    def _taken_off(self, hook: Hook) -> bool:
        """Take a hook off; return False for one of the job's own, and for one that is off."""
        number = self._numbers.get(hook)
        if number is None:
            return False
        self._numbers[hook] = None
        remove_hook(number)
        return True


HOOKS = GradientHooks()
"""Those of this process."""
