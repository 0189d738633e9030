"""Source or target folder of an ingest. Its files are listed, read and removed relative to folder
descriptors, never through a link.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankdump._core.tree_root import READ_FLAGS
from rankdump.errors import ConfigError
from rankdumpd.agent.records import FileDescriptor, FileStamp
from rankdumpd.agent.storage.tree import make_stamp

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNSUPPORTED_TYPES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that a walk has found."""

    path: str


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """A folder that a walk has found; the walk yields it before its entries."""

    path: str
    folder: FileDescriptor


@dataclass(frozen=True, slots=True)
class UnsupportedEntry:
    """An entry that is not ingested, and why."""

    path: str
    text: str
    harmless: bool = False
    """Whether the entry is a link to a file that is ingested under its own name."""


def check_separate_folders(source: Path, tree: Path) -> None:
    """Raise a ConfigError when one of the folders contains the other."""
    inner, outer = Path(os.path.realpath(source)), Path(os.path.realpath(tree))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        allowed = f"a folder that is not in {inner} and does not contain it"
        raise ConfigError("--into", "", str(tree), allowed)


class IngestFolder:
    """One folder; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        try:
            self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError("DIR", "", str(root), f"a folder ({error.strerror})") from None
        self.path = Path(os.path.realpath(root))

    def close(self) -> None:
        """Close the folder."""
        os.close(self._root)

    @property
    def is_removed(self) -> bool:
        """Return whether the folder was removed, even if another folder has its path now."""
        return os.fstat(self._root).st_nlink == 0

    def open(self, path: str) -> FileDescriptor:
        """Open a regular file; OSError when it is anything else."""
        folder, name = self._locate(path)
        file = FileDescriptor(os.open(name, READ_FLAGS, dir_fd=folder.number))
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file

    def read_stamp(self, path: str) -> FileStamp | None:
        """Return the present stamp of a file; None when the path is no regular file."""
        status = self._find_status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return make_stamp(status)

    def names(self, path: str) -> set[str]:
        """Return the names in a folder; none when it cannot be read."""
        try:
            folder = self._open_folder(path)
            with os.scandir(folder.number) as listed:
                return {item.name for item in listed}
        except OSError:
            return set()

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return self._find_status(path) is not None

    def remove(self, path: str, stamp: FileStamp, *, before_s: float = math.inf) -> bool | None:
        """Remove a file if it still has this stamp; return whether the file is gone.

        Return None without removing it if its content, mode or name was changed after `before_s`.
        """
        try:
            folder, name = self._locate(path)
            status = os.stat(name, dir_fd=folder.number, follow_symlinks=False)
            if make_stamp(status) != stamp or not stat.S_ISREG(status.st_mode):
                return False
            if status.st_ctime > before_s:
                return None
            os.unlink(name, dir_fd=folder.number)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def remove_empty(self) -> None:
        """Remove empty folders, the innermost first; the root folder stays."""
        folders = [item.path for item in self.walk() if isinstance(item, FoundFolder) and item.path]
        for path in sorted(folders, key=lambda path: path.count("/"), reverse=True):
            with contextlib.suppress(OSError):
                folder, name = self._locate(path)
                os.rmdir(name, dir_fd=folder.number)

    def walk(
        self, path: str = "", skip: Callable[[str], bool] = lambda path: False
    ) -> Iterator[FoundFile | FoundFolder | UnsupportedEntry]:
        """Yield the entries below a folder, each folder before its entries."""
        due = [path]
        while due:
            here = due.pop()
            try:
                folder = self._open_folder(here)
                yield FoundFolder(here, folder)
                with os.scandir(folder.number) as listed:
                    items = sorted(listed, key=lambda item: item.name)
                for item in items:
                    below = f"{here}/{item.name}" if here else item.name
                    if skip(below):
                        continue
                    if item.is_dir(follow_symlinks=False):
                        due.append(below)
                    elif seen := self._seen(below, item):
                        yield seen
            except FileNotFoundError:
                continue  # the folder was removed in the meantime
            except OSError as error:
                yield UnsupportedEntry(here or ".", f"cannot be read: {error.strerror}")

    def _open_folder(self, path: str) -> FileDescriptor:
        """Open a subfolder; OSError when it or a folder on the way is missing or a link."""
        folder = FileDescriptor(os.dup(self._root))
        for name in filter(None, path.split("/")):
            folder = FileDescriptor(os.open(name, _FOLDER_FLAGS, dir_fd=folder.number))
        return folder

    def _locate(self, path: str) -> tuple[FileDescriptor, str]:
        """Return the descriptor of the folder that contains a path, and the name within that
        folder.
        """
        above, _, name = path.rpartition("/")
        return self._open_folder(above), name

    def _find_status(self, path: str) -> os.stat_result | None:
        """Return the status of an entry, of a link itself and not of its target; None when it does
        not exist.
        """
        try:
            folder, name = self._locate(path)
            return os.stat(name, dir_fd=folder.number, follow_symlinks=False)
        except OSError:
            return None

    def _seen(self, path: str, item: os.DirEntry[str]) -> FoundFile | UnsupportedEntry | None:
        if item.is_file(follow_symlinks=False):
            return FoundFile(path)
        try:
            if not item.is_symlink():
                mode = stat.S_IFMT(item.stat(follow_symlinks=False).st_mode)
                return UnsupportedEntry(
                    path, f"{_UNSUPPORTED_TYPES.get(mode, 'not a file')}: not ingested"
                )
            real = Path(os.path.realpath(self.path / path))
            inside = real.is_relative_to(self.path) and real.exists()
            where = (self.path / path).readlink()
        except FileNotFoundError:
            return None
        if inside:
            return UnsupportedEntry(
                path, "a link: its target is ingested under its own name", harmless=True
            )
        return UnsupportedEntry(path, f"a link to {where}, which is not a file in this folder")
