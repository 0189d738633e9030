"""Hook of one attached model for API dumps: composition root of the parts that observe API calls,
and the pause of that observation within optimizer steps.

Calls within an optimizer's step are not the script's. With a closure the closure's calls are; then
the frames show whose call it is.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankdump._core.recorder_protocol import Recorder
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.apis.api_recorder import TorchApiRecorder
from rankdump._frameworks.torch.apis.call_observer import TorchApiCallObserver, build_observed_tree
from rankdump._frameworks.torch.apis.call_sites import CallSites
from rankdump._frameworks.torch.apis.function_patches import OperatorPatch
from rankdump._frameworks.torch.collectives import CollectiveSubscription
from rankdump._frameworks.torch.internals import is_tracing, read_structure
from rankdump._frameworks.torch.module_hooks import (
    ModuleHooks,
    exclude_from_compilation,
    run_shielded,
)
from rankdump._frameworks.torch.tensors import TorchObserver

# torch's stubs leave an optimizer's hooks untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


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
        # The optimizer itself is the first argument, a closure the next one.
        if not is_tracing() and len(args) < 2 and not kwargs:
            self._calls.pause()

    @exclude_from_compilation
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_tracing():
            self._calls.resume()


class TorchApiHook:
    """Hook of one attached model and all API calls of its process; counts from its construction on.

    In iterations that are not armed it only counts. Another thread is observed from its first call
    of one of the model's modules.
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
            # Outside of the block that disables modes: it restores the modes that it found.
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
        # Read after installation: replaced calls of modules are part of the structure.
        self._structure = read_structure(self._model)

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.remove()
