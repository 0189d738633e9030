"""Files of one dump tree: each is complete or absent, has the modes of the plan, and is never
outside the root.

A file is written under a hidden name and renamed when it is complete; a group of lines is appended
completely or not at all. The `mapping.csv` of a folder maps short file names to full ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from rankdump._analysis.table.tree_access import lock_descriptor
from rankdump._codec.zstd_frames import ByteBuffer
from rankdump._core.bounded_cache import remember
from rankdump._core.tree_root import READ_FLAGS
from rankdump._kernels.kernel_functions import KERNELS
from rankdump._layout.tree_paths import MAPPING_FILE, FilePlace
from rankdumpd.agent.records import FileDescriptor, FileStamp, FileTail, OriginalFile
from rankdumpd.agent.storage.folders import LIST_FLAGS, TreeFolders, sync_folder


class RootedFolder:
    """Read access to the files below one root; safe to use from several threads."""

    def __init__(self, root: str, *, folder_mode: int, synced: bool) -> None:
        self.root = Path(root)
        self._folders = TreeFolders(self.root, mode=folder_mode, synced=synced)

    def make(self, folder: str) -> None:
        """Create a folder and its parents where they are missing."""
        self._folders.open(folder, make=True)

    def lines(self, folder: str, name: str) -> list[str]:
        """Return the complete lines of a small text file; none when the file does not exist."""
        return list(self.each_line(folder, name))

    def each_line(self, folder: str, name: str) -> Iterator[str]:
        """Yield the complete lines of a text file, of which only one at a time is in memory."""
        try:
            descriptor = self._open(folder, name)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line[:-1]

    def has(self, folder: str, name: str) -> bool:
        """Return whether the folder has an entry with this name."""
        try:
            where = self._folders.open(folder)
            os.stat(name, dir_fd=where.number, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a file; for a link, of the link itself."""
        where, name = self._locate(path)
        return os.stat(name, dir_fd=where.number, follow_symlinks=False)

    def open_file(self, path: str) -> FileDescriptor:
        """Open a regular file for reading; OSError for anything else."""
        folder, _, name = path.rpartition("/")
        file = FileDescriptor(self._open(folder, name))
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file

    def read_start(self, path: str, count: int) -> tuple[int, bytes]:
        """Return the size of a file and its first bytes."""
        file = self.open_file(path)
        return os.fstat(file.number).st_size, os.pread(file.number, count, 0)

    def read(self, folder: str, name: str) -> bytes:
        """Return the bytes of a file."""
        with self.open(folder, name) as file:
            return file.read()

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open a file for reading."""
        return os.fdopen(self._open(folder, name), "rb")

    def listing(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, and for each whether it is a folder; a link is not."""
        where = self._folders.open(folder)
        readable = FileDescriptor(os.open(".", LIST_FLAGS, dir_fd=where.number))
        with os.scandir(readable.number) as items:
            return {item.name: item.is_dir(follow_symlinks=False) for item in items}

    def read_link(self, folder: str, name: str) -> str:
        """Return the target text of a link."""
        where = self._folders.open(folder)
        return os.readlink(name, dir_fd=where.number)

    def holds(self, folder: str, name: str, parts: Sequence[ByteBuffer]) -> bool:
        """Return whether a file exists and contains exactly these bytes."""
        try:
            descriptor = self._open(folder, name)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)

    def _locate(self, path: str) -> tuple[FileDescriptor, str]:
        """Return the descriptor of a path's folder, and the name within the folder."""
        folder, _, name = path.rpartition("/")
        return self._folders.open(folder), name

    def _open(self, folder: str, name: str) -> int:
        where = self._folders.open(folder)
        return os.open(name, READ_FLAGS, dir_fd=where.number)


SmallFile: TypeAlias = "tuple[str, str, bytes]"
"""A mark, which names the hidden file as in `DumpTree.put`, the name of the file, and its bytes."""
PartsWriter = Callable[[int, Sequence[ByteBuffer]], None]
"""Function that writes all parts to an open file."""

