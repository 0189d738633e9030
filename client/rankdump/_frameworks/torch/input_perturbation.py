"""Noise run of a torch model: the first floating tensor of each outermost call of the model is
moved by one unit in its last place (ulp), so that two runs show how far rounding spreads.

If there is no floating-point argument, as with token ids, the first floating-point result of a
module inside the call is moved, most often that of an embedding. The bits of an element decide
whether it goes up or down, so copies of a tensor on several ranks stay equal, and a shard moves as
the whole tensor does. A hash of the bits is used, because one direction for all elements would be a
shift or a factor, which a norm removes. Zeros, infinities and NaN stay: zeros are padding or masks,
or the rows of an embedding that another rank has. Values that another module has computed are not
moved again: an input with a graph, such as that of a loss, and the input of a later stage of a
pipeline.

The script's batch itself is not written to. Gradients pass through unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from rankdump._core.determinism import ONE_ULP, PERTURB_SETTING
from rankdump._core.recorder_protocol import Recorder
from rankdump._frameworks.card_digests import name_batch_tensor
from rankdump._frameworks.model_observer import ModelObserver
from rankdump._frameworks.operator_names import list_call_leaves, list_result_leaves
from rankdump._frameworks.torch.forward_passes import pipeline_stage_patch
from rankdump._frameworks.torch.internals import (
    disable_observation,
    find_compiled_call,
    is_tracing,
    is_wrapped,
)
from rankdump._frameworks.torch.layouts import find_local_shard, strip_distribution
from rankdump._frameworks.torch.module_hooks import (
    CopyableHook,
    exclude_from_compilation,
    run_shielded,
)

# torch's stubs leave hooks, functions of autograd and DTensors untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

_INTEGERS = {
    torch.float16: (torch.int16, -25033),
    torch.bfloat16: (torch.int16, -25033),
    torch.float32: (torch.int32, -1640531535),
    torch.float64: (torch.int64, -7046029254386353131),
}
"""For each element type: the integer type of its bits, and the factor of a multiplicative hash
(Knuth).
"""
_MAX_DEPTH = 8


def move_by_ulp(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements are one unit in the last place higher or lower.

    `tensor` satisfies `is_movable`; gradients of the result become gradients of `tensor`.
    """
    return cast("Tensor", _UlpMove.apply(tensor))


def is_movable(value: object) -> bool:
    """Return whether a value is a tensor whose elements can be moved."""
    if not isinstance(value, Tensor) or is_wrapped(value):
        return False
    local = strip_distribution(value)
    is_plain = local is not value or find_local_shard(value) is None
    return is_plain and local.dtype in _INTEGERS and local.layout is torch.strided


