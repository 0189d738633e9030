"""Describes the network as a graph while an iteration runs: who calls, on what, from where.

Works only in the iteration that the recorder wants described, and keeps no tensor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump.adapters.stack import lines_now
from rankdump.adapters.torch.arguments import arguments_of
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.pairing import Call
from rankdump.adapters.torch.producers import Producers
from rankdump.adapters.torch.scopes import own_tensors
from rankdump.adapters.torch.tensors import dtype_name
from rankdump.contract.graph import GraphNode, GraphParameter, SourceLine, TensorType
from rankdump.hook import Leaf

# With the import system, which has no files.
_NOT_THE_USERS = (f"{Path(str(torch.__file__)).parent}{os.sep}", "<frozen ")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A call that has begun, as far as it can be described."""

    inputs: tuple[str, ...]
    source: tuple[SourceLine, ...]


@dataclass(slots=True)
class _Forward:
    """What the backward of a call is described from."""

    source: tuple[SourceLine, ...]
    gradients: tuple[TensorType, ...] = ()
    """Types of the gradients it will give."""
    made: dict[str, None] = field(default_factory=dict[str, None])
    """Makers of what the call returned: itself, or calls inside it."""


class Describer:
    """Describes one attached model."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._producers = Producers()
        self._names: dict[int, str] = {}
        self._forwards: dict[str, _Forward] = {}
        self._readers: dict[str, dict[str, None]] = {}
        self._gradients: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there is something to describe now."""
        return self._observer.recorder.describing

    def forget(self) -> None:
        """Know nothing of the iteration any more."""
        self._producers.forget()
        self._names.clear()
        self._forwards.clear()
        self._readers.clear()
        self._gradients.clear()

    def parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Describe parameters and buffers; those that are still without a shape are left out."""
        for name, tensor in named:
            self._names[id(tensor)] = name
            kind = _type(tensor)
            if kind is not None:
                self._producers.made(tensor, name)
                parameter = GraphParameter(name, kind)
                self._observer.recorder.describe_parameter(self._observer.graph, parameter)

    def begun(self, call: Call, module: Module, leaves: Sequence[Leaf]) -> Sketch:
        """Note what a call reads and where it is made, before it may change anything."""
        forward = call.names.forward
        known = self._forwards.setdefault(forward, _Forward(lines_now(besides=_NOT_THE_USERS)))
        tensors = _tensors(leaves)
        wanted = (t for t in tensors if t.requires_grad and not isinstance(t, Parameter))
        known.gradients = known.gradients or _types(wanted)
        inputs = [maker for tensor in tensors for maker in self._producers.makers(tensor) or ("",)]
        for maker in filter(None, inputs):
            self._readers.setdefault(maker, {})[call.names.gradient] = None
        own = (self._names.get(id(tensor), "") for _, tensor in own_tensors(module))
        inputs += [name for name in own if name and name not in inputs]
        return Sketch(tuple(inputs), known.source)

    def ended(
        self, call: Call, name: str, module: Module, sketch: Sketch, results: Sequence[Leaf]
    ) -> None:
        """Describe a call; of one that raised there are no results."""
        tensors = _tensors(results)
        known = self._forwards.get(call.names.forward)
        for tensor in tensors:
            maker = self._producers.made(tensor, name)
            if known is not None:
                known.made[maker] = None
        node = GraphNode(
            name=name,
            op_type=call.scope.op_type,
            inputs=sketch.inputs,
            outputs=_types(tensors),
            attributes=arguments_of(module),
            source=sketch.source,
        )
        self._observer.recorder.describe(self._observer.graph, node)

    def gradient(self, call: Call) -> None:
        """Describe the backward of a call; it follows from those that ran before it."""
        name = call.names.gradient
        known = self._forwards.get(call.names.forward)
        if known is None or name in self._gradients:
            return
        self._gradients.add(name)
        # Copies: another thread may be adding to them.
        made = [tuple(self._readers.get(maker, ())) for maker in tuple(known.made)]
        readers = itertools.chain.from_iterable(made)
        node = GraphNode(
            name=name,
            op_type=call.scope.op_type,
            inputs=tuple(r for r in dict.fromkeys(readers) if r in self._gradients and r != name),
            outputs=known.gradients,
            source=known.source,
        )
        self._observer.recorder.describe(self._observer.graph, node)


def _tensors(leaves: Iterable[Leaf]) -> list[Tensor]:
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


def _types(tensors: Iterable[Tensor]) -> tuple[TensorType, ...]:
    return tuple(kind for kind in map(_type, tensors) if kind is not None)


def _type(tensor: Tensor) -> TensorType | None:
    """Return the type of a tensor; None where it has no extents in numbers."""
    try:
        return TensorType(dtype_name(tensor), tuple(map(int, tensor.shape)))
    except (RuntimeError, TypeError, ValueError):
        # Nested and lazy tensors among them.
        return None
