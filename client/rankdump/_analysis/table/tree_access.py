"""Access to the files of a tree for code that reads its manifests and writes its table. A command
that a person runs uses paths; the agent, whose tree may belong to another user, passes its own
access, which follows no links.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol


class TreeAccess(Protocol):
    """The files below the root of a tree; paths and folders are relative to the root, with `/`.

    Every method raises OSError; FileNotFoundError if the path does not exist.
    """

    root: Path

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a file."""
        ...

    def read(self, folder: str, name: str) -> bytes:
        """Return the bytes of a file."""
        ...

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open a file for reading."""
        ...

    def listing(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, and for each whether it is a folder; a link is not."""
        ...

    def read_link(self, folder: str, name: str) -> str:
        """Return the target text of a link, which is not followed."""
        ...

    def write(
        self,
        folder: str,
        name: str,
        fill: Callable[[int], None],
        *,
        mark: str,
        guard: Callable[[Callable[[], None]], None],
    ) -> object:
        """Create or replace a file by one that `fill` writes to a descriptor.

        The file is named `.{mark}.tmp` until `guard` calls the function that it is given, which
        renames it. If `guard` raises an error, the file is removed. Missing folders are created.
        """
        ...

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; files that do not exist are skipped."""
        ...

    def lock(self, folder: str, name: str) -> AbstractContextManager[None]:
        """Lock a file for one process at a time; BlockingIOError when another process holds the
        lock.
        """
        ...


class LocalTree:
    """Access by paths, with the permissions of the person who runs the program."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a file."""
        return (self.root / path).stat()

    def read(self, folder: str, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self.root / folder / name).read_bytes()

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open a file for reading."""
        return (self.root / folder / name).open("rb")

    def listing(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, and for each whether it is a folder; a link is not."""
        with os.scandir(self.root / folder) as found:
            return {each.name: each.is_dir(follow_symlinks=False) for each in found}

    def read_link(self, folder: str, name: str) -> str:
        """Return the target text of a link, which is not followed."""
        return os.readlink(self.root / folder / name)  # noqa: PTH115 - a text, not a path

    def write(
        self,
        folder: str,
        name: str,
        fill: Callable[[int], None],
        *,
        mark: str,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        """Create or replace a file by one that `fill` writes to a descriptor."""
        place = self.root / folder
        place.mkdir(parents=True, exist_ok=True)
        draft = place / f".{mark}.tmp"
        try:
            with draft.open("wb") as file:
                fill(file.fileno())
                os.fsync(file.fileno())
            guard(lambda: _rename(draft, place / name))
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; files that do not exist are skipped."""
        for path in paths:
            with suppress(FileNotFoundError):
                (self.root / path).unlink()

    @contextmanager
    def lock(self, folder: str, name: str) -> Generator[None]:
        """Lock a file for one process at a time; BlockingIOError when another process holds the
        lock.
        """
        place = self.root / folder
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock_descriptor(descriptor)
            yield
        finally:
            os.close(descriptor)


def _rename(draft: Path, final: Path) -> None:
    draft.replace(final)


_UNSUPPORTED_ERRNOS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)


def lock_descriptor(descriptor: int) -> None:
    """Lock an open file until it is closed; BlockingIOError when another process holds the lock.

    On a file system without locks, nothing is locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
