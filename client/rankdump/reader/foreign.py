"""Folders that look like a dump tree and are another tool's, which is not read here."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError

_PLACES = tuple(
    f"{folder}{name}"
    for folder in ("", "rank*/", "proc*/", "step*/rank*/", "step*/proc*/")
    for name in ("dump.json", "debug.json")
)
"""Where msprobe's file stands, from the folder of a rank, a step or of the whole dump."""
_WHY = (
    "which is not read here: its tensors are .pt files, which only unpickling opens. "
    "msprobe compare reads it; dump with rankdump.attach or rankdump.migrator to read it here"
)
_START_BYTES = 4096
_KEYS = (b'"task"', b'"level"')


def check_ours(root: Path) -> None:
    """Raise DamagedError that says what a folder is, where it is a dump of msprobe."""
    for pattern in _PLACES:
        for path in sorted(root.glob(pattern))[:1]:
            if _is_msprobe(path):
                raise DamagedError(f"{root}: a dump of msprobe ({path.relative_to(root)}), {_WHY}")


def _is_msprobe(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
    except OSError:
        return False
    return all(key in start for key in _KEYS)
