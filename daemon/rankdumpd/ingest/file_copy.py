"""Copy of one source file into the tree. The file is checked not to be open for writing, read,
examined, then written or linked. Many threads copy at the same time.

The kernel tells whether a file is still being written; where it cannot, the file has to stay
unchanged for a while. The kernel grants a read lease only while no process has the file open for
writing. The lease is given back at once, or is held while the file is mapped: a process that opens
the file for writing then waits, and cannot truncate what is being read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import mmap
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rankdump._codec.file_codec import FileCodec, is_worthwhile, pack_file, select_codec
from rankdump._codec.zstd_frames import ByteBuffer
from rankdump._layout.tree_paths import MAX_NAME_BYTES
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import FileStamp, OriginalFile
from rankdumpd.agent.storage.record_writer import MIN_LINKED_BYTES, DuplicateIndex
from rankdumpd.agent.storage.tree import DumpTree, make_stamp
from rankdumpd.ingest.dump_file import (
    CandidateFile,
    DumpFileKind,
    FileContent,
    IngestedFile,
    SkippedFile,
    SkipReason,
    examine_file,
)
from rankdumpd.ingest.folder import IngestFolder

SETTLE_TIME_S = 2.0
"""Seconds that a file has to stay unchanged where the kernel grants no lease (NFS,
other owners).
"""


@contextmanager
def hold_read_lease(descriptor: int) -> Generator[bool | None, None, None]:
    """Hold a read lease of an open file; yield whether no process has the file open for writing.

    Yield None where the kernel cannot tell.
    """
    try:
        # When a process opens the file for writing, the kernel sends this signal, which is ignored;
        # the default signal would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        yield False if error.errno == errno.EAGAIN else None
        return
    try:
        yield True
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class SettlingFiles:
    """Files that are tried again once they have stayed unchanged for a while."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[FileStamp | None, float]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, path: str, stamp: FileStamp | None, now_s: float) -> None:
        """Begin the waiting time of a file, unless the same version of the file waits already."""
        known = self._since.get(path)
        if known is None or known[0] != stamp:
            self._since[path] = stamp, now_s

    def touch(self, path: str, now_s: float) -> None:
        """Begin the waiting time of a waiting file again, because the file has changed."""
        self._since[path] = None, now_s

    def next_due_s(self) -> float:
        """Return when the next file is due, in seconds; infinity when no file waits."""
        first_s = min((since for _, since in self._since.values()), default=math.inf)
        return first_s + SETTLE_TIME_S

    def pop_settled(
        self, now_s: float, stamp_now: Callable[[str], FileStamp | None]
    ) -> list[CandidateFile]:
        """Return and forget the files that have stayed unchanged; the changed ones wait again."""
        settled: list[CandidateFile] = []
        for path, (seen, since_s) in list(self._since.items()):
            if now_s < since_s + SETTLE_TIME_S:
                continue
            del self._since[path]
            stamp = stamp_now(path)
            if seen is None or stamp == seen:
                settled.append(CandidateFile(path, aged=True))
            elif stamp is not None:
                self._since[path] = stamp, now_s
        return settled


MIN_MAPPED_BYTES = 32 << 20
"""Size from which files are mapped, where a lease prevents others from truncating them."""
_MAX_DIGEST_LOCKS = 256
_MAX_UNCOMMITTED = 4096


