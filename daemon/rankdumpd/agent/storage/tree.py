"""One dump tree: files that are whole or not there, with the modes of the plan, never outside the
root.

A file grows under a hidden name and is renamed when it is complete; lines are appended as a
whole or not at all. Short file names stand with their full ones in the `mapping.csv` of their
folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rankdump._codec.zstd_frames import ByteBuffer
from rankdump._core.bounded_cache import remember
from rankdump._layout.tree_paths import MAPPING_FILE, FilePlace
from rankdumpd.agent.records import FileDescriptor, FileStamp, FileTail, OriginalFile
from rankdumpd.agent.storage.folders import LIST_FLAGS, TreeFolders, sync_folder

# Not blocking: a pipe in the place of a file would hold whoever opens it.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RootedFolder:
    """What stands below one root; safe to use from several threads."""

    def __init__(self, root: str, *, folder_mode: int, synced: bool) -> None:
        self.root = Path(root)
        self._folders = TreeFolders(self.root, mode=folder_mode, synced=synced)

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
        number = os.open(".", LIST_FLAGS, dir_fd=where.number)
        try:
            with os.scandir(number) as items:
                return {item.name: item.is_dir(follow_symlinks=False) for item in items}
        finally:
            os.close(number)

    def holds(self, folder: str, name: str, parts: Sequence[ByteBuffer]) -> bool:
        """Return whether a file is there and holds just these bytes."""
        try:
            descriptor = self._open(folder, name)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)

    def _open(self, folder: str, name: str) -> int:
        where = self._folders.open(folder)
        return os.open(name, READ_FLAGS, dir_fd=where.number)


PartsWriter = Callable[[int, Sequence[ByteBuffer]], None]
"""Writes all parts to an open file."""

_MAX_JOINED_BYTES = 64 << 10
_LOOK_BACK_BYTES = 4096
_KERNEL_BYTES = 1 << 30
"""What the kernel is asked to copy at once."""
_BLOCK_BYTES = 1 << 20
_UNSUPPORTED_ERRNOS = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What a kernel or a disk says that cannot copy within itself."""


def write_parts(descriptor: int, parts: Sequence[ByteBuffer]) -> None:
    """Write every byte of every part."""
    if len(parts) > 1 and sum(map(len, parts)) <= _MAX_JOINED_BYTES:
        parts = (b"".join(parts),)
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]


def copy_tail(source: int, target: int, start: int, length: int, write: PartsWriter) -> None:
    """Append the last bytes of one open file to another; OSError when they are not so many.

    The kernel copies where it can, so that nothing of a large file comes into memory.
    """
    size = os.fstat(source).st_size
    if size != start + length:
        raise OSError(errno.ESTALE, f"{size} bytes in a file that had {start + length}")
    end = start + length
    while start < end:
        try:
            count = os.copy_file_range(source, target, min(end - start, _KERNEL_BYTES), start)
        except OSError as error:
            if error.errno not in _UNSUPPORTED_ERRNOS:
                raise
            block = os.pread(source, min(end - start, _BLOCK_BYTES), start)
            write(target, (block,))
            count = len(block)
        if not count:
            raise OSError(errno.ESTALE, f"a file ended {end - start} bytes early")
        start += count


def cut_torn_line(descriptor: int) -> int:
    """Cut off a last line without an end; return the bytes that are left."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(end - _LOOK_BACK_BYTES, 0)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
        if found >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def rename_without_replacing(present: str, name: str, at: int) -> None:
    """Rename a file within an open folder; FileExistsError when something has that name already.

    By a second name and the end of the first, where a disk has such; else nobody looks twice.
    """
    try:
        os.link(present, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED_ERRNOS, errno.EMLINK):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=at, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
        os.rename(present, name, src_dir_fd=at, dst_dir_fd=at)
        return
    discard_file(present, at)


def discard_file(name: str, folder: int) -> None:
    """Remove a file of an open folder, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeFileWriter(RootedFolder):
    """A root with its modes, and the ways in which its files are filled."""

    def __init__(
        self,
        root: str,
        *,
        file_mode: int,
        folder_mode: int,
        growing_mode: int,
        synced: bool,
        write: PartsWriter,
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
    ) -> FileStamp:
        temporary = f".{mark}.tmp"
        where, descriptor = self._create(folder, temporary)
        at = where.number
        try:
            stamp = self._filled(descriptor, fill, self._file_mode)
            if replaces:
                os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            else:
                rename_without_replacing(temporary, name, at)
        except BaseException:
            discard_file(temporary, at)
            raise
        self._make_sure(where, name, stamp)
        return stamp

    def _create(self, folder: str, temporary: str) -> tuple[FileDescriptor, int]:
        for attempt in ("first", "again"):
            where = self._folders.open(folder, make=True)
            # With the mode it will have: changing it later would be one more call for every file.
            try:
                return where, os.open(
                    temporary, _CREATE_FLAGS, self._file_mode, dir_fd=where.number
                )
            except FileExistsError:
                os.unlink(temporary, dir_fd=where.number)
            except FileNotFoundError:
                # The folder was removed at this moment.
                if attempt == "again":
                    raise
        return where, os.open(temporary, _CREATE_FLAGS, self._file_mode, dir_fd=where.number)

    def _make_sure(self, where: FileDescriptor, name: str, stamp: FileStamp) -> None:
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

    def _copy(self, piece: FileTail, target: int) -> None:
        folder, _, name = piece.path.rpartition("/")
        source = self._open(folder, name)
        try:
            copy_tail(source, target, piece.start, piece.length, self._write)
        finally:
            os.close(source)

    def _filled(
        self,
        descriptor: int,
        fill: Callable[[int], None],
        mode: int,
        mend: Callable[[int], int | None] = lambda _: 0,
    ) -> FileStamp:
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
            return make_stamp(facts)
        except BaseException:
            # The next line would become part of a torn one.
            if behind is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, behind)
            raise
        finally:
            os.close(descriptor)


