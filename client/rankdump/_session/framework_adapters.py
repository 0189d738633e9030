"""Choice of the framework adapter for a model, for operators and for API calls. An adapter is
imported only when a model of its framework is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rankdump._core.recorder_protocol import (
    IterationHook,
    PulseRecorder,
    Recorder,
    TensorNameFinder,
    TensorSource,
)
from rankdump._frameworks.api_calls import ApiOptions, StepListener
from rankdump._frameworks.arrays import ArraySource
from rankdump._frameworks.model_observer import format_type, make_mark_target_error
from rankdump._recorder.run_card_recorder import read_random_states

if TYPE_CHECKING:
    from rankdump._frameworks.torch.step_replay import StepReplay

MODEL_TYPES = "torch.nn.Module, mindspore.nn.Cell"
"""Classes of models that can be observed, for messages."""


def make_hook(
    model: Any, recorder: Recorder, *, graph: int, inside_compiled: bool = False
) -> IterationHook | None:
    """Return the hook that observes a model; None, with one warning, for an unknown framework.

    `inside_compiled` also observes operators inside regions that torch.compile compiles.
    """
    if is_mindspore_cell(model):
        from rankdump._frameworks import mindspore

        if inside_compiled:
            recorder.warn_once("inside_compiled is not allowed for a Cell; allowed: torch models")

        return mindspore.MindSporeCellHook(model, recorder, graph=graph)
    if not is_torch_module(model):
        recorder.warn_once(
            f"cannot attach to an object of type {format_type(model)}; allowed: {MODEL_TYPES}"
        )
        return None
    from rankdump._frameworks import torch

    return torch.attach_model(model, recorder, graph=graph, inside_compiled=inside_compiled)


class OptimizerHook(IterationHook, Protocol):
    """Records the states of optimizers."""

    def add_optimizer(self, optimizer: object) -> bool:
        """Record the states of an optimizer from now on; return whether the object is
        an optimizer.
        """
        ...

    def find_optimizers(self) -> None:
        """Also record the states of the optimizers that step from now on."""
        ...


def make_optimizer_hook(
    recorder: Recorder, list_models: Callable[[], Iterable[TensorNameFinder]]
) -> OptimizerHook | None:
    """Return the hook that records the states of torch's optimizers; None if torch is not in use.

    `list_models` returns the attached models, whose parameters give the states their names.
    """
    if "torch" not in sys.modules:
        return None
    from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook

    return TorchOptimizerHook(recorder, list_models)


def make_data_parallel_hook(
    model: Any, recorder: Recorder, list_models: Callable[[], Iterable[TensorNameFinder]]
) -> IterationHook | None:
    """Return the hook that records the tensors that data parallelism gathers and reduces in a
    model; None if the model is not a torch module.
    """
    if not is_torch_module(model):
        return None
    from rankdump._frameworks.torch.data_parallel import DataParallelHook

    return DataParallelHook(model, recorder, list_models)


def find_model_name(model: Any) -> str:
    """Return the default name of a model: its class, without wrappers."""
    if not is_torch_module(model):
        return type(model).__name__
    from rankdump._frameworks import torch

    return torch.find_class_name(model)


def make_pulse_hook(
    model: Any, recorder: Recorder, pulses: PulseRecorder, *, graph: int, name: str
) -> IterationHook | None:
    """Return the hook that measures a model for the black box; None if it is not a torch module."""
    if not is_torch_module(model):
        return None
    from rankdump._frameworks.torch.pulse_hooks import TorchPulseHook

    return TorchPulseHook(model, recorder, pulses, graph=graph, name=name)


def make_perturbation_hook(model: Any, recorder: Recorder, *, graph: int) -> IterationHook | None:
    """Return the hook that moves the inputs of a model for a noise run; None if it is not a torch
    module.
    """
    if not is_torch_module(model):
        return None
    from rankdump._frameworks.torch.input_perturbation import TorchInputPerturbation

    return TorchInputPerturbation(model, recorder, graph=graph)


def make_step_replay(
    models: Sequence[Any],
    others: Iterable[object],
    step: Callable[[], Any],
    hide: Callable[[], AbstractContextManager[None]],
    *,
    iteration: int,
    rank: int,
) -> StepReplay:
    """Return the replay of a step that runs attached models of torch."""
    from rankdump._frameworks.torch.step_replay import StepReplay

    return StepReplay(
        models, others, step, hide, read_random_states, iteration=iteration, rank=rank
    )


class HookFactory(Protocol):
    """Creates the hook that observes a model."""

    def __call__(self, recorder: Recorder, *, graph: int) -> IterationHook | None:
        """Return the hook; None, after a warning, if there is nothing to observe."""
        ...


class OutermostCallWatch(Protocol):
    """Reports calls of models that are not inside another call."""

    def watch(self, model: Any) -> None:
        """Watch another model."""
        ...

    def remove(self) -> None:
        """Restore the models."""
        ...


def make_outermost_watch(model: Any, begins: Callable[[int], None]) -> OutermostCallWatch | None:
    """Return an observer of the outermost calls of models of the same framework as `model`;
    `begins` is called with the model's number.

    The result is None for an unknown framework.
    """
    if is_mindspore_cell(model):
        from rankdump._frameworks import mindspore

        return mindspore.MindSporeOutermostWatch(begins)
    if not is_torch_module(model):
        return None
    from rankdump._frameworks import torch

    return torch.TorchOutermostWatch(begins)


def mark_model(target: object, enabled: object) -> None:
    """Mark a model with everything inside it for `dump_mode` 2, or remove the mark.

    ValueError if `target` is of an unknown framework, or `enabled` is not a bool.
    """
    if is_mindspore_cell(target):
        from rankdump._frameworks import mindspore

        mindspore.set_dump(target, enabled)
        return
    if not is_torch_module(target):
        raise make_mark_target_error(target, MODEL_TYPES)
    from rankdump._frameworks import torch

    torch.set_dump(target, enabled)


def make_array_source(array: Any) -> TensorSource | str | None:
    """Return the source of an array, or the reason why it cannot be read.

    The result is None for a distributed tensor that this rank has no part of.

    A torch tensor is read by torch's adapter: numpy has no bfloat16 and rejects tensors with
    gradients.
    """
    if _is_torch_tensor(cast("type[object]", type(array))):
        from rankdump._frameworks.torch.tensors import make_torch_source

        return make_torch_source(array)
    return ArraySource(array)


# The cache is small because a script passes arrays of few classes.
@lru_cache(maxsize=64)
def _is_torch_tensor(kind: type) -> bool:
    """Return whether a class is torch's tensor or derived from it; torch need not be installed."""
    return any(base.__name__ == "Tensor" and base.__module__ == "torch" for base in kind.__mro__)


