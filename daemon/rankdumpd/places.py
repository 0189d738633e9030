"""Files that a daemon needs to stand where it made them, and which of them somebody took away."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

FOLDER_MODE = 0o750
"""Of the folder of a socket: its group may enter, and others may not."""
_PRIVATE_MODE = 0o700


@dataclass(frozen=True, slots=True)
class _Kept:
    """One file, as it was when it was made."""

    identity: tuple[int, int] | None
    cost: str
    """What does not work without it."""


class Places:
    """Looks at the files of one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, _Kept] = {}
        self.gone: tuple[str, ...] = ()
        """What was missing at the last look, a sentence each."""

    def keep(self, path: Path, cost: str) -> None:
        """Expect a file where it stands now; `cost` says what does not work without it."""
        with self._lock:
            self._kept[path] = _Kept(_identity(path), cost)

    def look(self) -> tuple[str, ...]:
        """Return what is missing, and remember that."""
        with self._lock:
            self.gone = tuple(
                f"{path} {_missing(path)} while this process runs: {kept.cost}; start it again"
                for path, kept in self._kept.items()
                if _identity(path) != kept.identity
            )
            return self.gone


def make_folder(path: Path, group: int, mode: int = FOLDER_MODE) -> None:
    """Make a folder that a group may enter; one that is there stays as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(_PRIVATE_MODE, exist_ok=True)
        os.chown(folder, -1, group if folder == path else -1)
        # Whatever the umask is: the socket's folder may be among them.
        folder.chmod(mode if folder == path else FOLDER_MODE)


def _missing(path: Path) -> str:
    return "was replaced" if path.exists() else "was removed"


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file stands there by device and inode; None where there is none."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
