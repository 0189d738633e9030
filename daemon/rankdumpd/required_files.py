"""Files that a daemon needs to stand where it made them, and which of them somebody took away."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Kept:
    """One file, as it was when it was made."""

    identity: tuple[int, int] | None
    cost: str
    """What does not work without it."""


class RequiredFiles:
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


def _missing(path: Path) -> str:
    return "was replaced" if path.exists() else "was removed"


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file stands there by device and inode; None where there is none."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
