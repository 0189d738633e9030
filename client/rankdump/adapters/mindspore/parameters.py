"""Parameters after the step, and their gradients as the backward brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankdump.adapters.mindspore.gradients import hook_parameter
from rankdump.adapters.mindspore.observing import Observer, reader_of
from rankdump.contract.key import Side
from rankdump.hook import PARAMETER, gradient_name


class Parameters:
    """The parameters of one attached model, by the names MindSpore gives them."""

    def __init__(self, model: Any, observer: Observer) -> None:
        self._model = model
        self._observer = observer
        self._handles: list[Any] = []

    def start(self) -> None:
        """Wait for gradients from now on."""
        self.stop()
        for parameter in self._model.trainable_params():
            take = self._arrival(gradient_name(parameter.name))
            self._handles.append(hook_parameter(parameter, take))

    def stop(self) -> None:
        """Wait for gradients no more."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

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
            self._lone(name, "grad", gradient, state=False)

    def _lone(self, name: str, argument: str, tensor: Any, *, state: bool) -> None:
        if self._observer.wants(name, Side.OUTPUT):
            read = reader_of(tensor)
            self._observer.tensor(PARAMETER, name, Side.OUTPUT, 0, argument, read, state=state)
            self._observer.settled(name)