_MAX_JOINED_BYTES = 64 << 10
_MAX_VECTORS = 1024
"""Largest number of parts in one call of `writev`; IOV_MAX on Linux."""
_LOOK_BACK_BYTES = 4096
_KERNEL_BYTES = 1 << 30
"""Largest number of bytes in one call of `copy_file_range`."""
_BLOCK_BYTES = 1 << 20
_UNSUPPORTED_ERRNOS = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of a kernel or file system that does not support copying or linking files."""


def write_parts(descriptor: int, parts: Sequence[ByteBuffer]) -> None:
    """Write every byte of every part."""
    if len(parts) > 1 and sum(map(len, parts)) <= _MAX_JOINED_BYTES:
        parts = (b"".join(parts),)
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        if len(left) == 1:
            count = os.write(descriptor, left[0])
        else:
            count = os.writev(descriptor, left[:_MAX_VECTORS])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def copy_tail(source: int, target: int, start: int, length: int, write: PartsWriter) -> None:
    """Append the last bytes of one open file to another; OSError when the file does not have
    `length` bytes.

    The kernel copies where it can, so that a large file is not read into memory.
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
    """Cut off a last line that has no line end; return the remaining size."""
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


FileRename: TypeAlias = "Callable[[str, str, int], None]"
"""Function that renames a file within an open folder, given the present name, the new name and the
folder.
"""
RenameGuard: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Function that calls a given function, which renames a file, or raises an OSError."""


def rename_file(present: str, name: str, at: int) -> None:
    """Rename a file within an open folder, replacing any other."""
    os.rename(present, name, src_dir_fd=at, dst_dir_fd=at)


def rename_over_stamped(stamp: FileStamp, present: str, name: str, at: int) -> None:
    """Rename a file over one with this stamp; OSError when that file was changed or removed."""
    if make_stamp(os.stat(name, dir_fd=at, follow_symlinks=False)) != stamp:
        raise OSError(errno.ESTALE, "the file was changed meanwhile", name)
    rename_file(present, name, at)


def rename_without_replacing(present: str, name: str, at: int) -> None:
    """Rename a file within an open folder; FileExistsError when the new name is taken.

    Atomic where the file system has hard links; elsewhere a file that is created in between is
    replaced.
    """
    try:
        os.link(present, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED_ERRNOS, errno.EMLINK):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=at, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
        rename_file(present, name, at)
        return
    discard_file(present, at)


def _guard_rename(guard: RenameGuard, rename: FileRename) -> FileRename:
    return lambda present, name, at: guard(partial(rename, present, name, at))


def discard_file(name: str, folder: int) -> None:
    """Remove a file of an open folder, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def make_stamp(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file with this status."""
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns)


_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = _CHANGE_FLAGS | os.O_APPEND
_LOOK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class DumpTree(RootedFolder):
    """The files of one dump tree; safe to use from several threads."""

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
        """Files that are appended to get the mode `growing_mode`, or `file_mode` if it is None."""
        super().__init__(root, folder_mode=folder_mode, synced=synced)
        self._file_mode = file_mode
        self._growing_mode = file_mode if growing_mode is None else growing_mode
        self._synced, self._write = synced, write
        self.kind = f"{os.path.realpath(root)}:{file_mode:o}:{synced}"
        """Trees of the same kind may link each other's files: root, file mode and
        durability agree.
        """
        # The C function syncs nothing, and writes in the same way as `write_parts`.
        is_plain = not synced and write is write_parts
        self._write_small_files = KERNELS.write_small_files if is_plain else None
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
        """Create or replace a file atomically; `mark` is part of the name of its hidden file.

        Only one caller may use a mark at a time, because a hidden file that a crash left is
        removed. FileExistsError when the name is taken and `replaces` is false.
        """
        rename = rename_file if replaces else rename_without_replacing
        return self._write_new_file(
            folder, name, mark, lambda opened: self._write(opened, parts), rename
        )

    def put_small_files(self, folder: str, files: Sequence[SmallFile]) -> list[FileStamp | OSError]:
        """Create files as `put` does without `replaces`, by one call where that is possible.

        Return the stamp of each file, or the error that prevented it.
        """
        write = self._write_small_files
        if write is None:
            return [self._put_small(folder, file) for file in files]
        try:
            where = self._folders.open(folder, make=True)
        except OSError as error:
            return [error] * len(files)
        made = write(where.number, self._file_mode, files)
        return [
            self._take_result(folder, file, found) if isinstance(found, int) else FileStamp(*found)
            for file, found in zip(files, made, strict=True)
        ]

    def _take_result(self, folder: str, file: SmallFile, error: int) -> FileStamp | OSError:
        """Return the error of a small file, or its stamp if creating it in Python succeeds."""
        if error == errno.EEXIST:
            return FileExistsError(error, os.strerror(error), file[1])
        # The way in Python finds the cause, and does not need the calls that this system lacks.
        if error in _UNSUPPORTED_ERRNOS:
            self._write_small_files = None
        return self._put_small(folder, file)

    def _put_small(self, folder: str, file: SmallFile) -> FileStamp | OSError:
        mark, name, data = file
        try:
            return self.put(folder, name, (data,), mark=mark, replaces=False)
        except OSError as error:
            return error

    def join(
        self, folder: str, name: str, head: bytes, pieces: Sequence[FileTail], *, mark: str
    ) -> FileStamp:
        """Create or replace a file that consists of `head` and the ends of other files, as `put`
        does.

        OSError when the size of one of the other files has changed.
        """

        def fill(opened: int) -> None:
            self._write(opened, (head,))
            for piece in pieces:
                source = self.open_file(piece.path)
                copy_tail(source.number, opened, piece.start, piece.length, self._write)

        return self._write_new_file(folder, name, mark, fill, rename_file)

    def rewrite(
        self,
        path: str,
        present: FileStamp,
        fill: Callable[[int], None],
        *,
        mark: str,
        guard: RenameGuard,
    ) -> FileStamp:
        """Replace a file atomically by one that `fill` writes; the modification time is kept.

        `guard` calls the function that it is given, or raises an OSError to keep the file. OSError
        also when the file does not have the stamp `present` any more.
        """
        folder, _, name = path.rpartition("/")

        def fill_and_date(opened: int) -> None:
            fill(opened)
            os.utime(opened, ns=(present.modified_ns, present.modified_ns))

        rename = _guard_rename(guard, partial(rename_over_stamped, present))
        where, stamp = self._write_file(folder, name, mark, fill_and_date, rename)
        if self._synced:
            sync_folder(where)
        return stamp

    def write(
        self,
        folder: str,
        name: str,
        fill: Callable[[int], None],
        *,
        mark: str,
        guard: RenameGuard,
    ) -> FileStamp:
        """Create or replace a file that `fill` writes, as `put` does.

        `guard` calls the function that it is given, or raises an error to leave everything
        unchanged.
        """
        return self._write_new_file(folder, name, mark, fill, _guard_rename(guard, rename_file))

    def move(self, path: str, name: str) -> None:
        """Rename a file within its folder; do nothing when only the new name exists."""
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
        """Remove files; files that do not exist are skipped."""
        folders: dict[str, FileDescriptor] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            # If a folder has the path, somebody else created it, and it stays.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                where = self._folders.open(folder)
                os.unlink(name, dir_fd=where.number)
                folders[folder] = where
        if self._synced:
            for where in folders.values():
                sync_folder(where)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder; OSError when it is not empty or does not exist."""
        where, name = self._locate(folder)
        os.rmdir(name, dir_fd=where.number)
        if self._synced:
            sync_folder(where)

    def link(self, original: OriginalFile, folder: str, name: str, *, mark: str) -> None:
        """Create a hard link to a file, atomically; `mark` is used as in `put`.

        OSError when the file was changed since it was written, FileExistsError when the name is
        taken.
        """
        where = self._folders.open(folder, make=True)
        try:
            self._link_file(original, where, name, mark, rename_without_replacing)
        except FileExistsError:
            # The name is a link to this file already, if the record was resent.
            status = os.stat(name, dir_fd=where.number, follow_symlinks=False)
            if status.st_ino != original.stamp.inode:
                raise
        self._sync_name(where, name, original.stamp)

    def relink(
        self,
        original: OriginalFile,
        path: str,
        present: FileStamp,
        *,
        mark: str,
        guard: RenameGuard,
    ) -> None:
        """Replace a file atomically by a link to another one; otherwise as `rewrite`."""
        where, name = self._locate(path)
        rename = _guard_rename(guard, partial(rename_over_stamped, present))
        self._link_file(original, where, name, mark, rename)
        if self._synced:
            sync_folder(where)

    def _link_file(
        self,
        original: OriginalFile,
        where: FileDescriptor,
        name: str,
        mark: str,
        rename: FileRename,
    ) -> None:
        source, present = self._locate(original.path)
        temporary, at = f".{mark}.tmp", where.number
        ends = {"src_dir_fd": source.number, "dst_dir_fd": at}
        try:
            os.link(present, temporary, follow_symlinks=False, **ends)
        except FileExistsError:
            os.unlink(temporary, dir_fd=at)
            os.link(present, temporary, follow_symlinks=False, **ends)
        try:
            # Read from the new link, because the file at the original's path may be replaced at any
            # time.
            status = os.stat(temporary, dir_fd=at, follow_symlinks=False)
            mode = stat.S_IFREG | self._file_mode
            if status.st_mode != mode or make_stamp(status) != original.stamp:
                raise OSError(errno.ESTALE, "not the file that was written", original.path)
            rename(temporary, name, at)
        except BaseException:
            discard_file(temporary, at)
            raise

    def claim(self, folder: str, name: str, owner: str) -> bool:
        """Claim a name for an owner; return whether the owner has it, now or since earlier."""
        where = self._folders.open(folder, make=True)
        # A symbolic link is created atomically together with its text, even on a shared disk.
        with contextlib.suppress(FileExistsError):
            os.symlink(owner, name, dir_fd=where.number)
        return os.readlink(name, dir_fd=where.number) == owner

    def open_lock_file(self, folder: str, name: str, *, make: bool) -> FileDescriptor:
        """Open a lock file, and create it if it does not exist.

        FileNotFoundError when the root does not exist, unless `make` is true.
        """
        if not make:
            self._folders.open("")
        where = self._folders.open(folder, make=True)
        # Some file systems grant an exclusive lock only on a writable file.
        mode = self._file_mode | stat.S_IWUSR
        try:
            made = os.open(name, READ_FLAGS | os.O_CREAT | os.O_EXCL, mode, dir_fd=where.number)
        except FileExistsError:
            return FileDescriptor(os.open(name, READ_FLAGS, dir_fd=where.number))
        opened = FileDescriptor(made)
        os.fchmod(made, mode)
        return opened

    @contextlib.contextmanager
    def lock(self, folder: str, name: str) -> Generator[None]:
        """Lock a file for one process at a time; BlockingIOError when another process holds the
        lock.
        """
        opened = self.open_lock_file(folder, name, make=True)
        lock_descriptor(opened.number)
        yield
        del opened  # deleting the last reference releases the lock

    def append_lines(self, folder: str, name: str, lines: Iterable[str]) -> None:
        """Append all of the lines to a text file or, after an OSError, none of them.

        The file is created if it does not exist; an incomplete last line that a crash left is cut
        off first.
        """
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._append_lock:
            opened = self._open_growing(folder, name, _APPEND_FLAGS)
            write = self._write
            self._fill_and_close(
                opened, lambda file: write(file, (data,)), self._growing_mode, cut_torn_line
            )

    def change(self, folder: str, name: str, change: Callable[[int], None]) -> None:
        """Change a growing file in place; the file is created if it does not exist."""
        with self._append_lock:
            opened = self._open_growing(folder, name, _CHANGE_FLAGS)
            self._fill_and_close(opened, change, self._growing_mode, lambda _: None)

    def _open_growing(self, folder: str, name: str, flags: int) -> int:
        where = self._folders.open(folder, make=True)
        try:
            return os.open(name, flags, 0o600, dir_fd=where.number)
        except PermissionError:
            # The plan's mode is usually read-only, even for the owner.
            self._make_writable(name, where)
        return os.open(name, flags, 0o600, dir_fd=where.number)

    def _make_writable(self, name: str, where: FileDescriptor) -> None:
        file = FileDescriptor(os.open(name, _LOOK_FLAGS, dir_fd=where.number))
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise PermissionError(errno.EACCES, "not a regular file", name)
        # Through this path, because fchmod rejects an O_PATH descriptor.
        os.chmod(f"/proc/self/fd/{file.number}", self._growing_mode | stat.S_IRUSR | stat.S_IWUSR)

    def _write_new_file(
        self, folder: str, name: str, mark: str, fill: Callable[[int], None], rename: FileRename
    ) -> FileStamp:
        where, stamp = self._write_file(folder, name, mark, fill, rename)
        self._sync_name(where, name, stamp)
        return stamp

    def _write_file(
        self, folder: str, name: str, mark: str, fill: Callable[[int], None], rename: FileRename
    ) -> tuple[FileDescriptor, FileStamp]:
        temporary = f".{mark}.tmp"
        where, descriptor = self._create_hidden(folder, temporary)
        at = where.number
        try:
            stamp = self._fill_and_close(descriptor, fill, self._file_mode)
            rename(temporary, name, at)
        except BaseException:
            discard_file(temporary, at)
            raise
        return where, stamp

    def _create_hidden(self, folder: str, temporary: str) -> tuple[FileDescriptor, int]:
        for attempt in ("first", "again"):
            where = self._folders.open(folder, make=True)
            # Created with the final mode, because changing it later would be another system call
            # for every file.
            try:
                return where, os.open(
                    temporary, _CREATE_FLAGS, self._file_mode, dir_fd=where.number
                )
            except FileExistsError:
                os.unlink(temporary, dir_fd=where.number)
            except FileNotFoundError:
                # The folder was removed between both calls.
                if attempt == "again":
                    raise
        return where, os.open(temporary, _CREATE_FLAGS, self._file_mode, dir_fd=where.number)

    def _sync_name(self, where: FileDescriptor, name: str, stamp: FileStamp) -> None:
        """Make a file's name survive a power loss; if that fails, remove the file, which then
        counts as dropped.
        """
        if not self._synced:
            return
        try:
            sync_folder(where)
        except OSError:
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=where.number, follow_symlinks=False)
                if status.st_ino == stamp.inode:
                    os.unlink(name, dir_fd=where.number)
            raise

    def _fill_and_close(
        self,
        descriptor: int,
        fill: Callable[[int], None],
        mode: int,
        repair: Callable[[int], int | None] = lambda _: 0,
    ) -> FileStamp:
        """Fill and close a file; after an error the file is cut to the size that
        `repair` returned.
        """
        size: int | None = None
        try:
            size = repair(descriptor)
            fill(descriptor)
            status = os.fstat(descriptor)
            # The umask may remove bits of the mode, and a folder may have a default ACL.
            if stat.S_IMODE(status.st_mode) != mode:
                os.fchmod(descriptor, mode)
            if self._synced:
                os.fsync(descriptor)
            return make_stamp(status)
        except BaseException:
            # Without the cut, the next appended line would become part of an incomplete one.
            if size is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)


_MAX_MAPPED_FOLDERS = 64


class MappingFiles:
    """The mapping files of one tree; safe to use from several threads."""

    def __init__(self, tree: DumpTree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._mapped: dict[str, set[str]] = {}

    def write_mapping(self, place: FilePlace) -> None:
        """Write the full name of a shortened file name once, before the file itself is written."""
        if not place.mapped_from:
            return
        # The lock is held until the line is written, so that two tensors with the same name do not
        # both add it.
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
