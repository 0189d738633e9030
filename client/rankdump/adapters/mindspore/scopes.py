"""Names the cells of a model as MindSpore's own dump does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankdump.adapters.mindspore.framework import cells_of
from rankdump.hook import Scope, scope_of


@dataclass(frozen=True, slots=True)
class Operator:
    """A cell of a model, and where it stands; it is kept, so that its identity stays its own."""

    cell: Any
    scope: Scope


def operators_of(model: Any) -> dict[int, Operator]:
    """Return the cells of a model by identity; one in two places has the first one's name."""
    classes = {path: type(cell).__name__ for path, cell in cells_of(model)}
    return {id(cell): Operator(cell, _scope(path, classes)) for path, cell in cells_of(model)}


def _scope(path: str, classes: dict[str, str]) -> Scope:
    parts = [("", classes[""])]
    names = path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        # A name with a dot in it is no path to a cell of its own.
        parts.append((name, classes.get(".".join(names[:depth]), "")))
    return scope_of(parts)
