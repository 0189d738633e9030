"""Files inside one dump tree: whole or not there, with the plan's modes, never outside the root."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rankdump.codec import Buffer
from rankdumpd.agent.files import (
    WriteAll,
    copy_end,
    cut_torn,
    discard,
    sync_folder,
    write_all,
)
from rankdumpd.agent.members import Piece
from rankdumpd.agent.rooted import READ, Rooted
from rankdumpd.agent.values import Original, Stamp

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = _CHANGE | os.O_APPEND


class Tree(Rooted):
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
        super().__init__(root, folder_mode=folder_mode, synced=synced)
        self.kind = f"{os.path.realpath(root)}:{file_mode:o}:{synced}"
        """Trees of one kind may link each other's files: root, mode and durability agree."""
        self._file_mode = file_mode
        self._growing_mode = file_mode if growing_mode is None else growing_mode
        self._write = write
        self._append_lock = threading.Lock()

    def put(
        self, folder: str, name: str, parts: Sequence[Buffer], *, mark: str, replaces: bool = True
    ) -> Stamp:
        """Make or replace a file at one blow; `mark` names the hidden file it grows in.

        Nobody else may use the same mark at the same time: what a crash left under it is removed.
        FileExistsError where it `replaces` none and something has its name already.
        """
        place = os.rename if replaces else os.link
        return self._grow(folder, name, mark, lambda opened: self._write(opened, parts), place)

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
        where = self.path_of(folder)
        try:
            os.rename(where / present, where / name)
        except FileNotFoundError:
            if not os.path.lexists(where / name):
                raise
        if self._synced:
            sync_folder(where)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, those that are gone already included."""
        folders: set[Path] = set()
        for path in paths:
            folder, _, name = path.rpartition("/")
            where = self.path_of(folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where / name)
                folders.add(where)
        if self._synced:
            for where in folders:
                sync_folder(where)

    def link(self, original: Original, folder: str, name: str, *, mark: str) -> None:
        """Give a file one more name, at one blow; OSError when it is not as it was written.

        The mark is one of `put`, under the same rule.
        """
        where = self.path_of(folder)
        source, temporary = f"{self.root}/{original.path}", f"{where}/.{mark}.tmp"
        try:
            os.link(source, temporary, follow_symlinks=False)
        except OSError as error:
            self._make_way(temporary, error)
            os.link(source, temporary, follow_symlinks=False)
        try:
            # Asked of the new name: the old one may be replaced at any time.
            facts = os.lstat(temporary)
            mode = stat.S_IFREG | self._file_mode
            if facts.st_mode != mode or _stamp(facts) != original.stamp:
                raise OSError(errno.ESTALE, "not the file that was written", source)
            os.rename(temporary, f"{where}/{name}")
        finally:
            # Where the name is a link to the same file already, renaming leaves both names.
            discard(temporary)
        if self._synced:
            sync_folder(where)

    def claim(self, folder: str, name: str, who: str) -> bool:
        """Put a name down for somebody; return whether it is theirs, now or since earlier."""
        path = f"{self.path_of(folder)}/{name}"
        for _ in range(2):
            try:
                # A link is there with its text or not at all, on a shared disk as well.
                os.symlink(who, path)
            except FileNotFoundError:
                self.make_way(Path(path).parent)
            except FileExistsError:
                break
        return os.readlink(path) == who

    def append_lines(self, folder: str, name: str, lines: Iterable[str]) -> None:
        """Add all of the lines to a file of lines or, after an OSError, none of them.

        The file is made when it is not there; a last line that a crash left torn is cut off first.
        """
        path = self.path_of(folder) / name
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._append_lock:
            opened = self._open_to_grow(path, _APPEND)
            write = self._write
            self._filled(opened, lambda file: write(file, (data,)), self._growing_mode, cut_torn)

    def change(self, folder: str, name: str, change: Callable[[int], None]) -> None:
        """Let a file that grows be changed where it stands; made when it is not there."""
        with self._append_lock:
            opened = self._open_to_grow(self.path_of(folder) / name, _CHANGE)
            self._filled(opened, change, self._growing_mode, lambda _: None)

    def _grow(
        self,
        folder: str,
        name: str,
        mark: str,
        fill: Callable[[int], None],
        place: Callable[[str, str], None] = os.rename,
    ) -> Stamp:
        where = self.path_of(folder)
        temporary = f"{where}/.{mark}.tmp"
        # With the mode it will have: changing it later would be one more call for every file.
        try:
            descriptor = os.open(temporary, _CREATE, self._file_mode)
        except OSError as error:
            self._make_way(temporary, error)
            descriptor = os.open(temporary, _CREATE, self._file_mode)
        try:
            stamp = self._filled(descriptor, fill, self._file_mode)
            place(temporary, f"{where}/{name}")
        except BaseException:
            discard(temporary)
            raise
        if place is not os.rename:
            discard(temporary)
        if self._synced:
            sync_folder(where)
        return stamp

    def _copy(self, piece: Piece, target: int) -> None:
        folder, _, name = piece.path.rpartition("/")
        source = os.open(self.path_of(folder) / name, READ)
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
            return _stamp(facts)
        except BaseException:
            # The next line would become part of a torn one.
            if behind is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, behind)
            raise
        finally:
            os.close(descriptor)

    def _make_way(self, path: str, error: OSError) -> None:
        """Make the folders of a path, or remove what stands there; raise any other error.

        Folders are nearly always there: asking first would cost a call for every file.
        """
        if isinstance(error, FileNotFoundError):
            self.make_way(Path(path).parent)
        elif isinstance(error, FileExistsError):
            os.unlink(path)
        else:
            raise error

    def _open_to_grow(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self.make_way(path.parent)
        except PermissionError:
            # The plan's mode is usually read-only, for the owner too.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise
            path.chmod(self._growing_mode | stat.S_IRUSR | stat.S_IWUSR)
        return os.open(path, flags, 0o600)


def _stamp(facts: os.stat_result) -> Stamp:
    return Stamp(facts.st_ino, facts.st_size, facts.st_mtime_ns)
