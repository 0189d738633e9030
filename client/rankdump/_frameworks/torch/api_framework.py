"""API dumps of torch (protocol `ApiFramework`): the hook of one attached model, which is composed
of the parts that observe API calls; the saved state of a model; and the observer of the calls of a
model and the steps of its optimizers.

Calls within the step of an optimizer are not the script's. If the step has a closure, the closure's
calls are the script's; then the frames of the stack show whose call it is.

torch keeps no list of optimizers. An optimizer that shares a parameter with the model belongs to
the model; if there is none, as when an optimizer has copies of the weights, any optimizer counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankdump._core.recorder_protocol import Recorder
from rankdump._frameworks.api_calls import ApiOptions, ApiStepWatch, StepListener
from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.torch.apis.api_recorder import TorchApiRecorder
from rankdump._frameworks.torch.apis.call_observer import TorchApiCallObserver, build_observed_tree
from rankdump._frameworks.torch.apis.call_sites import CallSites
from rankdump._frameworks.torch.apis.function_patches import OperatorPatch, without_dropout
from rankdump._frameworks.torch.collectives import CollectiveSubscription
from rankdump._frameworks.torch.internals import (
    find_backward_step,
    find_objects,
    is_tracing,
    read_structure,
)
from rankdump._frameworks.torch.module_hooks import (
    ModuleHooks,
    TorchOutermostWatch,
    exclude_from_compilation,
    run_shielded,
)
from rankdump._frameworks.torch.tensors import TorchObserver

# torch's stubs leave optimizers, their hooks and handles untyped.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

__all__ = ["NAME", "api_hook", "save_state", "watch_steps", "without_dropout"]

NAME = "torch"
_STATE_FILE = "pt_net.pth"


class OptimizerPause:
    """Pauses an observer during the steps of all optimizers of the process, until `remove`."""

    def __init__(self, calls: TorchApiCallObserver) -> None:
        self._calls = calls
        self._handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def remove(self) -> None:
        """Remove the hooks from optimizers."""
        for handle in self._handles:
            handle.remove()

    @exclude_from_compilation
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The first argument is the optimizer, a closure would be the next one.
        if not is_tracing() and len(args) < 2 and not kwargs:
            self._calls.pause()

    @exclude_from_compilation
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_tracing():
            self._calls.resume()


class TorchApiHook:
    """Hook of one attached model and all API calls of its process; counts from its construction on.

    In iterations that are not armed it only counts. Any other thread is observed from its first
    call of a module of the model on.
    """

    def __init__(
        self, model: Module, recorder: Recorder, graph: int, options: ApiOptions | None = None
    ) -> None:
        options = options or ApiOptions()
        self._model = model
        self._observer = TorchObserver(recorder, graph)
        self._sites = CallSites(filtered=options.filter_stack)
        self._recorder = TorchApiRecorder(self._observer, options, self._sites)
        self._collectives = CollectiveSubscription(self._observer)
        self._calls = TorchApiCallObserver(self._observer, self._sites, self._recorder)
        self._optimizer_pause = OptimizerPause(self._calls)
        self._operators = OperatorPatch()
        self._installed: ModuleHooks | None = None
        self._structure: list[object] | None = None
        self._iteration = -1
        self._refresh()

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Record with this recorder and these options from now on; call numbers continue."""
        self._collectives.set_recorder(recorder)
        self._sites.set_filter(options.filter_stack)
        self._recorder.set_options(options)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Read the model's structure again; an iteration may be armed several times."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._recorder.restart()
        self._collectives.begin_iteration(iteration)
        self._refresh()

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Remove the hooks from tensors of the iteration."""
        self._collectives.end_iteration()
        run_shielded(self._recorder.remove_hooks, self._observer.report_failure)

    def detach(self) -> None:
        """Restore the model and torch."""
        self._calls.mode.retire()
        self._optimizer_pause.remove()
        self._operators.remove()
        self._uninstall()
        self._recorder.restart()
        self._recorder.remove_hooks()
        self._sites.clear()
        self._collectives.unsubscribe()

    def _refresh(self) -> None:
        try:
            self._install()
            # This is outside of the block that disables function modes, because that block restores
            # the modes that it found.
            self._calls.restart()
        except Exception as error:
            self._observer.report_failure(error)

    def _install(self) -> None:
        structure = read_structure(self._model)
        if self._installed is not None and structure is not None and structure == self._structure:
            return
        tree = build_observed_tree(self._model)
        for note in tree.notes:
            self._observer.recorder.warn_once(note)
        if self._installed is None or not self._installed.tree.has_same_modules(tree):
            self._uninstall()
            self._installed = ModuleHooks(tree, self._calls)
        # The structure is read after the installation, because replaced calls of modules are part
        # of it.
        self._structure = read_structure(self._model)

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.remove()


class TorchStepWatch(ApiStepWatch):
    """Reports the calls and steps of one torch model to a listener until `remove`."""

    def __init__(self, model: Module, listener: StepListener) -> None:
        super().__init__(model, listener)
        self._known_optimizers: dict[int, tuple[ref[Optimizer], bool]] = {}
        """Optimizers by identity, each with whether its steps count."""
        self._has_own_optimizer = False
        """Whether an optimizer that belongs to the model was seen."""
        self._outermost = TorchOutermostWatch(self._model_called)
        self._outermost.watch(model)
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._is_removed = False
        self._scaler_patch = AttributePatch(torch.amp.GradScaler, "step", self._wrap_scaler_step())
        self._scaler_patch.install()

    def remove(self) -> None:
        """Restore the model and torch."""
        self._outermost.remove()
        self._handle.remove()
        # Other code that patched the same method later still calls ours, which must then report
        # nothing.
        self._is_removed = True
        self._scaler_patch.remove()

    def _wrap_scaler_step(self) -> Callable[..., Any]:
        """Return a replacement of `GradScaler.step` that also reports steps that are skipped
        because gradients overflowed.
        """
        before: Callable[..., Any] = torch.amp.GradScaler.step

        @wraps(before)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = before(scaler, optimizer, *args, **kwargs)
            if not self._is_removed:
                self._note_step(optimizer)
            return result

        return step

    def _model_called(self, number: int) -> None:
        if find_backward_step() is not None:  # activation checkpointing repeats the call
            return
        parameters = self._model.parameters()
        self._report_call(
            trains=torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        )

    def _search_optimizer(self) -> bool:
        return any(True for _ in find_objects(Optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._note_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        known, counts = self._known_optimizers.get(id(optimizer), (None, False))
        if known is None or known() is not optimizer:
            counts = self._is_counted(optimizer)
        if counts:
            self._report_step()

    def _is_counted(self, optimizer: Optimizer) -> bool:
        """Return whether steps of an optimizer count; may search all objects of the process.

        The steps of any optimizer count until one that belongs to the model is seen; from then on
        only its steps count.
        """
        own = {id(parameter) for parameter in self._model.parameters()}
        shares = _shares_parameter(optimizer, own)
        if shares and not self._has_own_optimizer:
            self._has_own_optimizer = True
            self._known_optimizers.clear()
        counts = shares or not any(_shares_parameter(each, own) for each in find_objects(Optimizer))
        alive = {at: each for at, each in self._known_optimizers.items() if each[0]() is not None}
        self._known_optimizers = {**alive, id(optimizer): (ref(optimizer), counts)}
        return counts


def _shares_parameter(optimizer: Optimizer, own: set[int]) -> bool:
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


def api_hook(model: Module, recorder: Recorder, *, graph: int, options: ApiOptions) -> TorchApiHook:
    """Return the hook that observes the calls of a model's program, and counts them from now on."""
    return TorchApiHook(model, recorder, graph, options)


def save_state(model: Module, folder: Path) -> None:
    """Write the model's `state_dict` to `pt_net.pth`, over an earlier file."""
    path = folder / _STATE_FILE
    hidden = folder / f".{_STATE_FILE}.{os.getpid()}"
    try:
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
            torch.save(model.state_dict(), file)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def watch_steps(model: Module, listener: StepListener) -> TorchStepWatch:
    """Report the model's calls and its optimizers' steps to a listener."""
    return TorchStepWatch(model, listener)