def make_stamp(facts: os.stat_result) -> FileStamp:
    """Return what tells a file from others."""
    return FileStamp(facts.st_ino, facts.st_size, facts.st_mtime_ns)


_CHANGE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = _CHANGE_FLAGS | os.O_APPEND
_LOOK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DumpTree(TreeFileWriter):
    """One root with its modes; safe to use from several threads."""

    def __init__(
        self,
        root: str,
        *,
        file_mode: int,
        folder_mode: int,
        growing_mode: int | None = None,
        synced: bool = False,
        write: PartsWriter = write_parts,
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
        self,
        folder: str,
        name: str,
        parts: Sequence[ByteBuffer],
        *,
        mark: str,
        replaces: bool = True,
    ) -> FileStamp:
        """Make or replace a file at one blow; `mark` names the hidden file it grows in.

        Nobody else may use the same mark at the same time: what a crash left under it is removed.
        FileExistsError where it `replaces` none and something has its name already.
        """

        def fill(opened: int) -> None:
            self._write(opened, parts)

        return self._grow(folder, name, mark, fill, replaces=replaces)

    def join(
        self, folder: str, name: str, head: bytes, pieces: Sequence[FileTail], *, mark: str
    ) -> FileStamp:
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
        folders: dict[str, FileDescriptor] = {}
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

    def link(self, original: OriginalFile, folder: str, name: str, *, mark: str) -> None:
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
            if facts.st_mode != mode or make_stamp(facts) != original.stamp:
                raise OSError(errno.ESTALE, "not the file that was written", original.path)
            rename_without_replacing(temporary, name, at)
        except FileExistsError:
            discard_file(temporary, at)
            # Linked already: it was sent again.
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_ino != original.stamp.inode:
                raise
        except BaseException:
            discard_file(temporary, at)
            raise
        self._make_sure(where, name, original.stamp)

    def claim(self, folder: str, name: str, who: str) -> bool:
        """Put a name down for somebody; return whether it is theirs, now or since earlier."""
        where = self._folders.open(folder, make=True)
        # A link is there with its text or not at all, on a shared disk as well.
        with contextlib.suppress(FileExistsError):
            os.symlink(who, name, dir_fd=where.number)
        return os.readlink(name, dir_fd=where.number) == who

    def to_lock(self, folder: str, name: str, *, make: bool) -> FileDescriptor:
        """Return an open file that stands for a lock, made when it is not there.

        FileNotFoundError where there is no root, and it is not to be made.
        """
        if not make:
            self._folders.open("")
        where = self._folders.open(folder, make=True)
        # Some disks lock for one alone only what may be written.
        mode = self._file_mode | stat.S_IWUSR
        try:
            made = os.open(name, _LOCK_FLAGS | os.O_CREAT | os.O_EXCL, mode, dir_fd=where.number)
        except FileExistsError:
            return FileDescriptor(os.open(name, _LOCK_FLAGS, dir_fd=where.number))
        opened = FileDescriptor(made)
        os.fchmod(made, mode)
        return opened

    def append_lines(self, folder: str, name: str, lines: Iterable[str]) -> None:
        """Add all of the lines to a file of lines or, after an OSError, none of them.

        The file is made when it is not there; a last line that a crash left torn is cut off first.
        """
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._append_lock:
            opened = self._open_to_grow(folder, name, _APPEND_FLAGS)
            write = self._write
            self._filled(
                opened, lambda file: write(file, (data,)), self._growing_mode, cut_torn_line
            )

    def change(self, folder: str, name: str, change: Callable[[int], None]) -> None:
        """Let a file that grows be changed where it stands; made when it is not there."""
        with self._append_lock:
            opened = self._open_to_grow(folder, name, _CHANGE_FLAGS)
            self._filled(opened, change, self._growing_mode, lambda _: None)

    def _open_to_grow(self, folder: str, name: str, flags: int) -> int:
        where = self._folders.open(folder, make=True)
        try:
            return os.open(name, flags, 0o600, dir_fd=where.number)
        except PermissionError:
            # The plan's mode is usually read-only, for the owner too.
            self._let_write(name, where)
        return os.open(name, flags, 0o600, dir_fd=where.number)

    def _let_write(self, name: str, where: FileDescriptor) -> None:
        file = FileDescriptor(os.open(name, _LOOK_FLAGS, dir_fd=where.number))
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise PermissionError(errno.EACCES, "not a regular file", name)
        # By this name because a descriptor that only looks has no other way to it.
        os.chmod(f"/proc/self/fd/{file.number}", self._growing_mode | stat.S_IRUSR | stat.S_IWUSR)


_MAX_MAPPED_FOLDERS = 64


class MappingFiles:
    """The mapping files of one tree; safe to use from several threads."""

    def __init__(self, tree: DumpTree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._mapped: dict[str, set[str]] = {}

    def write_mapping(self, place: FilePlace) -> None:
        """Write down what a place is called in full, once, before its file is there."""
        if not place.mapped_from:
            return
        # Under the lock as a whole: two tensors of a name must not both add its line.
        with self._lock:
            names = self._mapped.get(place.folder)
            if names is None:
                lines = self._tree.lines(place.folder, MAPPING_FILE)
                names = {line.partition(",")[0] for line in lines}
                remember(self._mapped, place.folder, names, _MAX_MAPPED_FOLDERS)
            if place.name not in names:
                line = f"{place.name},{place.mapped_from}"
                self._tree.append_lines(place.folder, MAPPING_FILE, (line,))
                names.add(place.name)
