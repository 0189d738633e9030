"""Dictionaries as bounded caches: names with call numbers, for example, never end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

_KeyT = TypeVar("_KeyT", bound=Hashable)
_ValueT = TypeVar("_ValueT")


def remember(known: dict[_KeyT, _ValueT], key: _KeyT, value: _ValueT, limit: int) -> _ValueT:
    """Put a value into a dictionary, which is emptied first when it holds `limit` of them.

    A hit stays one lookup of a plain dictionary, `known.get(key)`: this is for the misses.
    """
    if len(known) >= limit:
        known.clear()
    known[key] = value
    return value


def look_up(
    known: dict[_KeyT, _ValueT], key: _KeyT, make: Callable[[], _ValueT], limit: int
) -> _ValueT:
    """Return the value of a key, or make it and remember it; None counts as missing."""
    value = known.get(key)
    return remember(known, key, make(), limit) if value is None else value
