"""What torch's two kinds of FSDP compute with between their collectives: parameters as a forward
reads them, after they were gathered, and of FSDP2 the gradients before they are reduced.

FSDP calls methods of its groups of parameters (FSDP2) and of its handles of flat parameters (FSDP1)
by name; in armed iterations some are replaced on each object (torch.distributed.fsdp:
_fully_shard.FSDPParamGroup and _flat_param.FlatParamHandle, torch 2.4 to 2.13). Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rankdump._frameworks.torch.fsdp import iterate_fsdp1_handles, iterate_fsdp2_groups
from rankdump._frameworks.torch.internals import is_tracing
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.stage_recorder import StageRecorder

# These modules of torch have no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_GATHERING, _REDUCTION = "pre_forward", "post_backward"
_FLAT_GATHERING = "post_unshard"


class FsdpStagePatch:
    """Methods that are replaced while an armed iteration runs."""

    def __init__(self, recorder: StageRecorder) -> None:
        self._recorder = recorder
        self._replaced: list[tuple[Any, str, object]] = []

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
        replaced, self._replaced = self._replaced, []
        for group, method, ours in replaced:
            if vars(group).get(method) is ours:
                delattr(group, method)

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

        setattr(group, method, observed)
        self._replaced.append((group, method, observed))

    def _record_parameters(self, group: Any) -> None:
        for each in group.fsdp_params:
            gathered = getattr(each, "_unsharded_param", None)
            if gathered is not None:
                self._recorder.record_gathered(each.sharded_param, gathered)

    def _record_gradients(self, group: Any) -> None:
        if not group.reduce_grads:
            return  # another backward adds to them
        for each in group.fsdp_params:
            gradient = _read_gradient(each)
            if gradient is not None:
                self._recorder.record_unreduced(each.sharded_param, gradient)

    def _record_flat_parameter(self, handle: Any) -> None:
        for parameter, view in iterate_flat_parts(handle, handle.flat_param.detach()):
            self._recorder.record_gathered(parameter, view)


def iterate_flat_parts(handle: Any, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that an optimizer of FSDP1 has, with its part of the whole flat tensor.

    That is the flat parameter itself, or each original one with `use_orig_params`.
    """
    originals: Any = handle.flat_param._params
    if originals is None:
        yield handle.flat_param, flat
        return
    with torch.no_grad():
        yield from zip(originals, handle._get_unflat_views(flat), strict=True)


def _read_gradient(parameter: Any) -> Tensor | None:
    """Return what is about to be reduced: the gradient, and what earlier backwards accumulated."""
    gathered = getattr(parameter, "_unsharded_param", None)
    gradient = None if gathered is None else gathered.grad
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    if accumulated is None or gradient is None:
        return gradient if accumulated is None else accumulated
    with torch.no_grad():  # DTensors add their shards only where dispatch reaches them
        return accumulated + gradient
