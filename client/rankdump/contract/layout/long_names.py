"""The long names of a folder: what the rows of its `mapping.csv` say. Pure.

Written by MindSpore, by CANN (which adds a row for every block it writes) and by us; a name on disk
is a number, with what the file ends in or without (ascend-formats.md 2.3).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rankdump.contract.layout.file_name import PACKED

_SHORT = re.compile(r"[0-9a-f]+(?:\.[A-Za-z0-9.]*)?")
"""msaccucmp's numbers are hexadecimal."""


class LongNames:
    """Full names by the name on disk."""

    def __init__(self, rows: Iterable[str] = ()) -> None:
        """Rows without their ends; those that name no file are passed over."""
        pairs = (row.removesuffix("\r").partition(",") for row in rows)
        self._names = {short: full for short, _, full in pairs if full and _SHORT.fullmatch(short)}

    @classmethod
    def parsed(cls, content: bytes) -> LongNames:
        """Return the names that a whole file remembers."""
        # Only \n ends a row: an operator's name may hold what else counts as a line end.
        return cls(content.decode("utf-8", errors="surrogateescape").split("\n"))

    def absent(self, there: Collection[str]) -> list[str]:
        """Return the names on disk that are not among these, packed or not."""
        return [name for name in self._names if name not in there and name + PACKED not in there]

    def full(self, name: str) -> str:
        """Return the full name of a file, or the name itself where it is no long one's."""
        if not self._names:
            return name
        # A file that was packed later has a row under the name it had before.
        plain = name.removesuffix(PACKED)
        return self._names.get(name) or (
            self._names[plain] + name[len(plain) :] if plain in self._names else name
        )
