"""Fields that a message and its frozen value have under one name, and texts a message can hold."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any


def common(source: object, kind: type, *apart: str) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` as `source` has them, but for those named apart."""
    return {name: getattr(source, name) for name in _names(kind, apart)}


def utf8(text: str) -> str:
    """Return a name as a message can carry it.

    Names are the user's; an unpaired surrogate in one must not end the sender's thread.
    """
    return text.encode(errors="replace").decode()


@cache
def _names(kind: Any, apart: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in apart)
