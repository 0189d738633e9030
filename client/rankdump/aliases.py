"""Names for readers that know an operator by the last component of its scope only. Pure.

MindSpore up to 2.2 numbered operators across the whole network, so that `Conv2d-op1` was one
operator (mindspore-dump.md 2.3 and 9.5). Here the first operator with a component keeps it, and
the next one gets the next number that is free. Not locked: one thread at a time asks.
"""

from __future__ import annotations

import re

# Names rise for ever in a loop without steps.
_MAX_NAMES = 1 << 17
_NUMBERED = re.compile(r"(.+-op)([0-9]{1,9})")
_GRADIENT = "Gradients/"


def gradient_of(parameter: str) -> str:
    """Return the name of a parameter's gradient: its scope would be lost with a short name."""
    return f"grad.{parameter}"


class Aliases:
    """Scope names with unique last components; a name keeps the one it got."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {"": ""}
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether so many operators were named that further ones keep their own names."""
        return len(self._names) >= _MAX_NAMES

    def known(self, name: str) -> str | None:
        """Return the alias of a name that was given one."""
        return self._names.get(name)

    def of(self, name: str) -> str:
        """Return the alias of a name; itself when its last component is free."""
        found = self._names.get(name)
        if found is not None or self.full:
            return name if found is None else found
        inner = name.removeprefix(_GRADIENT)
        scope, slash, last = name.rpartition("/")
        if inner != name and "/" not in inner:
            scope, slash, last = "", "", gradient_of(inner)
        alias = f"{scope}{slash}{self._free(last)}"
        self._names[name] = alias
        return alias

    def _free(self, component: str) -> str:
        """Take a component, or the next number of it that nobody has."""
        if component not in self._taken:
            self._taken.add(component)
            return component
        numbered = _NUMBERED.fullmatch(component)
        stem = numbered[1] if numbered else f"{component}-op"
        number = max(int(numbered[2]) if numbered else 0, self._next.get(stem, 0)) + 1
        while f"{stem}{number}" in self._taken:
            number += 1
        self._next[stem] = number
        self._taken.add(f"{stem}{number}")
        return f"{stem}{number}"
