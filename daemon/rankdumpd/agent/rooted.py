"""Folders and lines below one root, and never outside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankdump.codec import Buffer
from rankdumpd.agent.files import make_folders

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_CHECKED = 4096


class OutsideRootError(OSError):
    """A folder of the tree leads out of it."""


class Rooted:
    """What stands below one root; safe to use from several threads."""

    def __init__(self, root: str, *, folder_mode: int, synced: bool) -> None:
        self.root = Path(root)
        self._folder_mode, self._synced = folder_mode, synced
        self._checked: dict[str, Path] = {}

    def make(self, folder: str) -> None:
        """Make a folder and those above it, where they are not there."""
        self.make_way(self.path_of(folder))

    def lines(self, folder: str, name: str) -> list[str]:
        """Return the whole lines of a small file of lines; none when it is not there."""
        return list(self.each_line(folder, name))

    def each_line(self, folder: str, name: str) -> Iterator[str]:
        """Yield the whole lines of a file of lines, of which one at a time is held."""
        try:
            descriptor = os.open(self.path_of(folder) / name, READ)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line[:-1]

    def has(self, folder: str, name: str) -> bool:
        """Return whether something of that name is there."""
        return os.path.lexists(self.path_of(folder) / name)

    def holds(self, folder: str, name: str, parts: Sequence[Buffer]) -> bool:
        """Return whether a file is there and holds just these bytes."""
        try:
            descriptor = os.open(self.path_of(folder) / name, READ)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)

    def path_of(self, folder: str) -> Path:
        """Return a folder's path; OutsideRootError when it leads out of the root."""
        known = self._checked.get(folder)
        if known:
            return known
        where = self.root / folder
        real, root = where.resolve(), self.root.resolve()
        if not real.is_relative_to(root):
            raise OutsideRootError(errno.EXDEV, f"folder leads to {real}, outside {root}", where)
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[folder] = where
        return where

    def make_way(self, folder: Path) -> None:
        """Make a folder and those above it, with the mode of the tree."""
        make_folders(folder, self._folder_mode, synced=self._synced)
