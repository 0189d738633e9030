"""How long, how many and how large what the other side says may be; checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable

from rankdump.contract.errors import ProtocolError

MAX_NAME = 4096
"""Characters of the name of an operator, a group, a job and the like."""
MAX_LINE = 256
"""Characters of the name of a host, a framework or a device."""
MAX_NOTES = 256
LIMIT = 1 << 63
"""Numbers from the wire end in signed 64-bit columns."""


def check_text(what: str, text: str, most: int = MAX_NAME) -> str:
    """Return a text; ProtocolError when it is longer than `most`, or no file could have it."""
    if len(text) > most:
        raise ProtocolError(f"{what} of {len(text)} characters, at most {most}")
    if "\0" in text:
        raise ProtocolError(f"{what} {text[:80]!r} with a NUL")
    return text


def check_count(what: str, count: int, most: int) -> None:
    """Raise ProtocolError when there are more of something than `most`."""
    if count > most:
        raise ProtocolError(f"{count} {what}, at most {most}")


def check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Raise ProtocolError when a number does not fit a signed column."""
    highest = max(numbers, default=0)
    if highest >= LIMIT:
        raise ProtocolError(f"{what} with number {highest}, over {LIMIT - 1}")


def sendable(text: str, most: int = MAX_NAME) -> str:
    """Return a name as the other side takes it: a long one is cut, a NUL is marked."""
    return text[:most].replace("\0", "\ufffd")


def shown(text: str, most: int = MAX_LINE) -> str:
    """Return a text that people read: cut, and with marks for what would move their cursor."""
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def shown_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Return sentences that people read; of very many the last one says how many more."""
    kept = [shown(note, MAX_NAME) for note in notes]
    if len(kept) <= MAX_NOTES:
        return tuple(kept)
    return (*kept[: MAX_NOTES - 1], f"and {len(kept) - MAX_NOTES + 1} more notes")
