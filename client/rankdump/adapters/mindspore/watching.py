"""A listener that hears nothing: those that listen for little say only what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankdump.adapters.mindspore.catalogue import Api
from rankdump.adapters.mindspore.interception import Arguments, Keywords


class Deaf:
    """Passes over all that an interception tells."""

    def call_begins(self, api: Api, args: Arguments, kwargs: Keywords) -> object:
        """Pass over a call."""
        return None

    def call_ends(self, opened: object, result: object, *, raised: bool) -> None:
        """Pass over the end of a call."""

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Pass over a cell."""
        return None

    def cell_ends(self, opened: object, result: object, *, raised: bool) -> None:
        """Pass over the end of a cell."""

    def closes(self, cell: Any) -> bool:
        """Return False: the calls inside a cell are heard by others."""
        return False

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Pass over a recomputed region."""
        return bool

    def optimized(self, optimizer: Any) -> None:
        """Pass over an optimizer."""

    def compiled(self) -> None:
        """Pass over compiled code."""
