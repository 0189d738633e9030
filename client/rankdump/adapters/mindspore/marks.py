"""Which cells a script marked for `dump_mode` 2, with `rankdump.set_dump` or MindSpore's own.

`mindspore.set_dump` leaves a flag on a cell and those inside it, and an attribute on primitives.
Both are part of what is compiled, so `rankdump.set_dump` keeps its marks beside the cells instead.
"""

from __future__ import annotations

import weakref
from typing import Any

from rankdump.adapters.mindspore.framework import Cell, cells_of, dump_flag, has_marked_primitive
from rankdump.adapters.mindspore.observing import Observer
from rankdump.adapters.mindspore.scopes import CellOperator, parameter_names


class CellMarks:
    """The marks of this process's cells; they keep no cell alive."""

    def __init__(self) -> None:
        # With each mark stands MindSpore's own flag of then: one that changed since is newer.
        self._by_cell: weakref.WeakKeyDictionary[Any, tuple[bool, bool | None]]
        self._by_cell = weakref.WeakKeyDictionary()
        self.changes = 0
        """How often a mark was set with `rankdump.set_dump`."""

    def set(self, cell: Any, enabled: bool) -> None:
        """Mark a cell and all cells inside it, or take their marks away."""
        for _, inside in cells_of(cell):
            self._by_cell[inside] = (enabled, dump_flag(inside))
        self.changes += 1

    def marked(self, cell: Any) -> bool:
        """Return whether a cell is marked; a primitive that MindSpore marked marks its cell."""
        flag = dump_flag(cell)
        enabled, flag_then = self._by_cell.get(cell, (None, None))
        if enabled is not None and flag == flag_then:
            return enabled
        return bool(flag) or has_marked_primitive(cell)


marks = CellMarks()
"""Of this process."""


def set_dump(cell: object, enabled: object = True) -> None:
    """Mark a cell and all cells inside it, or take their marks away; the last call counts.

    It takes effect with the next call of one of them. ValueError for anything but a cell and a
    bool, as in MindSpore (mindspore-dump.md 1.12).
    """
    if not isinstance(cell, Cell):
        kind = f"{type(cell).__module__}.{type(cell).__qualname__}"
        raise ValueError(f"set_dump: target of type {kind} is not allowed; a mindspore.nn.Cell is")
    if not isinstance(enabled, bool):
        raise ValueError(f"set_dump: enabled={enabled!r} is not allowed; True and False are")
    marks.set(cell, enabled)


class CellMarking:
    """Keeps one model's recorder up to date."""

    def __init__(self, model: Any, observer: Observer) -> None:
        self._model = model
        self._observer = observer
        self._marked: dict[int, bool] = {}
        self._changes = -1

    def tell(self, operators: dict[int, CellOperator]) -> None:
        """Say which operators of the model are marked, and which parameters."""
        self._changes = marks.changes
        self._marked = {number: marks.marked(each.cell) for number, each in operators.items()}
        scopes = {each.scope.path for number, each in operators.items() if self._marked[number]}
        names = scopes.union(parameter_names(self._model, marks.marked)) if scopes else scopes
        self._observer.recorder.mark(self._observer.graph, frozenset(names))

    def refresh(self, operators: dict[int, CellOperator], cell: Any = None) -> None:
        """Say it again if a mark was set since: of MindSpore's own, on this cell."""
        known = self._marked.get(id(cell))
        if self._changes != marks.changes or (known is not None and marks.marked(cell) != known):
            self.tell(operators)
