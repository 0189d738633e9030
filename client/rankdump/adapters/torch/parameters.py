"""Parameters and buffers after the step, and the gradients the optimizer is about to use.

A gradient is read where an optimizer's step begins: after accumulation, reduction, unscaling
and clipping. Without an optimizer of torch it is read at the end of the iteration. A buffer that
is not part of the model's state is a constant: it is handed over once.
"""

# torch's stubs leave an optimizer's groups untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import structure_of, traced
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.scopes import (
    BufferPlace,
    buffer_places,
    named_buffers,
    named_parameters,
)
from rankdump.contract.key import Side
from rankdump.hook import gradient_name


class Parameters:
    """The parameters and buffers of one attached model."""

    def __init__(self, model: Module, observer: Observer) -> None:
        self._model = model
        self._observer = observer
        self._named: list[tuple[str, str, Parameter]] = []
        self._gradients: dict[int, str] = {}
        self._buffers: list[BufferPlace] = []
        self._structure: list[object] | None = None
        self._recorded: set[str] = set()
        self._constants: set[str] = set()
        self._handle: RemovableHandle | None = None

    def restart(self) -> None:
        """Forget which gradients were handed over: an iteration begins."""
        self._recorded.clear()

    def start(self, structure: list[object] | None) -> None:
        """Observe optimizers from now on; `structure` is what the model is made of."""
        self._refresh(structure)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def stop(self) -> None:
        """Observe no optimizer any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        # Nothing of the model is kept alive when nobody looks.
        self._named, self._buffers = [], []
        self._gradients = {}
        self._structure = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Return parameters, then buffers, each once under its dotted name."""
        yield from named_parameters(self._model)
        for name, buffer, _ in named_buffers(self._model):
            yield name, buffer

    def finish(self) -> None:
        """Hand over what an ended iteration left: gradients not yet seen, then all the rest."""
        for _, gradient, parameter in self._named:
            self._gradient(gradient, parameter)
        for name, _, parameter in self._named:
            self._observer.state(name, "parameter", parameter)
        self._refresh(structure_of(self._model))
        for place in self._buffers:
            if place.persistent:
                self._observer.state(place.name, "buffer", place.buffer)
            else:
                self._constant(place.name, place.buffer)

    def _refresh(self, structure: list[object] | None) -> None:
        """Walk through the modules, unless they are what they were."""
        # A walk costs more than all that follows.
        if structure is not None and structure == self._structure:
            return
        self._structure = structure
        named = named_parameters(self._model)
        self._named = [(name, gradient_name(name), parameter) for name, parameter in named]
        self._gradients = {id(parameter): gradient for _, gradient, parameter in self._named}
        self._buffers = list(buffer_places(self._model))

    @uncompiled
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not traced():
            shielded(self._step_begins, self._observer.failed, optimizer)

    def _step_begins(self, optimizer: Optimizer) -> None:
        if not self._observer.armed:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._gradients.get(id(parameter))
                if name is not None:
                    self._gradient(name, parameter)

    def _gradient(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and name not in self._recorded:
            self._recorded.add(name)
            self._observer.gradient(name, gradient)

    def _constant(self, name: str, buffer: Tensor) -> None:
        if name not in self._constants and self._observer.wants(name, Side.OUTPUT):
            self._constants.add(name)
            self._observer.state(name, "buffer", buffer, constant=True)
