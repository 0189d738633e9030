"""Puts the parts of the adapter together for one model. Composition root."""

from __future__ import annotations

from torch.nn import Module

from rankdump.adapters.torch.calls import Calls
from rankdump.adapters.torch.describing import Describer
from rankdump.adapters.torch.gradients import Gradients
from rankdump.adapters.torch.guard import shielded
from rankdump.adapters.torch.internals import structure_of
from rankdump.adapters.torch.listening import Listening
from rankdump.adapters.torch.marks import Marking
from rankdump.adapters.torch.modules import Installation
from rankdump.adapters.torch.numbering import Numbering
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.parameters import Parameters
from rankdump.adapters.torch.scopes import Tree, tree_of
from rankdump.values import IterationHook, Recorder


def attach(model: Module, recorder: Recorder, graph: int) -> IterationHook:
    """Observe a model from its next armed iteration on."""
    return TorchHook(model, recorder, graph)


class TorchHook:
    """One attached model; costs nothing in iterations that are not armed."""

    def __init__(self, model: Module, recorder: Recorder, graph: int) -> None:
        self._model = model
        self._observer = Observer(recorder, graph)
        self._numbering = Numbering()
        self._describer = Describer(self._observer)
        self._gradients = Gradients(self._observer, self._describer)
        self._marking = Marking(model, self._observer)
        self._calls = Calls(
            self._observer, self._numbering, self._gradients, self._describer, self._marking
        )
        self._parameters = Parameters(model, self._observer)
        self._installed: Installation | None = None
        self._structure: list[object] | None = None
        self._iteration = -1
        self._listening = Listening(model, self._observer)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install the hooks for an armed iteration, remove them for any other.

        An iteration may be armed and disarmed several times: its calls are numbered on.
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._numbering.restart()
            self._parameters.restart()
        self._listening.refresh()
        shielded(self._arm if armed else self._disarm, self._observer.failed)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Hand over parameters, buffers, and gradients that no optimizer used."""
        if armed:
            shielded(self._marking.refresh, self._observer.failed)
            shielded(self._parameters.finish, self._observer.failed)
            # Those that only the iteration gave a shape.
            shielded(self._describe_parameters, self._observer.failed)
        self._describer.forget()
        shielded(self._gradients.release, self._observer.failed)

    def detach(self) -> None:
        """Leave the model as it was before."""
        shielded(self._disarm, self._observer.failed)
        self._numbering.restart()
        self._listening.stop()

    def _arm(self) -> None:
        self._calls.restart()
        self._describer.forget()
        structure = structure_of(self._model)
        self._parameters.start(structure)
        # The hooks that are in place keep alive what the structure knows by identity.
        if self._installed is None or structure is None or structure != self._structure:
            self._install(tree_of(self._model))
            # Hooks that stand for a compiled region are part of it.
            self._structure = structure_of(self._model)
        else:
            self._marking.refresh()
        self._describe_parameters()

    def _install(self, tree: Tree) -> None:
        for note in tree.notes:
            self._observer.recorder.warn_once(note)
        self._marking.tell(tree)
        if self._installed is None or not self._installed.tree.same_as(tree):
            self._uninstall()
            self._installed = Installation(tree, self._calls)

    def _disarm(self) -> None:
        self._uninstall()
        self._calls.restart()
        self._parameters.stop()
        self._gradients.release()
        self._describer.forget()

    def _describe_parameters(self) -> None:
        if self._describer.active:
            self._describer.parameters(self._parameters.named())

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.remove()
