"""The long names of a folder: what `mapping.csv` remembers. Reads that one file."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError


def on_disk_names(mapping: Path) -> dict[str, str]:
    """Return full names by the name on disk; empty when the folder has no long names.

    A file that was packed after its row was written goes by the packed name as well.
    """
    try:
        text = mapping.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DamagedError(f"{mapping}: cannot be read: {error.strerror}") from None
    # Only \n ends a row: an operator's name may hold what else counts as a line end.
    rows = [row.partition(",") for row in text.split("\n") if row]
    packed = {f"{short}.zst": f"{full}.zst" for short, _, full in rows}
    return packed | {short: full for short, _, full in rows}
