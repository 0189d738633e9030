"""The long names of a folder: what `mapping.csv` remembers. Reads that one file."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError


def on_disk_names(mapping: Path) -> dict[str, str]:
    """Return full names by the name on disk; empty when the folder has no long names."""
    try:
        text = mapping.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DamagedError(f"{mapping}: cannot be read: {error.strerror}") from None
    # Only \n ends a row: an operator's name may hold what else counts as a line end.
    rows = (row.partition(",") for row in text.split("\n") if row)
    return {short: full for short, _, full in rows}
