"""How a file of a tree comes to be: it grows under a hidden name and is there at one blow."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from rankdumpd.agent.elements import Descriptor
from rankdumpd.agent.files import WriteAll, copy_end, discard, rename_new
from rankdumpd.agent.folders import sync_folder
from rankdumpd.agent.members import Piece
from rankdumpd.agent.rooted import Rooted
from rankdumpd.agent.values import Stamp

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Growing(Rooted):
    """A root with its modes, and the ways in which its files are filled."""

    def __init__(
        self,
        root: str,
        *,
        file_mode: int,
        folder_mode: int,
        growing_mode: int,
        synced: bool,
        write: WriteAll,
    ) -> None:
        super().__init__(root, folder_mode=folder_mode, synced=synced)
        self._file_mode, self._growing_mode = file_mode, growing_mode
        self._synced, self._write = synced, write

    def _grow(
        self,
        folder: str,
        name: str,
        mark: str,
        fill: Callable[[int], None],
        *,
        replaces: bool = True,
    ) -> Stamp:
        temporary = f".{mark}.tmp"
        where, descriptor = self._create(folder, temporary)
        at = where.number
        try:
            stamp = self._filled(descriptor, fill, self._file_mode)
            if replaces:
                os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            else:
                rename_new(temporary, name, at)
        except BaseException:
            discard(temporary, at)
            raise
        self._make_sure(where, name, stamp)
        return stamp

    def _create(self, folder: str, temporary: str) -> tuple[Descriptor, int]:
        for attempt in ("first", "again"):
            where = self._folders.open(folder, make=True)
            # With the mode it will have: changing it later would be one more call for every file.
            try:
                return where, os.open(temporary, _CREATE, self._file_mode, dir_fd=where.number)
            except FileExistsError:
                os.unlink(temporary, dir_fd=where.number)
            except FileNotFoundError:
                # The folder was removed at this moment.
                if attempt == "again":
                    raise
        return where, os.open(temporary, _CREATE, self._file_mode, dir_fd=where.number)

    def _make_sure(self, where: Descriptor, name: str, stamp: Stamp) -> None:
        """Let a name survive a power loss; where that fails it does not stay either, because what
        it names will be counted as dropped.
        """
        if not self._synced:
            return
        try:
            sync_folder(where)
        except OSError:
            with contextlib.suppress(OSError):
                facts = os.stat(name, dir_fd=where.number, follow_symlinks=False)
                if facts.st_ino == stamp.inode:
                    os.unlink(name, dir_fd=where.number)
            raise

    def _copy(self, piece: Piece, target: int) -> None:
        folder, _, name = piece.path.rpartition("/")
        source = self._open(folder, name)
        try:
            copy_end(source, target, piece.start, piece.length, self._write)
        finally:
            os.close(source)

    def _filled(
        self,
        descriptor: int,
        fill: Callable[[int], None],
        mode: int,
        mend: Callable[[int], int | None] = lambda _: 0,
    ) -> Stamp:
        """Fill a file, then close it; `mend` says what of it stays when that fails."""
        behind: int | None = None
        try:
            behind = mend(descriptor)
            fill(descriptor)
            facts = os.fstat(descriptor)
            # The process may mask bits, and a folder may have rules of its own.
            if stat.S_IMODE(facts.st_mode) != mode:
                os.fchmod(descriptor, mode)
            if self._synced:
                os.fsync(descriptor)
            return stamp_of(facts)
        except BaseException:
            # The next line would become part of a torn one.
            if behind is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, behind)
            raise
        finally:
            os.close(descriptor)


def stamp_of(facts: os.stat_result) -> Stamp:
    """Return what tells a file from others."""
    return Stamp(facts.st_ino, facts.st_size, facts.st_mtime_ns)
