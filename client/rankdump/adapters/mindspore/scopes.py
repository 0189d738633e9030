"""The cells of a model and where each one stands: what operators are named by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rankdump.adapters.mindspore.framework import cells_of, own_parameters
from rankdump.hook import Scope, scope_of


@dataclass(frozen=True, slots=True)
class CellOperator:
    """A cell of a model, and where it stands; it is kept, so that its identity stays its own."""

    cell: Any
    scope: Scope


def operators_of(model: Any) -> dict[int, CellOperator]:
    """Return the cells of a model by identity; one in two places has the first one's name."""
    classes = {path: type(cell).__name__ for path, cell in cells_of(model)}
    return {id(cell): CellOperator(cell, _scope(path, classes)) for path, cell in cells_of(model)}


def parameter_names(model: Any, chosen: Callable[[Any], bool]) -> Iterator[str]:
    """Return the names of parameters that belong to one of the chosen cells itself."""
    for _, cell in cells_of(model):
        if chosen(cell):
            for parameter in own_parameters(cell):
                yield parameter.name


def _scope(path: str, classes: dict[str, str]) -> Scope:
    parts = [("", classes[""])]
    names = path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        # A name with a dot in it is no path to a cell of its own.
        parts.append((name, classes.get(".".join(names[:depth]), "")))
    return scope_of(parts)
