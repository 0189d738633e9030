"""Tensors that data parallelism computes with between its collectives: parameters as a forward
reads them, after FSDP has gathered them; and gradients of DistributedDataParallel and both kinds of
FSDP before they are reduced. They are recorded only if a script asks for it, because each tensor is
as large as the whole parameter; in iterations that are not armed this costs nothing. Nothing in
this module communicates.

The tensors are recorded as inputs of the parameter and of its gradient, whose outputs are the value
after the step and the reduced gradient.

FSDP calls methods of its groups of parameters (FSDP2) and of its handles of flat parameters (FSDP1)
by name. In armed iterations some of these methods are replaced on each object
(torch.distributed.fsdp: _fully_shard.FSDPParamGroup and _flat_param.FlatParamHandle, torch 2.4 to
2.13).

Gradients of DistributedDataParallel and FSDP1 are read in a hook that autograd runs when it has
added a gradient to the parameter, before torch's own hook copies the gradient into a bucket or
reduces it (torch.Tensor.register_post_accumulate_grad_hook). They include what earlier backwards
without reduction accumulated. Both wrappers write into that memory later.

With reentrant checkpointing, a static graph of DistributedDataParallel may add to a parameter
several times in one backward, and reduces only the last sum. Which sum is the last one becomes
known only later. So the sum is copied each time, and the last copy is recorded when the next
forward begins or the iteration ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.operator_names import PARAMETER_TYPE, make_gradient_name
from rankdump._frameworks.torch.internals import (
    disable_observation,
    find_running_node,
    is_tracing,
)
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.module_tree import find_class_name
from rankdump._frameworks.torch.parameter_layouts import iterate_fsdp1_handles, iterate_fsdp2_groups
from rankdump._frameworks.torch.tensors import TorchObserver, make_torch_source

# torch's stubs leave hooks and handles untyped, and FSDP's modules have none.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_SIDE = TensorSide.INPUT
_GATHERING, _REDUCTION = "pre_forward", "post_backward"
_FLAT_GATHERING = "post_unshard"


class StageRecorder:
    """Records tensors that belong to parameters of attached models; parameters are recognised by
    identity.
    """

    def __init__(
        self, recorder: Recorder, list_models: Callable[[], Iterable[TensorNameFinder]]
    ) -> None:
        self._recorder = recorder
        self._list_models = list_models
        self._names: dict[int, tuple[int, str]] = {}
        self._counts: dict[tuple[int, str], Iterator[int]] = {}
        self.warn_once = recorder.warn_once
        """Logs a warning, but only the first time."""
        self.report_failure = TorchObserver(recorder, 0).report_failure
        """Reports that a hook could not do its work."""

    def restart(self) -> None:
        """Forget which tensors were recorded, because an iteration begins."""
        self._counts.clear()

    def read_names(self) -> None:
        """Read the names of the parameters of attached models."""
        self._names = {
            id(tensor): (model.graph, name)
            for model in self._list_models()
            for name, tensor in model.iterate_named()
        }

    def forget_names(self) -> None:
        """Forget the names, and with them the identities of tensors that may be freed."""
        self._names = {}

    def record_gathered(self, parameter: Tensor, tensor: Tensor) -> None:
        """Record a parameter as the forward reads it, only the first time in an iteration."""
        place = self._names.get(id(parameter))
        if place is not None and self._count(place) == 0:
            self._record(*place, 0, "unsharded", tensor)

    def is_gradient_wanted(self, parameter: Tensor) -> bool:
        """Return whether the gradient before reduction is kept in this iteration."""
        place = self._names.get(id(parameter))
        return place is not None and self._recorder.is_wanted(
            place[0], make_gradient_name(place[1]), _SIDE
        )

    def record_unreduced(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record a gradient that is about to be reduced.

        The slot is the number of the reduction in the iteration.
        """
        if self.is_gradient_wanted(parameter):
            graph, name = self._names[id(parameter)]
            name = make_gradient_name(name)
            self._record(graph, name, self._count((graph, name)), "unreduced", gradient)

    def _count(self, place: tuple[int, str]) -> int:
        """Return how often a tensor was recorded before in this iteration, and count it."""
        # `setdefault` and `next` are each atomic: gradients arrive in one thread for each device.
        return next(self._counts.setdefault(place, itertools.count()))

    def _record(self, graph: int, name: str, slot: int, argument: str, tensor: Tensor) -> None:
        observer = TorchObserver(self._recorder, graph)
        if observer.is_selected(name, _SIDE):
            observer.record_tensor(
                PARAMETER_TYPE, name, _SIDE, slot, argument, make_torch_source, tensor, state=True
            )
            observer.end_call(name)


