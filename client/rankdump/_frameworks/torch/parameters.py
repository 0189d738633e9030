"""Parameters and buffers after the step, gradients that the optimizer is about to use, and modules
that the script marked with `set_dump`.

A gradient is read when the step of an optimizer begins: after accumulation, reduction, unscaling
and clipping. A step with a closure computes the gradients itself (Lightning's steps and LBFGS do),
so they are read when the step ends. Without an optimizer of torch they are read at the end of the
iteration. A buffer that is not part of the model's state is a constant and is recorded once. Marks
keep no module alive.

For parameters with plain tensors, layouts follow from the attributes that torch's FSDP1, Megatron
and DeepSpeed attach to them. Layouts are determined when the structure of a model is read, not in
each iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks.model_observer import check_mark_state, make_mark_target_error
from rankdump._frameworks.operator_names import make_gradient_name
from rankdump._frameworks.torch.internals import is_tracing, read_structure
from rankdump._frameworks.torch.layouts import (
    CheckedLayout,
    LayoutFinder,
    find_distribution,
    strip_distribution,
)
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.module_tree import (
    BufferLocation,
    ModuleTree,
    build_module_tree,
    iterate_buffer_locations,
    iterate_chosen_names,
    iterate_parameters,
)
from rankdump._frameworks.torch.parameter_layouts import (
    is_megatron_imported,
    iterate_attribute_layouts,
    iterate_sharded_state,
)
from rankdump._frameworks.torch.step_causes import StepCauseObserver
from rankdump._frameworks.torch.tensors import TorchObserver

# torch's stubs leave an optimizer's groups untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


class PlacedParameter(NamedTuple):
    """A parameter of a model, in the form in which optimizers have it."""

    name: str
    """Dotted name of the parameter on this rank."""
    tensor: Parameter
    layout: TensorLayout | None
    """Layout of the parameter; None if the rank has all of it, as far as is known."""


class TorchParameterObserver:
    """Observer of the parameters and buffers of one attached model."""

    def __init__(self, model: Module, observer: TorchObserver) -> None:
        self._model = model
        self._observer = observer
        self._named: list[tuple[str, str, Parameter]] = []
        self._gradients: dict[int, str] = {}
        self._layouts: dict[int, LayoutFinder] = {}
        self._buffers: list[BufferLocation] = []
        self._structure: list[object] | None = None
        self._recorded: set[str] = set()
        self._constants: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self._causes: StepCauseObserver | None = None
        self.walks = 0
        """Number of walks through the modules; parameters stay the same until the next walk."""

    def use_causes(self, causes: StepCauseObserver | None) -> None:
        """Also report the learning rates that optimizers of the model use."""
        self._causes = causes

    def restart(self) -> None:
        """Forget which gradients were recorded, because an iteration begins."""
        self._recorded.clear()

    def start(self, structure: list[object] | None) -> None:
        """Observe optimizers from now on; `structure` is that of the model, or None if unknown."""
        self._refresh(structure)
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def stop(self) -> None:
        """Stop observing optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # The tensors are released, because none may be kept alive while nothing is observed.
        self._named, self._buffers = [], []
        self._gradients, self._layouts = {}, {}
        self._structure = None

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient of a parameter was recorded in this iteration."""
        return bool(self._recorded)

    def iterate_named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, then buffers, each once with its dotted name."""
        yield from iterate_sharded_parameters(self._model)
        for place in iterate_buffer_locations(self._model):
            yield place.name, place.buffer

    def find_layout(self, parameter: object) -> LayoutFinder | None:
        """Return a function that finds the layout of a plain parameter that is a part
        of a tensor.
        """
        return self._layouts.get(id(parameter))

    def record_all(self) -> None:
        """Record gradients that no optimizer used, then parameters and buffers."""
        for _, gradient, parameter in self._named:
            self._record_gradient(gradient, parameter)
        for name, _, parameter in self._named:
            find_layout = self._layouts.get(id(parameter))
            self._observer.record_state(name, "parameter", parameter, find_layout=find_layout)
        self._refresh(read_structure(self._model))
        for place in self._buffers:
            if place.persistent:
                self._observer.record_state(place.name, "buffer", place.buffer)
            else:
                self._record_constant(place.name, place.buffer)

    def _refresh(self, structure: list[object] | None) -> None:
        """Walk through the modules, unless the structure is unchanged."""
        # The walk costs more than recording does.
        if structure is not None and structure == self._structure:
            return
        self._structure = structure
        self.walks += 1
        named = list(iterate_sharded_parameters(self._model))
        self._layouts = find_parameter_layouts(self._model, named)
        self._named = [(name, make_gradient_name(name), parameter) for name, parameter in named]
        self._gradients = {id(parameter): gradient for _, gradient, parameter in self._named}
        self._buffers = list(iterate_buffer_locations(self._model))

    def iterate_placed(self) -> Iterator[PlacedParameter]:
        """Yield each parameter once, with its layout if it is a part of a tensor."""
        for name, _, parameter in self._named:
            local = strip_distribution(parameter)
            find_layout = self._layouts.get(id(parameter))
            if find_layout is None:
                layout = find_distribution(parameter)
            else:
                layout = find_layout(tuple(local.shape))
            yield PlacedParameter(name, parameter, layout)

    @exclude_from_compilation
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_tracing():
            return
        if self._causes is not None:
            run_shielded(self._add_rates, self._observer.report_failure, optimizer)
        if not _has_closure(args, kwargs):
            run_shielded(self._record_step_gradients, self._observer.report_failure, optimizer)

    def _add_rates(self, optimizer: Optimizer) -> None:
        used = (id(each) for group in optimizer.param_groups for each in group["params"])
        if self._causes is not None and any(each in self._gradients for each in used):
            self._causes.add_rates(optimizer)

    @exclude_from_compilation
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs) and not is_tracing():
            run_shielded(self._record_step_gradients, self._observer.report_failure, optimizer)

    def _record_step_gradients(self, optimizer: Optimizer) -> None:
        if not self._observer.armed:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._gradients.get(id(parameter))
                if name is not None:
                    self._record_gradient(name, parameter)

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and name not in self._recorded:
            self._recorded.add(name)
            self._observer.record_gradient(name, gradient, self._layouts.get(id(parameter)))

    def _record_constant(self, name: str, buffer: Tensor) -> None:
        if name not in self._constants and self._observer.is_selected(name, TensorSide.OUTPUT):
            self._constants.add(name)
            self._observer.record_state(name, "buffer", buffer, constant=True)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether a step has a closure; `args` begins with the optimizer itself."""
    return kwargs.get("closure") is not None or any(callable(each) for each in args[1:])


class ModuleMarks:
    """Marks of the modules of this process; a mark keeps no module alive."""

    def __init__(self) -> None:
        self._by_module: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        self.changes = 0
        """Number of times that a mark was set."""

    def set_mark(self, module: Module, enabled: bool) -> None:
        """Mark a module and all modules inside it, or remove their marks."""
        for inside in module.modules():
            self._by_module[inside] = enabled
        self.changes += 1

    def list_marked_names(self, model: Module, tree: ModuleTree) -> frozenset[str]:
        """Return the scopes of a model's marked modules, and the names of their own tensors."""
        if not any(self._by_module.values()):
            return frozenset()
        scopes = (each.scope.path for each in tree.operators if self._is_marked(each.module))
        return frozenset((*scopes, *iterate_chosen_names(model, self._is_marked)))

    def _is_marked(self, module: Module) -> bool:
        return self._by_module.get(module, False)


