"""Attributes of modules and classes that stand in for others, and give way again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_INHERITED = object()
"""Stands for what an owner did not have itself."""


@dataclass(frozen=True, slots=True)
class _Replaced:
    owner: Any
    name: str
    own: object
    ours: Callable[..., Any]


class Attributes:
    """Attributes to be replaced: all at once, and all at once put back."""

    def __init__(self) -> None:
        self._planned: dict[tuple[int, str], _Replaced] = {}

    def plan(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Replace an attribute from the next `install` on; the first plan for it counts."""
        own = _attributes(owner).get(name, _INHERITED)
        self._planned.setdefault((id(owner), name), _Replaced(owner, name, own, ours))

    def install(self) -> None:
        """Put what is planned in its place."""
        for planned in self._planned.values():
            setattr(planned.owner, planned.name, planned.ours)

    def remove(self) -> None:
        """Put back what was there, except where somebody else replaced it meanwhile."""
        for planned in self._planned.values():
            if _attributes(planned.owner).get(planned.name) is not planned.ours:
                continue
            if planned.own is _INHERITED:
                delattr(planned.owner, planned.name)
            else:
                setattr(planned.owner, planned.name, planned.own)


def _attributes(owner: Any) -> Mapping[str, object]:
    found: Mapping[str, object] = owner.__dict__
    return found