class FsdpStagePatch:
    """Methods of FSDP that are replaced during an armed iteration."""

    def __init__(self, recorder: StageRecorder) -> None:
        self._recorder = recorder
        self._patches: list[AttributePatch] = []

    def install(self, model: Module) -> int:
        """Replace the methods; return how many groups and handles the model has."""
        groups, handles = list(iterate_fsdp2_groups(model)), list(iterate_fsdp1_handles(model))
        for group in groups:
            self._replace(group, _GATHERING, after=self._record_parameters)
            self._replace(group, _REDUCTION, before=self._record_gradients)
        for _, handle in handles:
            self._replace(handle, _FLAT_GATHERING, after=self._record_flat_parameter)
        return len(groups) + len(handles)

    def restore(self) -> None:
        """Restore the methods."""
        patches, self._patches = self._patches, []
        for patch in patches:
            patch.remove()

    def _replace(
        self,
        group: Any,
        method: str,
        *,
        before: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        original, failed = getattr(group, method), self._recorder.report_failure

        @exclude_from_compilation
        def observed(*args: Any, **kwargs: Any) -> Any:
            if before is not None and not is_tracing():
                run_shielded(before, failed, group)
            result = original(*args, **kwargs)
            if after is not None and not is_tracing():
                run_shielded(after, failed, group)
            return result

        self._patches.append(AttributePatch(group, method, observed))
        self._patches[-1].install()

    def _record_parameters(self, group: Any) -> None:
        for each in group.fsdp_params:
            gathered = getattr(each, "_unsharded_param", None)
            if gathered is not None:
                self._recorder.record_gathered(each.sharded_param, gathered)

    def _record_gradients(self, group: Any) -> None:
        if not group.reduce_grads:
            return  # another backward still adds to these gradients
        for each in group.fsdp_params:
            gradient = _read_gradient(each)
            if gradient is not None:
                self._recorder.record_unreduced(each.sharded_param, gradient)

    def _record_flat_parameter(self, handle: Any) -> None:
        for parameter, view in iterate_flat_parts(handle, handle.flat_param.detach()):
            self._recorder.record_gathered(parameter, view)


def iterate_flat_parts(handle: Any, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that an optimizer of FSDP1 has, with its part of the whole flat tensor.

    The parameter is the flat parameter itself, or with `use_orig_params` each original one.
    """
    originals: Any = handle.flat_param._params
    if originals is None:
        yield handle.flat_param, flat
        return
    with torch.no_grad():
        yield from zip(originals, handle._get_unflat_views(flat), strict=True)


def _read_gradient(parameter: Any) -> Tensor | None:
    """Return the gradient that is about to be reduced, including what earlier backwards
    accumulated.
    """
    gathered = getattr(parameter, "_unsharded_param", None)
    gradient = None if gathered is None else gathered.grad
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    if accumulated is None or gradient is None:
        return gradient if accumulated is None else accumulated
    with torch.no_grad():  # DTensors add their shards only through torch's dispatcher
        return accumulated + gradient


class UnreducedGradientObserver:
    """Hooks on parameters that are in place during an armed iteration."""

    def __init__(self, recorder: StageRecorder) -> None:
        self._recorder = recorder
        self._handles: list[RemovableHandle] = []
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameters of static graphs by identity, each with a copy of its gradient."""

    def install(self, model: Module) -> int:
        """Place the hooks; return how many wrappers the model has."""
        wrappers = 0
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._watch_replica(module)
                wrappers += 1
        for module, handle in iterate_fsdp1_handles(model):
            if handle.flat_param.requires_grad:
                self._add_hook(handle.flat_param, partial(self._record_flat, module, handle))
            wrappers += 1
        return wrappers

    def remove(self) -> None:
        """Remove the hooks."""
        self._held.clear()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def record_held(self) -> None:
        """Record the last copies of gradients of static graphs."""
        held, self._held = self._held, {}
        for parameter, gradient in held.values():
            self._recorder.record_unreduced(parameter, gradient)

    def _watch_replica(self, module: Any) -> None:
        read = self._hold if module.static_graph else self._record
        if module.static_graph:
            self._handles.append(module.register_forward_pre_hook(self._before_forward))
        for parameter in _iterate_reduced(module):
            self._add_hook(parameter, partial(read, module))

    def _add_hook(self, parameter: Tensor, read: Callable[[Tensor], None]) -> None:
        failed = self._recorder.report_failure

        @exclude_from_compilation
        def observe(tensor: Tensor) -> None:
            if not is_tracing():
                run_shielded(read, failed, tensor)

        self._handles.append(parameter.register_post_accumulate_grad_hook(observe))

    def _record(self, module: Any, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and _is_reducing(module):
            self._recorder.record_unreduced(parameter, gradient)

    def _hold(self, module: Any, parameter: Tensor) -> None:
        gradient = parameter.grad
        if (
            gradient is None
            or not _is_reducing(module)
            or not self._recorder.is_gradient_wanted(parameter)
        ):
            return
        with disable_observation():
            self._held[id(parameter)] = parameter, gradient.detach().clone()

    @exclude_from_compilation
    def _before_forward(self, module: Module, args: object) -> None:
        if self._held and not is_tracing():
            run_shielded(self.record_held, self._recorder.report_failure)

    def _record_flat(self, module: Any, handle: Any, flat: Tensor) -> None:
        gradient = flat.grad
        if gradient is None or not _is_flat_reducing(module, flat):
            return
        for parameter, view in iterate_flat_parts(handle, gradient.detach()):
            self._recorder.record_unreduced(parameter, view)


def _iterate_reduced(module: Any) -> Iterator[Tensor]:
    """Yield the parameters whose gradients a DistributedDataParallel reduces."""
    ignored = module.parameters_to_ignore
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            yield parameter


def _is_reducing(module: Any) -> bool:
    """Return whether the backward of the last forward reduces gradients.

    This depends on whether `no_sync` was active during the forward, which then sets this attribute.
    """
    return bool(module.require_forward_param_sync)


def _is_flat_reducing(module: Any, flat: Any) -> bool:
    """Return whether FSDP1 is about to reduce the gradient in its own hook.

    FSDP1's hook is on the node that adds the gradients of the first forward. With mixed precision
    each forward has its own node; nodes of later forwards run earlier and only add.
    """
    state = getattr(flat, "_post_backward_hook_state", None)
    node = find_running_node()
    is_first = state is None or node is None or state[0] is node
    return bool(module._sync_gradients) and is_first


class DataParallelHook:
    """Records gathered parameters and unreduced gradients of one model."""

    def __init__(
        self,
        model: Module,
        recorder: Recorder,
        list_models: Callable[[], Iterable[TensorNameFinder]],
    ) -> None:
        self._model = model
        self._recorder = StageRecorder(recorder, list_models)
        self._stages = FsdpStagePatch(self._recorder)
        self._gradients = UnreducedGradientObserver(self._recorder)
        self._is_installed = False
        self._iteration = -1

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install the hooks if the iteration is armed."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._recorder.restart()
        run_shielded(self._install if armed else self._restore, self._recorder.report_failure)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record the gradients that are final only at the end of the iteration."""
        if not armed:
            return
        run_shielded(self._gradients.record_held, self._recorder.report_failure)
        if not self._is_installed:
            self._recorder.warn_once(
                f"data_parallel({find_class_name(self._model)}): the model has no "
                f"DistributedDataParallel, FullyShardedDataParallel or fully_shard in it; allowed: "
                f"the model that they return"
            )

    def detach(self) -> None:
        """Restore the model."""
        run_shielded(self._restore, self._recorder.report_failure)

    def _install(self) -> None:
        self._recorder.read_names()
        if not self._is_installed:
            found = self._stages.install(self._model) + self._gradients.install(self._model)
            self._is_installed = found > 0

    def _restore(self) -> None:
        self._is_installed = False
        self._stages.restore()
        self._gradients.remove()
        self._recorder.forget_names()
