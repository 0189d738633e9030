"""Parameters after the step, and their gradients.

A gradient is taken as the backward brings it. Of a backward that was compiled nothing is brought:
its gradients are taken as it returned them, or as an optimizer outside of it was given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rankdump.adapters.mindspore.gradient_hooks import HOOKS, Hook
from rankdump.adapters.mindspore.gradients import hook_tensor
from rankdump.adapters.mindspore.observing import Observer, reader_of
from rankdump.adapters.mindspore.tensors import is_tensor
from rankdump.contract.key import Side
from rankdump.hook import PARAMETER, gradient_name


class Parameters:
    """The parameters of one attached model, by the names MindSpore gives them."""

    def __init__(self, model: Any, observer: Observer) -> None:
        self._model = model
        self._observer = observer
        self._hooks: list[Hook] = []
        self._names: dict[int, str] = {}
        self._recorded: set[str] = set()

    def restart(self) -> None:
        """Forget which gradients were handed over: an iteration begins."""
        self._recorded.clear()

    def start(self) -> None:
        """Wait for gradients from now on."""
        self.stop()
        for parameter in self._model.trainable_params():
            name = self._names[id(parameter)] = gradient_name(parameter.name)
            self._hooks.append(hook_tensor(parameter, self._arrival(name)))

    def stop(self) -> None:
        """Wait for gradients no more."""
        hooks, self._hooks = self._hooks, []
        self._names = {}
        for hook in hooks:
            HOOKS.remove(hook)

    def returned(self, gradients: Iterable[tuple[Any, Any]]) -> None:
        """Take pairs of a parameter and its gradient, except what the iteration has already."""
        for parameter, gradient in gradients:
            name = self._names.get(id(parameter))
            if name is not None and name not in self._recorded and is_tensor(gradient):
                self._arrived(name, gradient)

    def finish(self) -> None:
        """Hand over all parameters as they stand."""
        for parameter in self._model.get_parameters():
            self._lone(parameter.name, "parameter", parameter, state=True)

    def _arrival(self, name: str) -> Callable[[Any], None]:
        def take(gradient: Any) -> None:
            self._observer.shielded(self._arrived, name, gradient)

        return take

    def _arrived(self, name: str, gradient: Any) -> None:
        if self._observer.armed:
            self._recorded.add(name)
            self._lone(name, "grad", gradient, state=False)

    def _lone(self, name: str, argument: str, tensor: Any, *, state: bool) -> None:
        if self._observer.wants(name, Side.OUTPUT):
            read = reader_of(tensor)
            self._observer.tensor(PARAMETER, name, Side.OUTPUT, 0, argument, read, state=state)
            self._observer.settled(name)
