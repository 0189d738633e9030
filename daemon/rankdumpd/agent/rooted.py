"""Folders and lines below one root, and never outside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankdump.codec import Buffer
from rankdumpd.agent.folders import LIST, Folders

# Not blocking: a pipe in the place of a file would hold whoever opens it.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Rooted:
    """What stands below one root; safe to use from several threads."""

    def __init__(self, root: str, *, folder_mode: int, synced: bool) -> None:
        self.root = Path(root)
        self._folders = Folders(self.root, mode=folder_mode, synced=synced)

    def make(self, folder: str) -> None:
        """Make a folder and those above it, where they are not there."""
        self._folders.open(folder, make=True)

    def lines(self, folder: str, name: str) -> list[str]:
        """Return the whole lines of a small file of lines; none when it is not there."""
        return list(self.each_line(folder, name))

    def each_line(self, folder: str, name: str) -> Iterator[str]:
        """Yield the whole lines of a file of lines, of which one at a time is held."""
        try:
            descriptor = self._open(folder, name)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line[:-1]

    def has(self, folder: str, name: str) -> bool:
        """Return whether something of that name is there."""
        try:
            where = self._folders.open(folder)
            os.stat(name, dir_fd=where.number, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def facts(self, path: str) -> os.stat_result:
        """Return what is known of a file; of a link, of itself."""
        folder, _, name = path.rpartition("/")
        where = self._folders.open(folder)
        return os.stat(name, dir_fd=where.number, follow_symlinks=False)

    def read(self, folder: str, name: str) -> bytes:
        """Return the bytes of a file."""
        with os.fdopen(self._open(folder, name), "rb") as file:
            return file.read()

    def listing(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, each with whether a folder has it; no link is one."""
        where = self._folders.open(folder)
        number = os.open(".", LIST, dir_fd=where.number)
        try:
            with os.scandir(number) as items:
                return {item.name: item.is_dir(follow_symlinks=False) for item in items}
        finally:
            os.close(number)

    def holds(self, folder: str, name: str, parts: Sequence[Buffer]) -> bool:
        """Return whether a file is there and holds just these bytes."""
        try:
            descriptor = self._open(folder, name)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)

    def _open(self, folder: str, name: str) -> int:
        where = self._folders.open(folder)
        return os.open(name, READ, dir_fd=where.number)
