"""The long names of a folder: what `mapping.csv` remembers. Reads that one file.

Written by MindSpore, by CANN (which adds a row for every block it writes) and by us; a name on disk
is a number, with what the file ends in or without (ascend-formats.md 2.3).
"""

from __future__ import annotations

import re
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.file_name import PACKED

_SHORT = re.compile(r"[0-9a-f]+(?:\.[A-Za-z0-9.]*)?")
"""msaccucmp's numbers are hexadecimal."""


class LongNames:
    """Full names by the name on disk."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def full(self, name: str) -> str:
        """Return the full name of a file, or the name itself where it is no long one's."""
        # A file that was packed later has a row under the name it had before.
        plain = name.removesuffix(PACKED)
        return self._names.get(name) or (
            self._names[plain] + name[len(plain) :] if plain in self._names else name
        )


def long_names(mapping: Path) -> LongNames:
    """Return the long names of a folder; DamagedError when the file is there and unreadable."""
    try:
        text = mapping.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return LongNames({})
    except OSError as error:
        raise DamagedError(f"{mapping}: cannot be read: {error.strerror}") from None
    # Only \n ends a row: an operator's name may hold what else counts as a line end.
    rows = (row.removesuffix("\r").partition(",") for row in text.split("\n"))
    return LongNames({short: full for short, _, full in rows if full and _SHORT.fullmatch(short)})
