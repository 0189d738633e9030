"""Replacement of an attribute of a module, a class or an object of a framework; it can
be undone.
"""

from __future__ import annotations

from typing import Any

_INHERITED_ATTRIBUTE = object()
"""Marks an attribute that the owner only inherits."""


class AttributePatch:
    """An attribute that is replaced between `install` and `remove`."""

    def __init__(self, owner: Any, name: str, ours: object) -> None:
        self._owner, self._name, self._ours = owner, name, ours
        # The value is taken from the owner's dictionary: reading the attribute from a class would
        # not return the descriptor itself.
        self._own = vars(owner).get(name, _INHERITED_ATTRIBUTE)

    def install(self) -> None:
        """Replace the attribute."""
        setattr(self._owner, self._name, self._ours)

    def remove(self) -> None:
        """Restore the attribute, unless other code has replaced it meanwhile."""
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._own is _INHERITED_ATTRIBUTE:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
