"""Typed reading of one object in a configuration; every refusal names file, key and value. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rankdump.contract.errors import MISSING, ConfigError

_UINT64 = 1 << 64
_UINT32_MASK = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Section:
    """One JSON object, with where it stands.

    Each reader takes a default for an optional key; a key without one has to be there.
    """

    file: str
    name: str
    values: Mapping[str, object]

    @staticmethod
    def of(body: Mapping[str, object], name: str, *, file: str) -> Section:
        """Return the section of that name; ConfigError when it is no object."""
        values = body.get(name, MISSING)
        if not isinstance(values, dict):
            raise ConfigError(file, name, values, "an object")
        return Section(file, name, cast("dict[str, object]", values))

    def refusal(self, key: str, allowed: str) -> ConfigError:
        """Return the error that says what may stand at a key."""
        return ConfigError(self.file, f"{self.name}.{key}", self.values.get(key, MISSING), allowed)

    def require(self, allowed: Mapping[str, str]) -> None:
        """Raise for the first of these keys that is missing."""
        for key, text in allowed.items():
            if key not in self.values:
                raise self.refusal(key, text)

    def uint(self, key: str, among: Sequence[int], allowed: str, default: int | None = None) -> int:
        """Return an unsigned integer that is one of these.

        MindSpore keeps the low 32 bits of a 64-bit literal and refuses `1.0`, `true` and `-1`.
        """
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _UINT64:
            raise self.refusal(key, allowed)
        number = value & _UINT32_MASK
        if number not in among:
            raise self.refusal(key, allowed)
        return number

    def text(self, key: str, allowed: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, allowed)
        return value

    def choice(
        self, key: str, among: Sequence[str], *, default: str | None = None, note: str = ""
    ) -> str:
        """Return a string that is one of these; `note` ends the line of a refusal."""
        allowed = " or ".join(f'"{word}"' for word in among) + note
        value = self.text(key, allowed, default)
        if value not in among:
            raise self.refusal(key, allowed)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def items(self, key: str, allowed: str) -> list[object]:
        """Return the elements of an array."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.refusal(key, allowed)
        return cast("list[object]", value)

    def number(self, key: str, *, low: float, high: float, allowed: str, default: float) -> float:
        """Return a finite number within the limits."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refusal(key, allowed)
        # Compared before it is converted: an integer of a thousand digits is no float.
        if not low <= value <= high or math.isnan(value):
            raise self.refusal(key, allowed)
        return float(value)
