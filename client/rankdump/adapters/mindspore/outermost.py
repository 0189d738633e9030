"""Tells of calls of models that are not inside another call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankdump.adapters.mindspore.interception import INTERCEPTION
from rankdump.adapters.mindspore.listener import Arguments, Keywords, Listener


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.repeating = 0


class Outermost(Listener):
    """Watches models until `remove`; calls of one inside another's do not count."""

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` is given the number of the model, before anything of its call is observed."""
        self._begins = begins
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._thread = _Thread()
        INTERCEPTION.listen(self, first=True)

    def watch(self, model: Any) -> None:
        """Watch a model too; it has the next number, from 0."""
        self._numbers.setdefault(id(model), (len(self._numbers), model))

    def remove(self) -> None:
        """Leave MindSpore as it was before."""
        INTERCEPTION.leave(self)

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Tell of an outermost call; one that repeats a forward is none."""
        known = self._numbers.get(id(cell))
        thread = self._thread
        if known is None or thread.repeating:
            return None
        thread.depth += 1
        if thread.depth == 1:
            self._begins(known[0])
        return known

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Count a call out."""
        if token is not None:
            self._thread.depth -= 1

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take note that a forward is repeated on this thread."""
        if not again:
            return bool
        self._thread.repeating += 1
        return self._repeated

    def _repeated(self) -> None:
        self._thread.repeating -= 1
