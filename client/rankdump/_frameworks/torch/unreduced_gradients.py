"""Gradients of DistributedDataParallel and FSDP1 before they are reduced.

A hook that autograd runs when it has added a gradient to the parameter, and before torch's own hook
copies it into a bucket or reduces it (torch.Tensor.register_post_accumulate_grad_hook), reads what
is about to be reduced: the gradient, and what earlier backwards without reduction accumulated. It
changes neither. Both wrappers write into that memory later, so it is read in the hook.

A static graph of DistributedDataParallel may add to a parameter several times in one backward, with
reentrant checkpointing, and reduces only the last sum. Which one that is shows only later, so the
sum is copied each time, and the last copy is recorded when the next forward begins, or the
iteration ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankdump._frameworks.torch.fsdp import iterate_fsdp1_handles
from rankdump._frameworks.torch.fsdp_stages import iterate_flat_parts
from rankdump._frameworks.torch.internals import (
    disable_observation,
    find_running_node,
    is_tracing,
)
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.stage_recorder import StageRecorder

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


class UnreducedGradientObserver:
    """Hooks on parameters that are in place while an armed iteration runs."""

    def __init__(self, recorder: StageRecorder) -> None:
        self._recorder = recorder
        self._handles: list[RemovableHandle] = []
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        """Of static graphs, by identity: the parameter, and a copy of its gradient."""

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
        """Record the gradients of static graphs that the backwards so far have left."""
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
    """Yield the parameters that a DistributedDataParallel reduces."""
    ignored = module.parameters_to_ignore
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            yield parameter


def _is_reducing(module: Any) -> bool:
    """Return whether the backward of the last forward reduces gradients.

    What counts is whether `no_sync` was there in the forward, which then sets this attribute.
    """
    return bool(module.require_forward_param_sync)


def _is_flat_reducing(module: Any, flat: Any) -> bool:
    """Return whether FSDP1 is about to reduce the gradient, in its own hook.

    That hook is on the node that adds gradients of the first forward. With mixed precision each
    forward has a node of its own, and those of later ones, which run earlier, only add.
    """
    state = getattr(flat, "_post_backward_hook_state", None)
    node = find_running_node()
    is_first = state is None or node is None or state[0] is node
    return bool(module._sync_gradients) and is_first
