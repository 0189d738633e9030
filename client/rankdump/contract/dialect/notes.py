"""What a parser wants to tell the author of a configuration, though it accepts it. Pure."""

from __future__ import annotations

import reprlib

from rankdump.contract.errors import MISSING


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlevel = 2
    return short


_SHORT = _short()


class Notes:
    """Sentences about what will surprise, each once, in the order they came."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """What was said so far."""
        return tuple(self._texts)

    def add(self, key: str, value: object, reason: str) -> None:
        """Say of a key's value what `reason`, a phrase that begins with a verb, tells."""
        shown = "missing;" if value is MISSING else _SHORT.repr(value)
        self._texts[f"{_printable(key)}: {shown} {reason}"] = None


def _printable(key: str) -> str:
    return key if key.isprintable() else ascii(key)[1:-1]
