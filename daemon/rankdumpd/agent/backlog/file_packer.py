"""Packing of one file that was stored unpacked: by a process of its own, or as a link to a packed
file with the same content.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial

from rankdump._codec.zstd_frames import STORED_HEAD_BYTES, is_stored_frame
from rankdump.errors import UnavailableError
from rankdumpd.agent.backlog.pack_process import PackProcess
from rankdumpd.agent.ledger.unpacked_files import UnpackedFile
from rankdumpd.agent.records import FileStamp, OriginalFile
from rankdumpd.agent.storage.folders import ABSENT_ERRORS
from rankdumpd.agent.storage.record_writer import DuplicateIndex, make_content_key
from rankdumpd.agent.storage.session_storage import SessionStorage
from rankdumpd.agent.storage.tree import RenameGuard, make_stamp


class _LargerFileError(Exception):
    """The packed file would not be smaller."""


class FilePacker:
    """Packs files one after the other; for one thread, except for `close`."""

    def __init__(self, originals: DuplicateIndex) -> None:
        """Links are found in the index of files, which learns of packed ones."""
        self._originals = originals
        self._lock = threading.Lock()
        self._process: PackProcess | None = None
        self._is_closed = False

    def pack(
        self, file: UnpackedFile, storage: SessionStorage, *, is_idle: bool, guard: RenameGuard
    ) -> int:
        """Pack a file and return the bytes that it takes now; 0 for a link.

        The file of an earlier process that was packed already stays, and so does one that would
        not become smaller, or that was changed or removed. CorruptedError for a damaged file,
        OSError when a disk or the process fails. `guard` is that of `DumpTree.rewrite`.
        """
        try:
            source = storage.tree.open_file(file.path)
        except ABSENT_ERRORS:
            return file.bytes_stored
        status = os.fstat(source.number)
        if not is_stored_frame(os.pread(source.number, STORED_HEAD_BYTES, 0)):
            return 0 if file.is_link and status.st_nlink > 1 else status.st_size
        present = make_stamp(status)
        key = make_content_key(file.digest, file.dtype, file.shape, storage.file_kind)
        if file.is_link and self._relink(file, storage, present, key, guard):
            return 0
        process = self._get_process(is_idle=is_idle)
        fill = partial(_fill_smaller, partial(process.pack, source.number), status.st_size)
        try:
            stamp = storage.tree.rewrite(
                file.path, present, fill, mark=_make_mark(file), guard=guard
            )
        except _LargerFileError:
            return file.bytes_stored
        except OSError as error:
            if error.errno == errno.ESTALE or isinstance(error, ABSENT_ERRORS):
                return file.bytes_stored
            raise
        self._originals.remember(key, OriginalFile(file.path, stamp))
        return stamp.size_bytes

    def end_process(self) -> None:
        """End the process: there is nothing to pack for some time."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process for good, also while it packs a file."""
        self._is_closed = True
        self.end_process()

    def _relink(
        self,
        file: UnpackedFile,
        storage: SessionStorage,
        present: FileStamp,
        key: str,
        guard: RenameGuard,
    ) -> bool:
        """Replace a link to an unpacked file by one to the packed file; return whether it is."""
        original = self._originals.find(key)
        if original is None or original.unpacked or original.path == file.path:
            return False
        try:
            storage.tree.relink(original, file.path, present, mark=_make_mark(file), guard=guard)
        except OSError:
            return False
        return True

    def _get_process(self, *, is_idle: bool) -> PackProcess:
        process = self._process
        if process is not None and (process.is_idle != is_idle or process.has_failed):
            self.end_process()
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the agent is stopping")
            if self._process is None:
                self._process = PackProcess(is_idle=is_idle)
            return self._process


def _fill_smaller(pack: Callable[[int], int], largest_bytes: int, target: int) -> None:
    if pack(target) >= largest_bytes:
        raise _LargerFileError


def _make_mark(file: UnpackedFile) -> str:
    return f"{file.session_id}-{file.sequence}-pack"
