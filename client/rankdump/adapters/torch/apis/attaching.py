"""Puts the parts that observe calls of an API together for one model. Composition root."""

from __future__ import annotations

from torch.nn import Module

from rankdump.adapters.api_calls import ApiOptions
from rankdump.adapters.torch.apis.calls import ApiCalls
from rankdump.adapters.torch.apis.modules import observable
from rankdump.adapters.torch.apis.operators import Operators
from rankdump.adapters.torch.apis.optimizers import OptimizerSteps
from rankdump.adapters.torch.apis.recording import Records
from rankdump.adapters.torch.apis.sites import Sites
from rankdump.adapters.torch.guard import shielded
from rankdump.adapters.torch.internals import structure_of
from rankdump.adapters.torch.listening import Listening
from rankdump.adapters.torch.modules import Installation
from rankdump.adapters.torch.observing import Observer
from rankdump.values import Recorder


class ApiHook:
    """One attached model, and all that its process calls; calls are counted from now on.

    Of iterations that are not armed only the numbers of calls are kept. Another thread is
    listened to from the first call of one of the model's modules in it.
    """

    def __init__(
        self, model: Module, recorder: Recorder, graph: int, options: ApiOptions | None = None
    ) -> None:
        options = options or ApiOptions()
        self._model = model
        self._observer = Observer(recorder, graph)
        self._sites = Sites(filtered=options.filter_stack)
        self._records = Records(self._observer, options, self._sites)
        self._listening = Listening(model, self._observer)
        self._calls = ApiCalls(
            self._observer, self._sites, self._records, self._listening.model_called
        )
        self._steps = OptimizerSteps(self._calls)
        self._operators = Operators()
        self._installed: Installation | None = None
        self._structure: list[object] | None = None
        self._iteration = -1
        self._refresh()

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Hand over to this recorder from now on, as these options say; numbers go on."""
        self._listening.record_with(recorder)
        self._sites.refilter(options.filter_stack)
        self._records.follow(options)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Look at the model again; an iteration may be armed and disarmed several times."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._records.restart()
        self._listening.refresh()
        self._refresh()

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Leave the tensors of the iteration."""
        shielded(self._records.release, self._observer.failed)

    def detach(self) -> None:
        """Leave the model and torch as they were before."""
        self._calls.mode.retire()
        self._steps.remove()
        self._operators.remove()
        self._uninstall()
        self._records.restart()
        self._records.release()
        self._sites.forget()
        self._listening.stop()

    def _refresh(self) -> None:
        try:
            self._install()
            # Outside of what keeps modes away: it would put back those that it found.
            self._calls.restart()
        except Exception as error:
            self._observer.failed(error)

    def _install(self) -> None:
        structure = structure_of(self._model)
        if self._installed is not None and structure is not None and structure == self._structure:
            return
        tree = observable(self._model)
        for note in tree.notes:
            self._observer.recorder.warn_once(note)
        if self._installed is None or not self._installed.tree.same_as(tree):
            self._uninstall()
            self._installed = Installation(tree, self._calls)
        # What stands in the place of a module's call is part of it.
        self._structure = structure_of(self._model)

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.remove()
