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
from rankdumpd.agent.files import WriteAll, copy_end, cut_torn, discard, sync_folder, write_all
from rankdumpd.agent.members import Piece
from rankdumpd.agent.values import Original, Stamp

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_CHECKED = 4096


class OutsideRootError(OSError):
    """A folder of the tree leads out of it."""


class Tree:
    """One root with its modes; safe to use from several threads."""

    def __init__(
        self,
        root: str,
        *,
        file_mode: int,
        folder_mode: int,
        synced: bool = False,
        write: WriteAll = write_all,
    ) -> None:
        self.root = Path(root)
        self.kind = f"{os.path.realpath(root)}:{file_mode:o}:{synced}"
        """Trees of one kind may link each other's files: root, mode and durability agree."""
        self._file_mode, self._folder_mode = file_mode, folder_mode
        self._synced = synced
        self._write = write
        self._checked: dict[str, Path] = {}
        self._append_lock = threading.Lock()

    def put(self, folder: str, name: str, parts: Sequence[Buffer], *, mark: str) -> Stamp:
        """Make or replace a file at one blow; `mark` names the hidden file it grows in.

        Nobody else may use the same mark at the same time: what a crash left under it is removed.
        """
        return self._grow(folder, name, mark, lambda opened: self._write(opened, parts))

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
        where = self._folder(folder)
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
            where = self._folder(folder)
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
        where = self._folder(folder)
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
        path = f"{self._folder(folder)}/{name}"
        for _ in range(2):
            try:
                # A link is there with its text or not at all, on a shared disk as well.
                os.symlink(who, path)
            except FileNotFoundError:
                self._make_folders(Path(path).parent)
            except FileExistsError:
                break
        return os.readlink(path) == who

    def append_lines(self, folder: str, name: str, lines: Iterable[str]) -> None:
        """Add all of the lines to a file of lines or, after an OSError, none of them.

        The file is made when it is not there; a last line that a crash left torn is cut off first.
        """
        path = self._folder(folder) / name
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._append_lock:
            opened = self._open_for_append(path)
            self._filled(opened, lambda file: self._write(file, (data,)), appending=True)

    def lines(self, folder: str, name: str) -> list[str]:
        """Return the whole lines of a small file of lines; none when it is not there."""
        path = self._folder(folder) / name
        try:
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            return []
        with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read().split("\n")[:-1]

    def has(self, folder: str, name: str) -> bool:
        """Return whether something of that name is there."""
        return os.path.lexists(self._folder(folder) / name)

    def _grow(self, folder: str, name: str, mark: str, fill: Callable[[int], None]) -> Stamp:
        where = self._folder(folder)
        temporary = f"{where}/.{mark}.tmp"
        # With the mode it will have: changing it later would be one more call for every file.
        try:
            descriptor = os.open(temporary, _CREATE, self._file_mode)
        except OSError as error:
            self._make_way(temporary, error)
            descriptor = os.open(temporary, _CREATE, self._file_mode)
        try:
            stamp = self._filled(descriptor, fill)
            os.rename(temporary, f"{where}/{name}")
        except BaseException:
            discard(temporary)
            raise
        if self._synced:
            sync_folder(where)
        return stamp

    def _copy(self, piece: Piece, target: int) -> None:
        folder, _, name = piece.path.rpartition("/")
        source = os.open(self._folder(folder) / name, _READ)
        try:
            copy_end(source, target, piece.start, piece.length, self._write)
        finally:
            os.close(source)

    def _filled(
        self, descriptor: int, fill: Callable[[int], None], *, appending: bool = False
    ) -> Stamp:
        behind = 0
        try:
            if appending:
                behind = cut_torn(descriptor)
            fill(descriptor)
            facts = os.fstat(descriptor)
            # The process may mask bits, and a folder may have rules of its own.
            if stat.S_IMODE(facts.st_mode) != self._file_mode:
                os.fchmod(descriptor, self._file_mode)
            if self._synced:
                os.fsync(descriptor)
            return _stamp(facts)
        except BaseException:
            # The next line would become part of a torn one.
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
            self._make_folders(Path(path).parent)
        elif isinstance(error, FileExistsError):
            os.unlink(path)
        else:
            raise error

    def _open_for_append(self, path: Path) -> int:
        try:
            return os.open(path, _APPEND, 0o600)
        except FileNotFoundError:
            self._make_folders(path.parent)
        except PermissionError:
            # The plan's mode is usually read-only, for the owner too.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise
            path.chmod(self._file_mode | stat.S_IRUSR | stat.S_IWUSR)
        return os.open(path, _APPEND, 0o600)

    def _folder(self, folder: str) -> Path:
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

    def _make_folders(self, folder: Path) -> None:
        missing: list[Path] = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            path.chmod(self._folder_mode)
            if self._synced:
                sync_folder(path.parent)


def _stamp(facts: os.stat_result) -> Stamp:
    return Stamp(facts.st_ino, facts.st_size, facts.st_mtime_ns)
