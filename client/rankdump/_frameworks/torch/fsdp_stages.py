"""What FSDP2 computes with between its collectives: parameters as a forward reads them, after they
were gathered, and gradients before they are reduced. Recorded only when a script asks for them,
because each is as large as the whole parameter.

They are inputs of the parameter and of its gradient, whose outputs are the shards: the value after
the step, and the reduced gradient. Groups of parameters call their methods by name; in armed
iterations two of them are replaced on each group (torch.distributed.fsdp._fully_shard,
FSDPParamGroup, torch 2.4 to 2.13). Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._frameworks.operator_names import PARAMETER_TYPE, make_gradient_name
from rankdump._frameworks.torch.fsdp import iterate_fsdp2_groups
from rankdump._frameworks.torch.internals import is_tracing
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.tensors import TorchObserver, make_torch_source

_GATHERING, _REDUCTION = "pre_forward", "post_backward"


class Fsdp2StageHook:
    """Records the unsharded parameters and gradients of one model."""

    def __init__(
        self,
        model: Module,
        recorder: Recorder,
        list_models: Callable[[], Iterable[TensorNameFinder]],
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._list_models = list_models
        self._names: dict[int, tuple[int, str]] = {}
        self._replaced: list[tuple[Any, str, object]] = []
        self._recorded: set[str] = set()
        self._iteration = -1

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Replace the methods for an armed iteration, restore them for any other."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._recorded.clear()
        run_shielded(self._install if armed else self._restore, self._report_failure)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Do nothing: everything was recorded when it was there."""

    def detach(self) -> None:
        """Restore the methods."""
        run_shielded(self._restore, self._report_failure)

    def _install(self) -> None:
        self._names = {
            id(tensor): (model.graph, name)
            for model in self._list_models()
            for name, tensor in model.iterate_named()
        }
        if self._replaced:
            return
        for group in iterate_fsdp2_groups(self._model):
            self._replace(group, _GATHERING, after=self._record_parameters)
            self._replace(group, _REDUCTION, before=self._record_gradients)

    def _restore(self) -> None:
        replaced, self._replaced = self._replaced, []
        for group, method, ours in replaced:
            if vars(group).get(method) is ours:
                delattr(group, method)
        self._names = {}

    def _replace(
        self,
        group: Any,
        method: str,
        *,
        before: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        original = getattr(group, method)

        @exclude_from_compilation
        def observed(*args: Any, **kwargs: Any) -> Any:
            if before is not None and not is_tracing():
                run_shielded(before, self._report_failure, group)
            result = original(*args, **kwargs)
            if after is not None and not is_tracing():
                run_shielded(after, self._report_failure, group)
            return result

        setattr(group, method, observed)
        self._replaced.append((group, method, observed))

    def _record_parameters(self, group: Any) -> None:
        for each in group.fsdp_params:
            gathered = getattr(each, "_unsharded_param", None)
            place = self._names.get(id(each.sharded_param))
            if gathered is not None and place is not None:
                self._record(*place, "unsharded", gathered)

    def _record_gradients(self, group: Any) -> None:
        if not group.reduce_grads:
            return  # another backward adds to them
        for each in group.fsdp_params:
            gradient = _read_gradient(each)
            place = self._names.get(id(each.sharded_param))
            if gradient is not None and place is not None:
                graph, name = place
                self._record(graph, make_gradient_name(name), "unreduced", gradient)

    def _record(self, graph: int, name: str, argument: str, tensor: Tensor) -> None:
        """Record a tensor once in an iteration, as the input of an operator of its name."""
        observer, side = TorchObserver(self._recorder, graph), TensorSide.INPUT
        if name not in self._recorded and observer.is_selected(name, side):
            self._recorded.add(name)
            observer.record_tensor(
                PARAMETER_TYPE, name, side, 0, argument, make_torch_source, tensor, state=True
            )
            observer.end_call(name)

    def _report_failure(self, error: Exception) -> None:
        TorchObserver(self._recorder, 0).report_failure(error)


def _read_gradient(parameter: Any) -> Tensor | None:
    """Return what is about to be reduced: the gradient, and what earlier backwards accumulated."""
    gathered = getattr(parameter, "_unsharded_param", None)
    gradient = None if gathered is None else gathered.grad
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    if accumulated is None or gradient is None:
        return gradient if accumulated is None else accumulated
    with torch.no_grad():  # DTensors add their shards only where dispatch reaches them
        return accumulated + gradient
