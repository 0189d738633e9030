"""Description of a network as a graph while an iteration runs: callers, inputs, results and source
lines, and the operator or parameter that produced each tensor. It is active only while the recorder
is describing; it keeps alive neither tensors nor parts of autograd's graph.

A tensor is recognised by its identity, a view by its base, and the result of unobserved arithmetic
through autograd's graph, where it may have several producers.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump._core.graph import GraphNode, GraphParameter, SourceLine, TensorType
from rankdump._frameworks.model_observer import capture_source_lines
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.internals import (
    find_base,
    find_thread_number,
    read_node_number,
    read_version,
)
from rankdump._frameworks.torch.module_tree import iterate_own_tensors, read_module_arguments
from rankdump._frameworks.torch.recomputation import TorchOperatorCall
from rankdump._frameworks.torch.tensors import TorchObserver, find_dtype_name

# torch's stubs leave the nodes of autograd's graph partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


_MAX_SEARCHED_NODES = 256
"""Maximum number of nodes of autograd's graph that are searched for one tensor."""


@dataclass(frozen=True, slots=True)
class _KnownTensor:
    tensor: weakref.ref[Tensor]
    version: int
    maker: str


class TensorProducers:
    """Names of the producers of one iteration's tensors."""

    def __init__(self) -> None:
        self._by_identity: dict[int, _KnownTensor] = {}
        self._by_node: dict[tuple[int, int], str] = {}

    def clear(self) -> None:
        """Forget all producers."""
        self._by_identity.clear()
        self._by_node.clear()

    def add_tensor(self, tensor: Tensor, name: str) -> str:
        """Note that an operator returned a tensor; return the operator that produced the tensor.

        The producer is another operator if the tensor was only passed through.
        """
        known = self._find_known(tensor)
        if known is not None and known.version == _read_version(tensor):
            return known.maker
        self._by_identity[id(tensor)] = _KnownTensor(
            weakref.ref(tensor), _read_version(tensor), name
        )
        node = tensor.grad_fn
        if node is not None:
            self._by_node[find_thread_number(), read_node_number(node)] = name
        return name

    def find_makers(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the producers of a tensor; empty for a tensor from outside the model."""
        known = self._find_known(tensor)
        if known is not None and known.version == _read_version(tensor):
            return (known.maker,)
        behind = self._search_graph(tensor.grad_fn)
        if behind:
            return behind
        base = find_base(tensor)
        known = known or (None if base is None else self._find_known(base))
        return () if known is None else (known.maker,)

    def _find_known(self, tensor: Tensor) -> _KnownTensor | None:
        known = self._by_identity.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _search_graph(self, start: Any) -> tuple[str, ...]:
        """Return the nearest known producers in autograd's graph."""
        found: dict[str, None] = {}
        waiting, seen = deque([start]), {None}
        while waiting and len(seen) <= _MAX_SEARCHED_NODES:
            node = waiting.popleft()
            if node in seen:
                continue
            seen.add(node)
            maker = self._find_node_maker(node)
            if maker is not None:
                found[maker] = None
            else:
                waiting.extend(following for following, _ in node.next_functions)
        return tuple(found)

    def _find_node_maker(self, node: Any) -> str | None:
        leaf = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            known = self._find_known(leaf)
            return None if known is None else known.maker
        return self._by_node.get((find_thread_number(), read_node_number(node)))


def _read_version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else read_version(tensor)


# Files whose frames are not the user's: torch, and the import system, whose code has no files.
FOREIGN_FILES = (
    f"{Path(str(torch.__file__)).parent}{os.sep}",
    "<frozen ",
    # Code that torch.compile generates: its name, and inductor's folder.
    "<eval_with_key>",
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_",
)


@dataclass(frozen=True, slots=True)
class NodeDraft:
    """Description of a call that has begun and not ended."""

    inputs: tuple[str, ...]
    source: tuple[SourceLine, ...]


@dataclass(slots=True)
class _ForwardDescription:
    """Facts about a forward call that describe its backward."""

    source: tuple[SourceLine, ...]
    gradients: tuple[TensorType, ...] = ()
    """Types of the gradients that the backward will produce."""
    made: dict[str, None] = field(default_factory=dict[str, None])
    """Producers of the call's results: the call itself, or calls inside it."""


class GraphDescriber:
    """Describes the graph of one attached model."""

    def __init__(self, observer: TorchObserver) -> None:
        self._observer = observer
        self._producers = TensorProducers()
        self._names: dict[int, str] = {}
        self._forwards: dict[str, _ForwardDescription] = {}
        self._readers: dict[str, dict[str, None]] = {}
        self._gradients: set[str] = set()

    @property
    def is_active(self) -> bool:
        """Whether operators are to be described now."""
        return self._observer.recorder.is_describing

    def clear(self) -> None:
        """Forget all facts about the iteration."""
        self._producers.clear()
        self._names.clear()
        self._forwards.clear()
        self._readers.clear()
        self._gradients.clear()

    def describe_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Describe parameters and buffers, except those that have no shape yet."""
        for name, tensor in named:
            self._names[id(tensor)] = name
            kind = _find_tensor_type(tensor)
            if kind is not None:
                self._producers.add_tensor(tensor, name)
                parameter = GraphParameter(name, kind)
                self._observer.recorder.describe_parameter(self._observer.graph, parameter)

    def begin_call(
        self, call: TorchOperatorCall, module: Module, leaves: Sequence[CallLeaf]
    ) -> NodeDraft:
        """Note the inputs and source lines of a call, before the call may change anything."""
        forward = call.names.forward
        known = self._forwards.setdefault(
            forward, _ForwardDescription(capture_source_lines(besides=FOREIGN_FILES))
        )
        tensors = _list_leaf_tensors(leaves)
        wanted = (t for t in tensors if t.requires_grad and not isinstance(t, Parameter))
        known.gradients = known.gradients or _find_tensor_types(wanted)
        inputs = [
            maker for tensor in tensors for maker in self._producers.find_makers(tensor) or ("",)
        ]
        for maker in filter(None, inputs):
            self._readers.setdefault(maker, {})[call.names.gradient] = None
        own = (self._names.get(id(tensor), "") for _, tensor in iterate_own_tensors(module))
        inputs += [name for name in own if name and name not in inputs]
        return NodeDraft(tuple(inputs), known.source)

    def end_call(
        self,
        call: TorchOperatorCall,
        name: str,
        module: Module,
        draft: NodeDraft,
        results: Sequence[CallLeaf],
    ) -> None:
        """Describe a call; a call that raised has no results."""
        tensors = _list_leaf_tensors(results)
        known = self._forwards.get(call.names.forward)
        for tensor in tensors:
            maker = self._producers.add_tensor(tensor, name)
            if known is not None:
                known.made[maker] = None
        node = GraphNode(
            name=name,
            op_type=call.scope.op_type,
            inputs=draft.inputs,
            outputs=_find_tensor_types(tensors),
            attributes=read_module_arguments(module),
            source=draft.source,
        )
        self._observer.recorder.describe(self._observer.graph, node)

    def describe_gradient(self, call: TorchOperatorCall) -> None:
        """Describe the backward of a call, with inputs from backwards that ran before it."""
        name = call.names.gradient
        known = self._forwards.get(call.names.forward)
        if known is None or name in self._gradients:
            return
        self._gradients.add(name)
        # The collections are copied, because another thread may add to them.
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


def _list_leaf_tensors(leaves: Iterable[CallLeaf]) -> list[Tensor]:
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


def _find_tensor_types(tensors: Iterable[Tensor]) -> tuple[TensorType, ...]:
    return tuple(kind for kind in map(_find_tensor_type, tensors) if kind is not None)


def _find_tensor_type(tensor: Tensor) -> TensorType | None:
    """Return the type of a tensor; None if its extents are not plain numbers."""
    try:
        return TensorType(find_dtype_name(tensor), tuple(map(int, tensor.shape)))
    except (RuntimeError, TypeError, ValueError):
        # This includes nested and lazy tensors.
        return None
