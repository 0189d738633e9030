"""Which forward call a recomputation repeats: the next one of its region, in order. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Call = TypeVar("_Call")


class _Thread(threading.local, Generic[_Call]):
    def __init__(self) -> None:
        self.open: list[list[_Call]] = []
        """Calls of the regions that run now, outermost first."""
        self.repeats: list[deque[_Call]] = []
        """Calls still to be repeated, of the regions that run again."""


class Regions(Generic[_Call]):
    """The recomputed regions of one model."""

    def __init__(self) -> None:
        self._ended: dict[int, list[list[_Call]]] = {}
        self._thread: _Thread[_Call] = _Thread()

    def begin(self, region: int, *, again: bool) -> Callable[[], object]:
        """Begin a region, or its repetition; what is returned ends it on the same thread."""
        thread = self._thread
        if again:
            # One that ran several times is repeated in reverse.
            ended = self._ended.get(region)
            thread.repeats.append(deque(ended.pop() if ended else ()))
            return thread.repeats.pop
        calls: list[_Call] = []
        self._ended.setdefault(region, []).append(calls)
        thread.open.append(calls)
        return thread.open.pop

    @property
    def recomputing(self) -> bool:
        """Whether what runs on this thread is a repetition."""
        return bool(self._thread.repeats)

    def note(self, call: _Call) -> None:
        """Take a forward call, which may be repeated later."""
        for calls in self._thread.open:
            calls.append(call)

    def repeated(self, same: Callable[[_Call], bool]) -> _Call | None:
        """Return the forward call that is repeated now, if the next one of the region is alike."""
        if not self._thread.repeats:
            return None
        calls = self._thread.repeats[-1]
        return calls.popleft() if calls and same(calls[0]) else None

    def clear(self) -> None:
        """Forget regions whose backward never came."""
        self._ended.clear()
