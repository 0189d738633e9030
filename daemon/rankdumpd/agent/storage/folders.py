"""Folders below one root, each accessed by a descriptor, so that no link redirects a file.

The kernel resolves a path in every call, and somebody may put a link into the path between two
calls. So a folder is opened name by name without following links, and its entries are accessed
through its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from rankdump._core.bounded_cache import remember
from rankdumpd.agent.records import FileDescriptor

MAX_OPEN_FOLDERS = 256
_MAX_SHARE_OF_DESCRIPTORS = 0.25
"""Largest share of the process's descriptors that folders may take, because ranks, slabs and files
that are being written need the rest.
"""
_ENTER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# No plan has this mode, and no umask removes a bit of it. So a folder with this mode was created by
# a process that was killed before it set the mode of the tree.
UNFINISHED_MODE = stat.S_ISVTX | stat.S_IRWXU
_MAX_SYNCED = 4096


class OutsideRootError(OSError):
    """A folder of the tree is a link that leads out of it."""


ABSENT_ERRORS = (FileNotFoundError, NotADirectoryError, OutsideRootError)
"""Errors for a file or folder that is not in the tree, or not any more."""


class _OpenFolder(NamedTuple):
    """An open folder with its device and inode."""

    folder: FileDescriptor
    identity: tuple[int, int]


class OpenFolderCache:
    """The folders that a process has opened most recently; safe to use from several threads."""

    def __init__(self, max_folders: int = MAX_OPEN_FOLDERS) -> None:
        """Keep at most `max_folders`, and at most a quarter of the descriptors of the process."""
        self._max_folders = max_folders
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, str], _OpenFolder] = OrderedDict()

    def find(self, root: str, folder: str) -> FileDescriptor | None:
        """Return an open folder below a root; None if its path leads to another folder by now."""
        key = root, folder
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._held.move_to_end(key)
        try:
            status = os.lstat(f"{root}/{folder}")
        except OSError:
            status = None
        if status is not None and (status.st_dev, status.st_ino) == held.identity:
            return held.folder
        with self._lock:
            self._held.pop(key, None)
        return None

    def hold(self, root: str, folder: str, opened: FileDescriptor) -> None:
        """Keep an open folder; if there are too many, the one that was used least recently is
        removed.
        """
        status = os.fstat(opened.number)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Read each time, because the limit may change while the process runs; a negative one means
        # no limit.
        most = int(descriptors * _MAX_SHARE_OF_DESCRIPTORS) if descriptors >= 0 else math.inf
        with self._lock:
            self._held[root, folder] = _OpenFolder(opened, (status.st_dev, status.st_ino))
            self._held.move_to_end((root, folder))
            while len(self._held) > min(self._max_folders, most):
                self._held.popitem(last=False)

    def clear(self) -> bool:
        """Remove all folders; return whether there was any."""
        with self._lock:
            held, self._held = self._held, OrderedDict()
        return bool(held)


_OPEN_FOLDERS = OpenFolderCache()


def release_open_folders() -> bool:
    """Close the folders that are kept open only for later use; return whether there were any.

    When no descriptor is left, this makes room for opening a file.
    """
    return _OPEN_FOLDERS.clear()


class TreeFolders:
    """Folders below one root; the path of the root itself may contain links."""

    def __init__(
        self, root: Path, *, mode: int, synced: bool, held: OpenFolderCache = _OPEN_FOLDERS
    ) -> None:
        """New folders get the mode `mode`, whatever the umask of the process is."""
        self._root, self._mode, self._synced, self._held = str(root), mode, synced, held
        self._synced_folders: dict[str, None] = {}

    def open(self, folder: str, *, make: bool = False) -> FileDescriptor:
        """Return a folder, which stays open while it is referenced; `make` creates it if it is
        missing.

        FileNotFoundError when it is missing and `make` is false; OutsideRootError when a link leads
        out of the root. In a synced tree its name and those of its parents survive a power loss
        afterwards.
        """
        if not self._synced or folder in self._synced_folders:
            found = self._held.find(self._root, folder)
            if found is not None:
                return found
        if not folder:
            opened = self._open_root(make)
            if self._synced:
                self._sync_above()
        else:
            above, _, name = folder.rpartition("/")
            parent = self.open(above, make=make)
            opened = self._open_below(parent, name, make)
            if self._synced:
                # Also for a folder that existed, because its creator may have been killed before
                # the sync.
                sync_folder(parent)
        self._held.hold(self._root, folder, opened)
        if self._synced:
            remember(self._synced_folders, folder, None, _MAX_SYNCED)
        return opened

    def _open_below(self, parent: FileDescriptor, name: str, make: bool) -> FileDescriptor:
        if name in ("", ".", ".."):
            raise OutsideRootError(errno.EXDEV, f"not a folder below {self._root}", name)
        try:
            return self._enter(name, parent.number)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, UNFINISHED_MODE, dir_fd=parent.number)
        return self._enter(name, parent.number)

    def _enter(self, name: str, parent: int | None = None) -> FileDescriptor:
        follow = os.O_NOFOLLOW if parent is not None else 0
        try:
            opened = FileDescriptor(os.open(name, _ENTER_FLAGS | follow, dir_fd=parent))
        except NotADirectoryError:
            if parent is not None:
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    message = f"a symbolic link is in the place of a folder below {self._root}"
                    raise OutsideRootError(errno.EXDEV, message, name) from None
            raise
        status = os.fstat(opened.number)
        unfinished = stat.S_IMODE(status.st_mode) & ~stat.S_ISGID == UNFINISHED_MODE
        if unfinished and status.st_uid == os.geteuid() and self._mode != UNFINISHED_MODE:
            readable = FileDescriptor(os.open(name, LIST_FLAGS | follow, dir_fd=parent))
            os.fchmod(readable.number, self._mode)
        return opened

    def _open_root(self, make: bool) -> FileDescriptor:
        try:
            return self._enter(self._root)
        except FileNotFoundError:
            if not make:
                raise
        missing = [Path(self._root)]
        while not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        # An earlier process may have been killed before it set the mode of the first existing
        # folder.
        self._enter(str(missing[-1].parent))
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(UNFINISHED_MODE)
            self._enter(str(folder))
        return self._enter(self._root)

    def _sync_above(self) -> None:
        for folder in Path(self._root).resolve().parents:
            try:
                sync_folder(FileDescriptor(os.open(folder, _ENTER_FLAGS)))
            except PermissionError:
                # Where this process has no read permission, it cannot have created a folder.
                return


def sync_folder(folder: FileDescriptor) -> None:
    """Make the names in a folder survive a power loss."""
    readable = FileDescriptor(os.open(".", LIST_FLAGS, dir_fd=folder.number))
    os.fsync(readable.number)
