"""Section of a configuration: typed reading of one JSON object, with errors that name file, key and
value, and notes for its author on surprising values. Pure.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rankdump.errors import MISSING_VALUE, ConfigError, UnknownKey


def _make_short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlevel = 2
    return short


_SHORT_REPR = _make_short_repr()


class ConfigNotes:
    """Sentences about surprising values, each only once, in the order in which they were added."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """All sentences so far."""
        return tuple(self._texts)

    def add(self, key: str, value: object, reason: str) -> None:
        """Add a note on a key's value; `reason` is a phrase that begins with a verb."""
        shown = "missing;" if value is MISSING_VALUE else _SHORT_REPR.repr(value)
        self._texts[f"{escape_key(key)}: {shown} {reason}"] = None


def escape_key(key: str) -> str:
    """Return a key as a message shows it, without characters that cannot be printed."""
    return key if key.isprintable() else ascii(key)[1:-1]


def format_choices(words: Sequence[str]) -> str:
    """Return the allowed words of a key for an error.

    >>> format_choices(("input", "output", "all"))
    '"input", "output" or "all"'
    """
    *first, last = (f'"{word}"' for word in words)
    return f"{', '.join(first)} or {last}"


def describe_unknown_key(key: str, known: Collection[str]) -> str:
    """Return the phrase about an unknown key, with the most similar known key."""
    nearest = difflib.get_close_matches(key.lower(), known, n=1)
    return "there is no such key" + (f"; the nearest is {nearest[0]}" if nearest else "")


_UINT64_LIMIT = 1 << 64
_UINT32_MASK = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """One JSON object of a configuration, with its file, its name and the notes.

    Each `read_` method takes a default for an optional key; a key without a default is required.
    """

    file: str
    name: str
    values: Mapping[str, object]
    notes: ConfigNotes

    @staticmethod
    def from_body(
        body: Mapping[str, object], name: str, *, file: str, notes: ConfigNotes
    ) -> ConfigSection:
        """Return the section with this name; ConfigError if it is not an object."""
        values = body.get(name, MISSING_VALUE)
        if not isinstance(values, dict):
            raise ConfigError(file, name, values, "an object")
        return ConfigSection(file, name, cast("dict[str, object]", values), notes)

    def make_part(self, place: str, value: object) -> ConfigSection | None:
        """Return the section at a key, or at an element of its value; None if that is not an
        object.
        """
        if not isinstance(value, dict):
            return None
        values = cast("dict[str, object]", value)
        return ConfigSection(self.file, f"{self.name}.{place}", values, self.notes)

    def make_error(self, key: str, allowed: str) -> ConfigError:
        """Return the error for the value of a key, with what is allowed."""
        return self.make_part_error(key, self.values.get(key, MISSING_VALUE), allowed)

    def make_part_error(self, place: str, value: object, allowed: str) -> ConfigError:
        """Return the error for an element of a key's value, with what is allowed."""
        return ConfigError(self.file, f"{self.name}.{place}", value, allowed)

    def add_note(self, key: str, reason: str, part: object = MISSING_VALUE) -> None:
        """Add a note on a key's value, or on a part of it."""
        value = self.values.get(key, MISSING_VALUE) if part is MISSING_VALUE else part
        self.notes.add(f"{self.name}.{key}", value, reason)

    def require_keys(self, allowed: Mapping[str, str]) -> None:
        """Raise ConfigError for the first of these keys that is missing."""
        for key, text in allowed.items():
            if key not in self.values:
                raise self.make_error(key, text)

    def reject_unknown_keys(self, known: Sequence[str]) -> None:
        """Raise ConfigError for the first unknown key, with the most similar known key."""
        for key in self.values:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
                raise self.make_part_error(key, UnknownKey(nearest), ", ".join(known))

    def read_count(self, key: str, allowed: str, default: int | None = None) -> int:
        """Return the unsigned 32-bit integer at a key.

        As in MindSpore, only the low 32 bits of a 64-bit literal are kept, and `1.0`, `true` and
        `-1` are rejected.
        """
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _UINT64_LIMIT:
            raise self.make_error(key, allowed)
        number = value & _UINT32_MASK
        if number != value:
            self.add_note(key, f"is cut to its low 32 bits and read as {number}")
        return number

    def read_number_among(
        self, key: str, among: Sequence[int], allowed: str, default: int | None = None
    ) -> int:
        """Return the unsigned integer at a key, which must be one of `among`."""
        number = self.read_count(key, allowed, default)
        if number not in among:
            raise self.make_error(key, allowed)
        return number

    def read_text(self, key: str, allowed: str, default: str | None = None) -> str:
        """Return the string at a key."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.make_error(key, allowed)
        return value

    def read_choice(self, key: str, among: Sequence[str], *, default: str | None = None) -> str:
        """Return the string at a key, which must be one of `among`."""
        allowed = format_choices(among)
        value = self.read_text(key, allowed, default)
        if value not in among:
            raise self.make_error(key, allowed)
        return value

    def read_flag(self, key: str, default: bool | None = None) -> bool:
        """Return the boolean at a key."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.make_error(key, "true or false")
        return value

    def read_array(self, key: str, allowed: str) -> list[object]:
        """Return the elements of the array at a key."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.make_error(key, allowed)
        return cast("list[object]", value)

    def read_integer(self, key: str, low: int, high: int, *, allowed: str, default: int) -> int:
        """Return the integer at a key, which must be within the limits."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.make_error(key, allowed)
        return value

    def read_number(
        self, key: str, *, low: float, high: float, allowed: str, default: float
    ) -> float:
        """Return the finite number at a key, which must be within the limits."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.make_error(key, allowed)
        # The value is compared before it is converted, because an integer with a thousand digits
        # cannot become a float.
        if not low <= value <= high or math.isnan(value):
            raise self.make_error(key, allowed)
        return float(value)