module_marks = ModuleMarks()
"""Marks of this process."""


def set_dump(module: object, enabled: object = True) -> None:
    """Mark a module and all modules inside it, or remove their marks; the last call counts.

    The mark takes effect at the next call of an operator. ValueError if the arguments are not a
    module and a bool, as in MindSpore (API reference of mindspore.set_dump).
    """
    if not isinstance(module, Module):
        raise make_mark_target_error(module, "torch.nn.Module")
    module_marks.set_mark(module, check_mark_state(enabled))


class ModuleMarkReporter:
    """Reports the marked modules of one model to its recorder."""

    def __init__(self, model: Module, observer: TorchObserver) -> None:
        self._model = model
        self._observer = observer
        self._reported_changes = 0

    def report_marks(self, tree: ModuleTree) -> None:
        """Report which operators of the model are marked."""
        self._reported_changes = module_marks.changes
        self._observer.recorder.set_marks(
            self._observer.graph, module_marks.list_marked_names(self._model, tree)
        )

    def report_changed_marks(self) -> None:
        """Report the marks again if one was set since the last report."""
        if self._reported_changes != module_marks.changes:
            self.report_marks(build_module_tree(self._model))


def iterate_sharded_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter once with its dotted name, in the form that optimizers have: sharded by
    FSDP2.
    """
    sharded: dict[int, Parameter] = {}
    if _is_distributed():
        from rankdump._frameworks.torch.parameter_layouts import find_sharded_parameters

        sharded = find_sharded_parameters(model)
    for name, parameter in iterate_parameters(model):
        yield name, sharded.get(id(parameter), parameter)


def find_parameter_layouts(
    model: Module, named: Sequence[tuple[str, Parameter]]
) -> dict[int, LayoutFinder]:
    """Return the layouts of plain parameters that are parts of tensors, by identity of the
    parameter.

    If a parameter is described several times, the most detailed description counts.
    """
    layouts = _iterate_layouts(model, named)
    return {id(tensor): CheckedLayout(find_layout) for tensor, find_layout in layouts}


def _iterate_layouts(
    model: Module, named: Sequence[tuple[str, Parameter]]
) -> Iterator[tuple[Tensor, LayoutFinder]]:
    if not _is_distributed():
        return
    from rankdump._frameworks.torch.parameter_layouts import iterate_fsdp1_layouts

    yield from iterate_attribute_layouts(named)
    if is_megatron_imported():
        yield from iterate_sharded_state(model)
    yield from iterate_fsdp1_layouts(model)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
