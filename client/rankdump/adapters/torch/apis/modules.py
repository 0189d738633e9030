"""Which modules of a model are calls by themselves, which only have a mark, and which hide all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch.nn import Module

from rankdump.adapters.torch.apis.names import Api, module_api
from rankdump.adapters.torch.scopes import FUSED, Operator, Tree, tree_of


@dataclass(frozen=True, slots=True)
class Role:
    """What a call of a module stands for."""

    layer: str
    """Path of the module, with dots; empty for the model itself."""
    api: Api | None
    """It is a call by itself."""
    hides: bool
    """Functions that are called inside it are no calls of their own."""


def observable(model: Module) -> Tree:
    """Return the modules of a model of which something is to be said, and what is not seen.

    What stands inside a compiled region is part of it, and runs as it was compiled.
    """
    tree = tree_of(model)
    compiled = set(_within(each for each in tree.operators if each.boundary))
    bounded = {id(each.module) for each in tree.operators if each.boundary}
    operators = [
        each
        for each in (*tree.operators, *tree.fused)
        if id(each.module) not in compiled and (each.boundary or id(each.module) not in bounded)
    ]
    notes = tuple(note for note in tree.notes if note != FUSED)
    return replace(tree, operators=tuple(operators), notes=notes)


def role_of(operator: Operator) -> Role:
    """Return what calls of an observed module stand for."""
    components = operator.scope.path.split("/")[1:]
    layer = ".".join(each.rpartition("-")[0] for each in components)
    called = module_api(operator.module)
    return Role(layer, called, called is not None or operator.boundary)


def _within(boundaries: Iterable[Operator]) -> Iterator[int]:
    for boundary in boundaries:
        for module in boundary.module.modules():
            if module is not boundary.module:
                yield id(module)
