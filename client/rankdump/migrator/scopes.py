"""Which calls `api_dump_start` asks for by `mode` and `scope`, and what of it never came.

A scope is asked once for each forward call, in the order of the calls; the backward of a call
follows it. Names are those of `ApiCall.stem`: `NN_Conv2d_0`. Pure; calls may come from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rankdump.contract.layout.api_name import ApiCall


class Scope(Protocol):
    """The calls of one `api_dump_start`."""

    def holds(self, call: ApiCall) -> bool:
        """Return whether a forward call that begins now is dumped."""
        ...

    def missing(self) -> tuple[str, ...]:
        """Return what is asked for and has not come so far, a sentence each."""
        ...


class Everything:
    """`all`."""

    def holds(self, call: ApiCall) -> bool:
        """Return that it is dumped."""
        return True

    def missing(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()


class Listed:
    """`list`: calls by their exact names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._waiting = dict.fromkeys(names)

    def holds(self, call: ApiCall) -> bool:
        """Return whether its name is in the list."""
        stem = call.stem
        if stem not in self._names:
            return False
        self._waiting.pop(stem, None)
        return True

    def missing(self) -> tuple[str, ...]:
        """Return each name that no call had."""
        return tuple(f"there was no call {name}" for name in self._waiting)


class Range:
    """`range`: everything from one call to another, both included, once."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last = first, last
        self._begun = self._over = self._early = False

    def holds(self, call: ApiCall) -> bool:
        """Return whether it lies in the range."""
        if self._over:
            return False
        stem = call.stem
        if not self._begun:
            self._begun = stem == self._first
            self._early = self._early or (stem == self._last and not self._begun)
        if self._begun:
            self._over = stem == self._last
        return self._begun

    def missing(self) -> tuple[str, ...]:
        """Return which of its ends did not come, or came in the wrong order."""
        found: list[str] = []
        if not self._begun:
            found.append(f"the range's first call {self._first} did not come")
        if self._early:
            found.append(f"the range's last call {self._last} came before its first {self._first}")
        elif not self._over:
            found.append(f"the range's last call {self._last} did not come")
        return tuple(found)


class Containing:
    """`api_list`: calls whose names contain a text, in whatever case."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text.lower() for text in texts)
        self._waiting = {text.lower(): text for text in texts}

    def holds(self, call: ApiCall) -> bool:
        """Return whether its name contains any of the texts."""
        name = call.stem.lower()
        matched = [text for text in self._texts if text in name]
        for text in matched:
            self._waiting.pop(text, None)
        return bool(matched)

    def missing(self) -> tuple[str, ...]:
        """Return each text that was in no name."""
        return tuple(f"no call's name contains {text!r}" for text in self._waiting.values())


def scope_of(mode: str, scope: Sequence[str]) -> Scope:
    """Return the calls that a mode and a scope mean; both were checked."""
    if mode == "list":
        return Listed(scope)
    if mode == "range":
        return Range(*scope)
    return Containing(scope) if mode == "api_list" else Everything()
