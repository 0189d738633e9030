"""Bounded caches on plain dictionaries, for keys without end, such as names with call numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

_KeyT = TypeVar("_KeyT", bound=Hashable)
_ValueT = TypeVar("_ValueT")


def remember(known: dict[_KeyT, _ValueT], key: _KeyT, value: _ValueT, limit: int) -> _ValueT:
    """Put a value into a dictionary, and return it; a dictionary that holds `limit` values is
    emptied first.

    Called only after a miss, so that a hit costs just one lookup: `known.get(key)`.
    """
    if len(known) >= limit:
        known.clear()
    known[key] = value
    return value


def look_up(
    known: dict[_KeyT, _ValueT], key: _KeyT, make: Callable[[], _ValueT], limit: int
) -> _ValueT:
    """Return the value of a key, which is made and remembered if it is missing; None counts as
    missing.
    """
    value = known.get(key)
    return remember(known, key, make(), limit) if value is None else value