class FileCopier:
    """Copies files into one tree; safe to use from several threads, one at a time for each path."""

    def __init__(
        self,
        source: IngestFolder,
        tree: DumpTree,
        codec: FileCodec,
        original: Callable[[str], OriginalFile | None],
        *,
        stored_as: str,
    ) -> None:
        """`original` returns a file in the tree by the digest under which that file was ingested.

        `stored_as` is part of this digest, so files that differ in it are not linked.
        """
        self._source, self._tree, self._codec = source, tree, codec
        self._stored_as = stored_as
        self._original = original
        self._turns = [threading.Lock() for _ in range(_MAX_DIGEST_LOCKS)]
        self._uncommitted = DuplicateIndex(_MAX_UNCOMMITTED)

    def copy_file(
        self, candidate: CandidateFile, before: IngestedFile | None
    ) -> IngestedFile | SkippedFile:
        """Copy a file; return the file in the tree, or why the file was not copied.

        `before` is the file that was ingested from the same path earlier.
        """
        path = candidate.path
        try:
            file = self._source.open(path)
        except FileNotFoundError:
            return SkippedFile(path, SkipReason.GONE)
        except OSError as error:
            return SkippedFile(path, SkipReason.FAILED, f"cannot be opened: {error.strerror}")
        try:
            return self._settled(candidate, file.number, before)
        except OSError as error:
            return SkippedFile(path, SkipReason.FAILED, f"cannot be copied: {error.strerror}")

    def _settled(
        self, candidate: CandidateFile, descriptor: int, before: IngestedFile | None
    ) -> IngestedFile | SkippedFile:
        path = candidate.path
        with hold_read_lease(descriptor) as free:
            if free is False:
                return SkippedFile(path, SkipReason.WRITTEN, "a process has it open for writing")
            facts = os.fstat(descriptor)
            stamp = make_stamp(facts)
            if free is None and not (candidate.closed or candidate.aged):
                return SkippedFile(path, SkipReason.YOUNG, stamp=stamp)
            data = _read_contents(descriptor, facts.st_size, mapped=bool(free))
            try:
                content = examine_file(path.rpartition("/")[2], memoryview(data))
            except CorruptedError as error:
                return SkippedFile(path, SkipReason.DAMAGED, str(error), stamp)
            if make_stamp(os.fstat(descriptor)) != stamp:
                return SkippedFile(path, SkipReason.WRITTEN, "it changed while it was read", stamp)
            return self._kept(path, stamp, content, before)

    def _kept(
        self, path: str, stamp: FileStamp, content: FileContent, before: IngestedFile | None
    ) -> IngestedFile | SkippedFile:
        digest = f"{content.digest} {content.kind.value} {self._stored_as}"
        if before and before.removed and before.digest.partition(" ")[0] != content.digest:
            return SkippedFile(
                path, SkipReason.FAILED, "another file of that name was ingested and removed", stamp
            )
        linkable = content.kind.holds_tensors and stamp.size_bytes >= MIN_LINKED_BYTES
        with self._turns[hash(digest) % _MAX_DIGEST_LOCKS]:
            original = None
            if linkable:
                original = self._uncommitted.find(digest) or self._original(digest)
            linked = self._link(path, original) if original else None
            stored = linked or self._write(path, content)
            if linkable and not linked:
                self._uncommitted.remember(digest, stored)
        return IngestedFile(
            path=path,
            kind=content.kind,
            source=stamp,
            digest=digest,
            target=stored.path,
            stored=stored.stamp,
            linked=linked is not None,
            members=content.members,
        )

    def _link(self, path: str, original: OriginalFile) -> OriginalFile | None:
        suffix = "" if select_codec(path).suffix else select_codec(original.path).suffix
        target = path + suffix
        folder, _, name = target.rpartition("/")
        if target == original.path or _is_too_long(name):
            return None  # the same file again, which cannot be linked to itself
        try:
            self._tree.link(original, folder, name, mark=build_file_mark(path))
        except OSError:
            return None  # the original has changed or cannot be linked, so the file is written
        return OriginalFile(target, original.stamp)

    def _write(self, path: str, content: FileContent) -> OriginalFile:
        folder, _, name = path.rpartition("/")
        suffix, parts = self._codec.suffix, _pack_content(content, self._codec)
        if parts is content.frames or _is_too_long(name + suffix):
            suffix, parts = "", content.frames
        stamp = self._tree.put(folder, name + suffix, parts, mark=build_file_mark(path))
        return OriginalFile(path + suffix, stamp)


def build_file_mark(path: str) -> str:
    """Return the part of the hidden file's name that identifies the copy of a path."""
    return f"ingest-{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"


def _read_contents(descriptor: int, size: int, *, mapped: bool) -> ByteBuffer | mmap.mmap:
    if mapped and size > MIN_MAPPED_BYTES:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size and (count := os.preadv(descriptor, [view[at:]], at)):
        at += count
    return data[:at] if at < size else data


def _pack_content(content: FileContent, codec: FileCodec) -> Sequence[ByteBuffer]:
    """Return the packed bytes of a file; `content.frames` itself if the file is copied as it is."""
    frames = content.frames
    if content.kind in (DumpFileKind.PLAIN, DumpFileKind.PACKED) or not codec.suffix:
        return frames
    if len(frames) == 1:
        return pack_file(codec, frames)
    # Each payload of a bin file is compressed separately, so that readers can read it alone.
    parts = [part for frame in frames for part in codec.encode((frame,))]
    return parts if is_worthwhile(parts, sum(map(len, frames))) else frames


def _is_too_long(name: str) -> bool:
    return len(os.fsencode(name)) > MAX_NAME_BYTES
