"""Remembers which modules a script marked with `set_dump`, and tells recorders what that means."""

from __future__ import annotations

import weakref

from torch.nn import Module

from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.scopes import Tree, names_within, tree_of


class Marks:
    """The marks of this process's modules; they keep no module alive."""

    def __init__(self) -> None:
        self._by_module: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        self.changes = 0
        """How often a mark was set."""

    def __len__(self) -> int:
        return len(self._by_module)

    def set(self, module: Module, enabled: bool) -> None:
        """Mark a module and all modules inside it, or take their marks away."""
        for inside in module.modules():
            self._by_module[inside] = enabled
        self.changes += 1

    def names(self, model: Module, tree: Tree) -> frozenset[str]:
        """Return the scopes of a model's marked operators, and the names of their own tensors."""
        if not any(self._by_module.values()):
            return frozenset()
        scopes = (each.scope.path for each in tree.operators if self._marked(each.module))
        return frozenset((*scopes, *names_within(model, self._marked)))

    def _marked(self, module: Module) -> bool:
        return self._by_module.get(module, False)


marks = Marks()
"""Of this process."""


def set_dump(module: object, enabled: object = True) -> None:
    """Mark a module and all modules inside it, or take their marks away; the last call counts.

    It takes effect with the next operator that is called. ValueError for anything but a module
    and a bool, as in MindSpore (mindspore-dump.md 1.12).
    """
    if not isinstance(module, Module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(f"set_dump: target of type {kind} is not allowed; a torch.nn.Module is")
    if not isinstance(enabled, bool):
        raise ValueError(f"set_dump: enabled={enabled!r} is not allowed; True and False are")
    marks.set(module, enabled)


class Marking:
    """Keeps one model's recorder up to date."""

    def __init__(self, model: Module, observer: Observer) -> None:
        self._model = model
        self._observer = observer
        self._told = 0

    def tell(self, tree: Tree) -> None:
        """Say which operators of the model are marked."""
        self._told = marks.changes
        self._observer.recorder.mark(self._observer.graph, marks.names(self._model, tree))

    def refresh(self) -> None:
        """Say it again if a mark was set since."""
        if self._told != marks.changes:
            self.tell(tree_of(self._model))
