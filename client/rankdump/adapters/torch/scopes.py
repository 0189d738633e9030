"""Gives every module and parameter of a model its name; wrappers do not appear in it."""

# torch's stubs leave the classes of its compiler and of TorchScript partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump.adapters.torch.internals import compiled_call, is_persistent
from rankdump.hook import Scope, scope_of

# By name, because importing the compiler costs a second that most jobs need not pay.
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
_WRAPPED_IN = {
    _COMPILED: "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
}

SCRIPTED = "modules compiled by torch.jit are not observed, only the modules around them"
COMPILED = "operators inside a region compiled by torch.compile are not seen, only its boundary"
FUSED = (
    "a TransformerEncoderLayer in eval mode is not observed: a hook would switch off its fused "
    "path and so change results"
)


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A module that is observed."""

    module: Module
    scope: Scope
    boundary: bool = False
    """It stands for a compiled region: the same operator inside is not counted again."""
    in_place: bool = False
    """The region is the module's own call, as `Module.compile` makes it."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is observed of a model, and what is not and why."""

    operators: tuple[Operator, ...]
    notes: tuple[str, ...]
    fused: tuple[Operator, ...] = ()
    """Modules that a hook would change: only their own call can be seen, in its place."""

    def same_as(self, other: Tree) -> bool:
        """Return whether the same modules stand under the same names."""
        return [(id(o.module), o.scope) for o in self.operators] == [
            (id(o.module), o.scope) for o in other.operators
        ]


def tree_of(model: Module) -> Tree:
    """Name the modules of a model; one used in several places has the name of the first."""
    walk = _Walk()
    walk.visit(model, "", ())
    return Tree(tuple(walk.operators), tuple(sorted(walk.notes)), tuple(walk.fused))


def named_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Return each parameter once, under its dotted name."""
    for _, name, parameter in _once(model, lambda module: module.named_parameters(recurse=False)):
        yield name, parameter


def named_buffers(model: Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Return each buffer once, with its dotted name and whether it is part of the state."""
    for place in buffer_places(model):
        yield place.name, place.buffer, place.persistent


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer stands, whichever tensor it is at the moment."""

    name: str
    """Dotted, from the root of the model."""
    module: Module
    persistent: bool
    """It is part of the model's state."""

    @property
    def buffer(self) -> Tensor:
        """The tensor that stands there now."""
        return getattr(self.module, self.name.rpartition(".")[2])


def buffer_places(model: Module) -> Iterator[BufferPlace]:
    """Return the place of each buffer; one that stands in several is known by the first."""
    for module, name, _ in _once(model, lambda module: module.named_buffers(recurse=False)):
        yield BufferPlace(name, module, is_persistent(module, name.rpartition(".")[2]))


def names_within(model: Module, chosen: Callable[[Module], bool]) -> Iterator[str]:
    """Return the dotted names of the parameters and buffers that the chosen modules own."""
    names: dict[int, str] = {}
    for prefix, module in _modules(model, "", set()):
        for name, tensor in own_tensors(module):
            # A shared one is known under the first of its names, whoever was chosen.
            known = names.setdefault(id(tensor), prefix + name)
            if chosen(module):
                yield known


def own_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters and buffers that stand in a module itself."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def class_name(module: Module) -> str:
    """Return the name of a module's class, of a wrapper's that of the module inside."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return type(module).__name__


class _Walk:
    """One way through a model, from the root down."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.notes: set[str] = set()
        self.fused: list[Operator] = []
        self._seen: set[int] = set()

    def visit(self, module: Module, name: str, above: tuple[tuple[str, str], ...]) -> None:
        """Take in a module and what is below it; `above` are names and classes from the root."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        note = _unobservable(module)
        parts = (*above, (name, class_name(module)))
        if note:
            self.notes.add(note)
            if note == FUSED:
                self.fused.append(Operator(module, scope_of(parts), boundary=True, in_place=True))
            return
        inner = _wrapped(module)
        if inner is not None:
            if _wrapper_kind(module) == _COMPILED:
                self._bound(Operator(module, scope_of(parts), boundary=True))
            self.visit(inner, name, above)
            return
        self.operators.append(Operator(module, scope_of(parts)))
        if compiled_call(module) is not None:
            self._bound(Operator(module, scope_of(parts), boundary=True, in_place=True))
        for child_name, child in module.named_children():
            self.visit(child, child_name, parts)

    def _bound(self, boundary: Operator) -> None:
        self.operators.append(boundary)
        self.notes.add(COMPILED)


_Tensor = TypeVar("_Tensor", bound=Tensor)


def _once(
    model: Module, owned: Callable[[Module], Iterable[tuple[str, _Tensor]]]
) -> Iterator[tuple[Module, str, _Tensor]]:
    seen: set[int] = set()
    for prefix, module in _modules(model, "", set()):
        for name, tensor in owned(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, prefix + name, tensor


def _modules(module: Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
    """Return each module once, with the prefix of its parameters' names."""
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = _wrapped(module)
    if inner is not None:
        yield from _modules(inner, prefix, seen)
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _modules(child, f"{prefix}{name}.", seen)


def _wrapper_kind(module: Module) -> str:
    for kind in type(module).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _WRAPPED_IN:
            return name
    return ""


def _wrapped(module: Module) -> Module | None:
    """Return the module a wrapper stands for; None when this is no wrapper."""
    attribute = _WRAPPED_IN.get(_wrapper_kind(module))
    inner = getattr(module, attribute, None) if attribute else None
    return inner if isinstance(inner, Module) else None


def _unobservable(module: Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return SCRIPTED
    if isinstance(module, torch.nn.TransformerEncoderLayer) and not module.training:
        return FUSED
    return ""
