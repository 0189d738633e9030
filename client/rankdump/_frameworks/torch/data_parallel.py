"""Composition of the observers of data parallelism: what DistributedDataParallel and both kinds of
FSDP gather and reduce in one model. Recorded only when a script asks for it, because each tensor is
as large as the whole parameter; costs nothing in iterations that are not armed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.nn import Module

from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._frameworks.torch.fsdp_stages import FsdpStagePatch
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.module_tree import find_class_name
from rankdump._frameworks.torch.stage_recorder import StageRecorder
from rankdump._frameworks.torch.unreduced_gradients import UnreducedGradientObserver


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
        """Observe an armed iteration, and no other."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._recorder.restart()
        run_shielded(self._install if armed else self._restore, self._recorder.report_failure)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record what only the end of the iteration shows; all else was recorded before."""
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