def is_torch_module(value: object) -> bool:
    """Return whether a value is a torch module; torch need not be installed."""
    return _has_base_in(value, "torch.nn.modules.module")


def is_mindspore_cell(value: object) -> bool:
    """Return whether a value is a MindSpore cell; MindSpore need not be installed."""
    return _has_base_in(value, "mindspore.nn.cell")


def _has_base_in(value: object, module: str) -> bool:
    # Classes are compared by name, so that a job that does not use a framework need not import it.
    return any(base.__module__ == module for base in type(value).__mro__)


class ApiIterationHook(IterationHook, Protocol):
    """Hook that counts API calls from its construction on, and records the tensors that they read
    and wrote.
    """

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Record with this recorder and these options from now on; call numbers continue."""
        ...


class ModelStepWatch(Protocol):
    """Reports the calls and steps of a model to a listener until `remove`."""

    def has_optimizer(self) -> bool:
        """Return whether there is an optimizer whose steps can be observed."""
        ...

    def remove(self) -> None:
        """Restore model and framework."""
        ...


class ApiFramework(Protocol):
    """Functions of a framework for API dumps: a module `api_framework` of its adapter."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a module has it as a constant
        """Name of the framework in file names: `torch` or `mindspore`."""
        ...

    def api_hook(
        self, model: Any, recorder: Recorder, *, graph: int, options: ApiOptions
    ) -> ApiIterationHook:
        """Return the hook that observes a model's API calls and counts them from now on."""
        ...

    def without_dropout(self, model: Any) -> int:
        """Turn off the dropout layers of a model; return how many there are."""
        ...

    def save_state(self, model: Any, folder: Path) -> None:
        """Write the state of a model to a file in the framework's own format."""
        ...

    def watch_steps(self, model: Any, listener: StepListener) -> ModelStepWatch:
        """Report the model's calls and its optimizers' steps to a listener."""
        ...


def find_api_framework(model: Any) -> ApiFramework | None:
    """Return the API functions of a model's framework; None for an unknown framework."""
    if is_torch_module(model):
        from rankdump._frameworks.torch import api_framework

        return api_framework
    if is_mindspore_cell(model):
        from rankdump._frameworks.mindspore import api_framework

        return api_framework
    return None
