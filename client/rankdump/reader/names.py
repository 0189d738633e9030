"""The `mapping.csv` of a folder, read."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.long_names import LongNames


def long_names(mapping: Path) -> LongNames:
    """Return the long names of a folder; DamagedError when the file is there and unreadable."""
    try:
        return LongNames.parsed(mapping.read_bytes())
    except FileNotFoundError:
        return LongNames()
    except OSError as error:
        raise DamagedError(f"{mapping}: cannot be read: {error.strerror}") from None
