"""Names of the modules, parameters and buffers of a model, leaving out wrappers around modules, and
the arguments of a module's configuration.

Arguments are plain values that print the same text in every run, never tensors, modules or hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump._frameworks.model_observer import is_plain_value
from rankdump._frameworks.operator_names import OperatorScope, make_scope
from rankdump._frameworks.torch.internals import find_compiled_call, is_persistent

# torch's stubs leave the classes of its compiler and of TorchScript partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


# The class is compared by name, because importing the compiler takes a second, and most jobs do not
# need it.
_OPTIMIZED_MODULE = "torch._dynamo.eval_frame.OptimizedModule"
_WRAPPER_ATTRIBUTES = {
    _OPTIMIZED_MODULE: "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
}

SCRIPTED_WARNING = "modules compiled by torch.jit are not observed, only the modules around them"
COMPILED_WARNING = (
    "operators inside a region compiled by torch.compile are not seen, only its boundary; to see "
    "them, run the dumped iterations in torch.compiler.set_stance('force_eager'), or the whole job "
    "with TORCH_COMPILE_DISABLE=1"
)
INSIDE_COMPILED_HINT = ", or attach the model with inside_compiled=True"
"""Continuation of the warning about a compiled module if operators inside it can be observed."""
OTHER_COMPILED_WARNING = (
    "no module inside the attached model was observed in a dumped iteration, and torch.compile has "
    "compiled code of this process: if that is the model's, attach what torch.compile returned"
)
REMOVED_HOOKS_WARNING = (
    "the script removed hooks of rankdump from the model, as module._forward_hooks.clear() does: "
    "what its modules computed after that is missing in the iteration, and not counted; the next "
    "iteration has hooks again"
)
FUSED_WARNING = (
    "a TransformerEncoderLayer in eval mode is not observed: a hook would switch off its fused "
    "path and so change results"
)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOperator:
    """An observed module."""

    module: Module
    scope: OperatorScope
    boundary: bool = False
    """Whether the operator stands for a compiled region; the same operator inside the region is not
    counted again.
    """
    in_place: bool = False
    """Whether the region is the module's own call, as after `Module.compile`."""


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """Observed modules of a model, and notes on those that are not observed."""

    operators: tuple[ModuleOperator, ...]
    notes: tuple[str, ...]
    fused: tuple[ModuleOperator, ...] = ()
    """Modules that a hook would change: only their call is observed, by replacing it."""

    def has_same_modules(self, other: ModuleTree) -> bool:
        """Return whether both trees have the same modules under the same names."""
        return [(id(o.module), o.scope) for o in self.operators] == [
            (id(o.module), o.scope) for o in other.operators
        ]


def build_module_tree(model: Module) -> ModuleTree:
    """Return the modules of a model with their names; a module used in several places is named
    after the first.
    """
    walk = _ModuleWalk()
    walk.visit(model, "", ())
    return ModuleTree(tuple(walk.operators), tuple(sorted(walk.notes)), tuple(walk.fused))


def is_run_elsewhere(
    tree: ModuleTree, has_calls: Callable[[OperatorScope], bool], *, has_gradients: bool
) -> bool:
    """Return whether modules of a model ran in an iteration without being seen: compiled code runs
    them that is not in the tree, because the script compiled the attached model, or a model around
    it.
    """
    if COMPILED_WARNING in tree.notes or not tree.operators:
        return False
    model, *inside = (has_calls(operator.scope) for operator in tree.operators)
    return (model or has_gradients) and not any(inside or (model,))


def iterate_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter once, with its dotted name."""
    for _, name, parameter in _iterate_once(
        model, lambda module: module.named_parameters(recurse=False)
    ):
        yield name, parameter


@dataclass(frozen=True, slots=True)
class BufferLocation:
    """Place of a buffer, which may hold another tensor after every step."""

    name: str
    """Dotted name of the buffer, from the root of the model."""
    module: Module
    persistent: bool
    """Whether the buffer is part of the model's state."""

    @property
    def buffer(self) -> Tensor:
        """Current tensor of the buffer."""
        return getattr(self.module, self.name.rpartition(".")[2])


def iterate_buffer_locations(model: Module) -> Iterator[BufferLocation]:
    """Yield the place of each buffer; a buffer in several places is named after the first."""
    for module, name, _ in _iterate_once(model, lambda module: module.named_buffers(recurse=False)):
        yield BufferLocation(name, module, is_persistent(module, name.rpartition(".")[2]))


def iterate_chosen_names(model: Module, chosen: Callable[[Module], bool]) -> Iterator[str]:
    """Yield the dotted names of parameters and buffers that the chosen modules own."""
    names: dict[int, str] = {}
    for prefix, module in _iterate_modules(model, "", set()):
        for name, tensor in iterate_own_tensors(module):
            # A shared tensor has the first of its names, whichever of its owners is chosen.
            known = names.setdefault(id(tensor), prefix + name)
            if chosen(module):
                yield known


