"""Fields of messages: those that a message and its frozen value share, text that a message can
hold, and the limits on length, count and size that are checked before anything from the other
side is used. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from rankdump.errors import ProtocolError


def copy_fields(source: object, kind: type, *apart: str) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` as `source` has them, but for those named apart."""
    return {name: getattr(source, name) for name in _list_field_names(kind, apart)}


def replace_surrogates(text: str) -> str:
    """Return a name as a message can carry it.

    Names are the user's; an unpaired surrogate in one must not end the sender's thread.
    """
    return text.encode(errors="replace").decode()


@cache
def _list_field_names(kind: Any, apart: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in apart)


MAX_NAME_CHARACTERS = 4096
"""Characters of the name of an operator, a group, a job and the like."""
MAX_LINE_CHARACTERS = 256
"""Characters of the name of a host, a framework or a device."""
MAX_NOTES = 256
NUMBER_LIMIT = 1 << 63
"""Numbers from the wire end in signed 64-bit columns."""


def check_text(what: str, text: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """Return a text; ProtocolError when it is longer than `most`, or no file could have it."""
    if len(text) > most:
        raise ProtocolError(f"{what} of {len(text)} characters, at most {most}")
    if "\0" in text:
        raise ProtocolError(f"{what} {text[:80]!r} contains a NUL")
    return text


def check_count(what: str, count: int, most: int) -> None:
    """Raise ProtocolError when there are more of something than `most`."""
    if count > most:
        raise ProtocolError(f"{count} {what}, at most {most}")


def check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Raise ProtocolError when a number does not fit a signed column."""
    highest = max(numbers, default=0)
    if highest >= NUMBER_LIMIT:
        raise ProtocolError(f"{what}: the number {highest} is over {NUMBER_LIMIT - 1}")


def make_sendable(text: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """Return a name as the other side takes it: a long one is cut, a NUL is marked."""
    return text[:most].replace("\0", "\ufffd")


def make_printable(text: str, most: int = MAX_LINE_CHARACTERS) -> str:
    """Return a text that people read: cut, and with marks for what would move their cursor."""
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def make_notes_printable(notes: Iterable[str]) -> tuple[str, ...]:
    """Return sentences that people read; of very many the last one says how many more."""
    kept = [make_printable(note, MAX_NAME_CHARACTERS) for note in notes]
    if len(kept) <= MAX_NOTES:
        return tuple(kept)
    return (*kept[: MAX_NOTES - 1], f"and {len(kept) - MAX_NOTES + 1} more notes")
