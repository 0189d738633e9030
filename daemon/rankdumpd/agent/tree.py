"""Files inside one dump tree: whole or not there, with the plan's modes, never outside the root."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence

from rankdump.codec import Buffer
from rankdumpd.agent.elements import Descriptor
from rankdumpd.agent.files import WriteAll, cut_torn, discard, rename_new, write_all
from rankdumpd.agent.folders import sync_folder
from rankdumpd.agent.growing import Growing, stamp_of
from rankdumpd.agent.members import Piece
from rankdumpd.agent.values import Original, Stamp

_CHANGE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = _CHANGE | os.O_APPEND
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Tree(Growing):
    """One root with its modes; safe to use from several threads."""

    def __init__(
        self,
        root: str,
        *,
        file_mode: int,
        folder_mode: int,
        growing_mode: int | None = None,
        synced: bool = False,
        write: WriteAll = write_all,
    ) -> None:
        """`growing_mode` is that of files to which is added, where it is another one."""
        super().__init__(
            root,
            file_mode=file_mode,
            folder_mode=folder_mode,
            growing_mode=file_mode if growing_mode is None else growing_mode,
            synced=synced,
            write=write,
        )
        self.kind = f"{os.path.realpath(root)}:{file_mode:o}:{synced}"
        """Trees of one kind may link each other's files: root, mode and durability agree."""
        self._append_lock = threading.Lock()

    def put(
        self, folder: str, name: str, parts: Sequence[Buffer], *, mark: str, replaces: bool = True
    ) -> Stamp:
        """Make or replace a file at one blow; `mark` names the hidden file it grows in.

        Nobody else may use the same mark at the same time: what a crash left under it is removed.
        FileExistsError where it `replaces` none and something has its name already.
        """

        def fill(opened: int) -> None:
            self._write(opened, parts)

        return self._grow(folder, name, mark, fill, replaces=replaces)

    def join(
        self, folder: str, name: str, head: bytes, pieces: Sequence[Piece], *, mark: str
    ) -> Stamp:
        """Make or replace a file of some bytes and the ends of other files, as `put` does.

        OSError when one of these is not as long as it was.
        """

        def fill(opened: int) -> None:
            self._write(opened, (head,))
            for piece in pieces:
                self._copy(piece, opened)

        return self._grow(folder, name, mark, fill)

    def move(self, path: str, name: str) -> None:
        """Give a file another name in its folder; one that has it already keeps it."""
        folder, _, present = path.rpartition("/")
        where = self._folders.open(folder)
        try:
            os.rename(present, name, src_dir_fd=where.number, dst_dir_fd=where.number)
        except FileNotFoundError:
            if not self.has(folder, name):
                raise
        if self._synced:
            sync_folder(where)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, those that are gone already included."""
        folders: dict[str, Descriptor] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            # In the place of a file there may be a folder: somebody else's.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                where = self._folders.open(folder)
                os.unlink(name, dir_fd=where.number)
                folders[folder] = where
        if self._synced:
            for where in folders.values():
                sync_folder(where)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder; OSError when it is none, or not there."""
        above, _, name = folder.rpartition("/")
        where = self._folders.open(above)
        os.rmdir(name, dir_fd=where.number)
        if self._synced:
            sync_folder(where)

    def link(self, original: Original, folder: str, name: str, *, mark: str) -> None:
        """Give a file one more name, at one blow; OSError when it is not as it was written, and
        FileExistsError when something has that name already.

        The mark is one of `put`, under the same rule.
        """
        above, _, present = original.path.rpartition("/")
        source, where = self._folders.open(above), self._folders.open(folder, make=True)
        temporary, at = f".{mark}.tmp", where.number
        ends = {"src_dir_fd": source.number, "dst_dir_fd": at}
        try:
            os.link(present, temporary, follow_symlinks=False, **ends)
        except FileExistsError:
            os.unlink(temporary, dir_fd=at)
            os.link(present, temporary, follow_symlinks=False, **ends)
        try:
            # Asked of the new name: the old one may be replaced at any time.
            facts = os.stat(temporary, dir_fd=at, follow_symlinks=False)
            mode = stat.S_IFREG | self._file_mode
            if facts.st_mode != mode or stamp_of(facts) != original.stamp:
                raise OSError(errno.ESTALE, "not the file that was written", original.path)
            rename_new(temporary, name, at)
        except FileExistsError:
            discard(temporary, at)
            # Linked already: it was sent again.
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_ino != original.stamp.inode:
                raise
        except BaseException:
            discard(temporary, at)
            raise
        self._make_sure(where, name, original.stamp)

    def claim(self, folder: str, name: str, who: str) -> bool:
        """Put a name down for somebody; return whether it is theirs, now or since earlier."""
        where = self._folders.open(folder, make=True)
        # A link is there with its text or not at all, on a shared disk as well.
        with contextlib.suppress(FileExistsError):
            os.symlink(who, name, dir_fd=where.number)
        return os.readlink(name, dir_fd=where.number) == who

    def to_lock(self, folder: str, name: str, *, make: bool) -> Descriptor:
        """Return an open file that stands for a lock, made when it is not there.

        FileNotFoundError where there is no root, and it is not to be made.
        """
        if not make:
            self._folders.open("")
        where = self._folders.open(folder, make=True)
        # Some disks lock for one alone only what may be written.
        mode = self._file_mode | stat.S_IWUSR
        try:
            made = os.open(name, _LOCK | os.O_CREAT | os.O_EXCL, mode, dir_fd=where.number)
        except FileExistsError:
            return Descriptor(os.open(name, _LOCK, dir_fd=where.number))
        opened = Descriptor(made)
        os.fchmod(made, mode)
        return opened

    def append_lines(self, folder: str, name: str, lines: Iterable[str]) -> None:
        """Add all of the lines to a file of lines or, after an OSError, none of them.

        The file is made when it is not there; a last line that a crash left torn is cut off first.
        """
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._append_lock:
            opened = self._open_to_grow(folder, name, _APPEND)
            write = self._write
            self._filled(opened, lambda file: write(file, (data,)), self._growing_mode, cut_torn)

    def change(self, folder: str, name: str, change: Callable[[int], None]) -> None:
        """Let a file that grows be changed where it stands; made when it is not there."""
        with self._append_lock:
            opened = self._open_to_grow(folder, name, _CHANGE)
            self._filled(opened, change, self._growing_mode, lambda _: None)

    def _open_to_grow(self, folder: str, name: str, flags: int) -> int:
        where = self._folders.open(folder, make=True)
        try:
            return os.open(name, flags, 0o600, dir_fd=where.number)
        except PermissionError:
            # The plan's mode is usually read-only, for the owner too.
            self._let_write(name, where)
        return os.open(name, flags, 0o600, dir_fd=where.number)

    def _let_write(self, name: str, where: Descriptor) -> None:
        file = Descriptor(os.open(name, _LOOK, dir_fd=where.number))
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise PermissionError(errno.EACCES, "no file that may be written", name)
        # By this name because a descriptor that only looks has no other way to it.
        os.chmod(f"/proc/self/fd/{file.number}", self._growing_mode | stat.S_IRUSR | stat.S_IWUSR)