def iterate_own_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the own parameters and buffers of a module, without those of its children."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def find_class_name(module: Module) -> str:
    """Return the class name of a module; for a wrapper, that of the module inside."""
    return _find_original_class(type(unwrap_module(module))).__name__


def unwrap_module(module: Module) -> Module:
    """Return the module inside all wrappers."""
    while (inner := _find_wrapped(module)) is not None:
        module = inner
    return module


_SHARDED_BASES = ("FSDPModule", "ReplicateModule", "DDP")
"""Classes that `fully_shard` and `replicate` prepend to a module's own class."""


def _find_original_class(kind: type) -> type:
    """Return the class that a module had before torch replaced it by a derived class with other
    behaviour.

    torch creates such a class for the class of each module, with the behaviour and the original
    class as its bases (torch.distributed.fsdp.fully_shard,
    torch.distributed._composable.replicate).
    """
    while (
        len(kind.__bases__) > 1
        and kind.__bases__[0].__name__ in _SHARDED_BASES
        and kind.__bases__[0].__module__.startswith("torch.distributed.")
    ):
        kind = kind.__bases__[1]
    return kind


class _ModuleWalk:
    """Walk through a model, from the root down."""

    def __init__(self) -> None:
        self.operators: list[ModuleOperator] = []
        self.notes: set[str] = set()
        self.fused: list[ModuleOperator] = []
        self._seen: set[int] = set()

    def visit(self, module: Module, name: str, above: tuple[tuple[str, str], ...]) -> None:
        """Add a module and its children; `above` are names and classes from the root."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        note = _explain_unobservable(module)
        parts = (*above, (name, find_class_name(module)))
        if note:
            self.notes.add(note)
            if note == FUSED_WARNING:
                self.fused.append(
                    ModuleOperator(module, make_scope(parts), boundary=True, in_place=True)
                )
            return
        inner = _find_wrapped(module)
        if inner is not None:
            if _find_wrapper_kind(module) == _OPTIMIZED_MODULE:
                self._add_boundary(ModuleOperator(module, make_scope(parts), boundary=True))
            self.visit(inner, name, above)
            return
        self.operators.append(ModuleOperator(module, make_scope(parts)))
        if find_compiled_call(module) is not None:
            self._add_boundary(
                ModuleOperator(module, make_scope(parts), boundary=True, in_place=True)
            )
        for child_name, child in module.named_children():
            self.visit(child, child_name, parts)

    def _add_boundary(self, boundary: ModuleOperator) -> None:
        self.operators.append(boundary)
        self.notes.add(COMPILED_WARNING)


_TensorT = TypeVar("_TensorT", bound=Tensor)


def _iterate_once(
    model: Module, owned: Callable[[Module], Iterable[tuple[str, _TensorT]]]
) -> Iterator[tuple[Module, str, _TensorT]]:
    seen: set[int] = set()
    for prefix, module in _iterate_modules(model, "", set()):
        for name, tensor in owned(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, prefix + name, tensor


def _iterate_modules(module: Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
    """Yield each module once, with the prefix of its parameters' names."""
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = _find_wrapped(module)
    if inner is not None:
        yield from _iterate_modules(inner, prefix, seen)
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _iterate_modules(child, f"{prefix}{name}.", seen)


def _find_wrapper_kind(module: Module) -> str:
    for kind in type(module).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _WRAPPER_ATTRIBUTES:
            return name
    return ""


def _find_wrapped(module: Module) -> Module | None:
    """Return the module inside a wrapper; None if `module` is not a wrapper."""
    attribute = _WRAPPER_ATTRIBUTES.get(_find_wrapper_kind(module))
    inner = getattr(module, attribute, None) if attribute else None
    return inner if isinstance(inner, Module) else None


def _explain_unobservable(module: Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return SCRIPTED_WARNING
    if isinstance(module, torch.nn.TransformerEncoderLayer) and not module.training:
        return FUSED_WARNING
    return ""


# torch's stubs leave attributes of modules untyped.
# pyright: reportUnknownMemberType=false


_PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device, type(None))
_STATE_ATTRIBUTES = frozenset(("training", "call_super_init", "dump_patches"))
"""Attributes that every module has and that are not arguments."""
_NO_ATTRIBUTE = object()


def read_module_arguments(module: Module) -> dict[str, str]:
    """Return the arguments of a module as texts, sorted by name.

    If a module has its bias as a parameter, `bias` says whether there is one.
    """
    found = {
        name: str(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _STATE_ATTRIBUTES
        and is_plain_value(value, _PLAIN_TYPES, (tuple,))
    }
    bias = getattr(module, "bias", _NO_ATTRIBUTE)
    if bias is None or isinstance(bias, Tensor):
        found.setdefault("bias", str(bias is not None))
    return dict(sorted(found.items()))