class _UlpMove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        local = strip_distribution(tensor)
        with disable_observation():
            moved = _move_elements(local)
        if local is tensor:
            return moved
        kind: Any = type(tensor)
        about: Any = tensor
        return kind.from_local(
            moved,
            about.device_mesh,
            about.placements,
            run_check=False,
            shape=about.shape,
            stride=about.stride(),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _move_elements(tensor: Tensor) -> Tensor:
    integer, factor = _INTEGERS[tensor.dtype]
    own = tensor.detach().contiguous()
    bits = own.view(integer)
    # Magnitudes are ordered as their bits, whatever the sign is.
    moved = torch.where(bits * factor >= 0, bits + 1, bits - 1).view(tensor.dtype)
    return torch.where((own != 0) & own.isfinite() & moved.isfinite(), moved, own)


def replace_first(
    value: Any, replace: Callable[[Tensor], Tensor], depth: int = 0
) -> tuple[Any, Tensor | None]:
    """Return a value in which the first movable tensor is replaced, and this tensor; None instead
    of the tensor if there is none. Tuples, lists and dictionaries are copied; other containers are
    not searched.
    """
    if is_movable(value):
        return replace(value), value
    if depth < _MAX_DEPTH and isinstance(value, (tuple, list)):
        parts: list[Any] = list(value)
        for at, part in enumerate(parts):
            parts[at], found = replace_first(part, replace, depth + 1)
            if found is not None:
                return _make_alike(value, parts), found
    elif depth < _MAX_DEPTH and type(value) is dict:
        for key, part in value.items():
            replaced, found = replace_first(part, replace, depth + 1)
            if found is not None:
                return {**value, key: replaced}, found
    return value, None


def _make_alike(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, list):
        return parts
    named = getattr(type(value), "_make", None)  # only named tuples have it
    return tuple(parts) if named is None else named(parts)


class TorchInputPerturbation:
    """Moves the inputs of one attached model in all iterations until `detach`."""

    def __init__(self, model: Module, recorder: Recorder, *, graph: int) -> None:
        self._observer = ModelObserver(recorder, graph)
        self._own = threading.local()
        self._handles: list[RemovableHandle] = []
        if find_compiled_call(model) is not None:
            recorder.warn_once(
                "the inputs of a model that is compiled in place are not moved by "
                f"{ONE_ULP}; attach what torch.compile(model) returns"
            )
            return
        # This hook comes before the hooks that observe the call, so that they see the values that
        # are computed with.
        self._handles = [
            model.register_forward_pre_hook(_CallHook(self), with_kwargs=True, prepend=True),
            model.register_forward_hook(_CallEndHook(self), always_call=True),
        ]
        pipeline_stage_patch.add_user(self)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Do nothing, because all iterations are perturbed."""

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Restore the model."""
        pipeline_stage_patch.remove_user(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_call(self, model: Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the changed arguments of a call of the model; None to keep the given ones."""
        self._own.depth = depth = self._depth + 1
        pipeline_stage_patch.install_methods()
        if depth > 1 or is_tracing() or pipeline_stage_patch.is_received:
            return None
        leaves = list_call_leaves(args, kwargs)
        first = next((each.value for each in leaves if is_movable(each.value)), None)
        if isinstance(first, Tensor) and first.grad_fn is not None:
            return None
        (new_args, new_kwargs), found = replace_first((args, dict(kwargs)), move_by_ulp)
        if found is None:
            self._own.handle = register_module_forward_hook(self._make_result_hook(model))
            return None
        # The name is that of the tensor's digest in run cards.
        names = (name_batch_tensor(leaf) for leaf in leaves if leaf.value is found)
        self._record(next(names, "an input"))
        return new_args, new_kwargs

    def end_call(self) -> None:
        """End a call of the model."""
        self._own.depth = depth = max(0, self._depth - 1)
        if not depth and self._remove_result_hook():
            self._observer.recorder.warn_once(
                "nothing was moved by 1ulp in a call of the attached model: it has no floating "
                "input, and no module inside was seen to return a floating tensor"
            )

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.report_failure(error)

    def _make_result_hook(self, model: Module) -> Callable[..., Any]:
        thread = threading.get_ident()

        @exclude_from_compilation
        def after_call(module: Module, args: Any, result: Any) -> Any:
            if module is model or threading.get_ident() != thread or is_tracing():
                return None
            return run_shielded(self._move_result, self.report_failure, module, result)

        return after_call

    def _move_result(self, module: Module, result: Any) -> Any:
        """Return the changed result of a module; None to keep the given one."""
        replaced, tensor = replace_first(result, move_by_ulp)
        if tensor is None:
            return None
        self._remove_result_hook()
        leaves = list_result_leaves(result)
        slot = next((leaf.slot for leaf in leaves if leaf.value is tensor), 0)
        self._record(f"output.{slot} of the first {type(module).__name__}")
        return replaced

    def _remove_result_hook(self) -> bool:
        handle: RemovableHandle | None = getattr(self._own, "handle", None)
        self._own.handle = None
        if handle is not None:
            handle.remove()
        return handle is not None

    def _record(self, what: str) -> None:
        if self._observer.recorder.card is not None:
            self._observer.recorder.card.use_settings({PERTURB_SETTING: f"{ONE_ULP}: {what}"})

    @property
    def _depth(self) -> int:
        return getattr(self._own, "depth", 0)


class _PerturbationHook(CopyableHook):
    """Base class of the hooks on a model."""

    def __init__(self, perturbation: TorchInputPerturbation) -> None:
        self._perturbation = perturbation


class _CallHook(_PerturbationHook):
    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        own = self._perturbation
        return run_shielded(own.begin_call, own.report_failure, module, args, kwargs)


class _CallEndHook(_PerturbationHook):
    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, result: Any) -> None:
        run_shielded(self._perturbation.end_call, self._perturbation.report_failure)
