"""Thread that packs the files that were stored unpacked: oldest first, in batches of one iteration.
A file is packed by a separate process, or becomes a link to a packed file with the same content.

A file is replaced by a packed file of the same name, then its row in the ledger gets the new size.
With the last file of an iteration, the manifest gets all new sizes. A crash between any two steps
leaves a complete tree, and rows from which the next process continues. Files are packed at idle
priority; while little space is left, at the priority of the agent.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rankdump._codec.zstd_frames import STORED_HEAD_BYTES, is_stored_frame
from rankdump._core.backoff import RetryBackoff
from rankdump._core.manifest import Manifest
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import PackBacklog
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.agent.backlog.pack_process import PackProcess
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.deferred_work import UnpackedFile
from rankdumpd.agent.ledger.rows import StoredRecord
from rankdumpd.agent.limits.admission import is_space_short
from rankdumpd.agent.limits.resource_limits import ResourceLimits
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.records import FileStamp, FrameId, OriginalFile
from rankdumpd.agent.session.registry import (
    UNUSABLE_ROW_ERRORS,
    SessionRegistry,
    read_stored_session,
)
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.folders import ABSENT_ERRORS
from rankdumpd.agent.storage.record_writer import DuplicateIndex, make_content_key
from rankdumpd.agent.storage.session_storage import SessionStorage, make_session_storage
from rankdumpd.agent.storage.tree import RenameGuard, make_stamp
from rankdumpd.agent.storage.tree_lock import TreeLock
from rankdumpd.server import state_files
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.metrics import MetricCounters

MAX_BATCH_FILES = 1024
MAX_BATCH_BYTES = 64 << 20
"""Unpacked bytes after which the sizes of the packed files are entered in the ledger."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
PROCESS_LINGER_S = 2.0
"""Seconds for which the pack process stays without work, because starting one takes a tenth of a
second.
"""

_logger = logging.getLogger(__name__)


class _LargerFileError(Exception):
    """The packed file would not be smaller than the unpacked one."""


class FilePacker:
    """Packs files one after the other; for one thread, except for `close`."""

    def __init__(self, originals: DuplicateIndex) -> None:
        """`originals` is the index of files to link to; packed files are added to it."""
        self._originals = originals
        self._lock = threading.Lock()
        self._process: PackProcess | None = None
        self._is_closed = False

    def pack(
        self, file: UnpackedFile, storage: SessionStorage, *, is_idle: bool, guard: RenameGuard
    ) -> int:
        """Pack a file and return the bytes that it takes afterwards; 0 for a link.

        A file stays as it is if an earlier process has packed it, if it would not become smaller,
        or if it was changed or removed. CorruptedError for a damaged file, OSError when a disk or
        the pack process fails. `guard` is the one of `DumpTree.rewrite`.
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
        """End the pack process, because there is nothing to pack for some time."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the pack process for good, even while it packs a file."""
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
        """Replace a link to an unpacked file by a link to the packed file; return whether that was
        done.
        """
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


class _BacklogSession(NamedTuple):
    """A session with files that wait to be packed; it may have ended long ago."""

    request: SessionRequest
    storage: SessionStorage


class BacklogPacker:
    """Packs waiting files in a thread of its own; safe to use from several threads."""

    def __init__(
        self,
        ledger: AgentLedger,
        registry: SessionRegistry,
        limits: ResourceLimits,
        usage: DumpUsage,
        packer: FilePacker,
        *,
        tree_changes: threading.Lock,
        counters: MetricCounters,
    ) -> None:
        """`tree_changes` is a lock that is held wherever a manifest is written from the ledger."""
        self._ledger, self._registry, self._limits = ledger, registry, limits
        self._usage, self._packer = usage, packer
        self._tree_changes, self._counters = tree_changes, counters
        self._thread = BackgroundThread(self._run, "rankdumpd-packer")
        self._work = threading.Event()
        self._changed = threading.Condition()
        self._backoff = RetryBackoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._session: _BacklogSession | None = None
        self._packed = (0, 0, 0)
        self._problem = ""
        self._is_finishing = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Notify the thread that more files wait."""
        self._work.set()

    @property
    def finished_count(self) -> int:
        """Number of files that have been packed."""
        return self._packed[0]

    def finish(self, timeout_s: float) -> int:
        """Pack all files at the priority of the agent, for at most `timeout_s`; return how many
        still wait.
        """
        self._is_finishing = True
        with self._changed:
            self._changed.wait_for(lambda: not self._goes_on(), timeout_s)
        return self._ledger.unpacked.sums[0]

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Leave all other files to the next process; return whether the thread has ended."""
        self._thread.request_stop()
        self._packer.close()
        self._work.set()
        return self._thread.join(timeout_s)

    def findings(self) -> list[str]:
        """Return why files are not packed: one sentence, or none."""
        problem = self._problem or self._thread.fault()
        return [f"files that were stored unpacked are not packed: {problem}"] if problem else []

    def status(self) -> PackBacklog:
        """Return the size of what waits to be packed, and of what this process has packed."""
        return PackBacklog(*self._ledger.unpacked.sums, *self._packed)

    def pack_some(self) -> bool:
        """Pack the next files of one iteration; return False when no file waits.

        An error of a disk, of the ledger or of the pack process is raised, and the files are tried
        again.
        """
        files = self._ledger.unpacked.list_next(MAX_BATCH_FILES)
        if not files:
            return False
        try:
            session = self._find_session(files[0].session_id)
        except UNUSABLE_ROW_ERRORS as error:
            self._give_up(files, error)
            return True
        lock = TreeLock(session.storage.tree)
        lock.acquire(make=False)
        try:
            self._pack_files(files, session)
        finally:
            lock.release()
        return True

    def _run(self) -> None:
        while not self._thread.is_stopping:
            self._work.clear()
            try:
                has_more = self.pack_some()
            except (OSError, sqlite3.Error, RankdumpError) as error:
                self._postpone(error)
                continue
            self._backoff.reset()
            self._note_problem("")
            if not has_more and not self._work.wait(PROCESS_LINGER_S):
                self._packer.end_process()
                self._work.wait()

    def _goes_on(self) -> bool:
        waiting_files, _ = self._ledger.unpacked.sums
        return waiting_files > 0 and not self._problem and self._thread.is_running

    def _postpone(self, error: Exception) -> None:
        if not self._thread.is_stopping:
            self._note_problem(state_files.describe_error(error))
            self._thread.wait(self._backoff.next_pause_s())

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            _logger.error("files that were stored unpacked are not packed: %s", problem)
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _find_session(self, session_id: str) -> _BacklogSession:
        known = self._registry.find(session_id)
        if known is not None:
            return _BacklogSession(known.request, known.storage)
        if self._session is None or self._session.request.session_id != session_id:
            request, plan = read_stored_session(self._ledger, session_id)
            self._session = _BacklogSession(request, make_session_storage(request, plan))
        return self._session

    def _give_up(self, files: Sequence[UnpackedFile], error: Exception) -> None:
        """Leave files unpacked for good, because their session cannot be used."""
        _logger.error("%d files stay unpacked: %s", len(files), error)
        self._ledger.unpacked.enter_packed(
            [(file, file.bytes_stored) for file in files], synced=False
        )

    def _pack_files(self, files: Sequence[UnpackedFile], session: _BacklogSession) -> None:
        """Pack files until the batch is full, and enter the packed ones in the ledger, even after
        an error.
        """
        packed: list[tuple[UnpackedFile, int]] = []
        left_bytes = MAX_BATCH_BYTES
        try:
            for file in files:
                if self._thread.is_stopping or left_bytes <= 0:
                    break
                packed.append((file, self._pack_file(file, session)))
                left_bytes -= file.bytes_stored
        finally:
            if packed:
                self._enter_packed(packed, session)

    def _pack_file(self, file: UnpackedFile, session: _BacklogSession) -> int:
        try:
            return self._packer.pack(
                file,
                session.storage,
                is_idle=not self._is_urgent(session),
                guard=partial(self._rename_waiting, file),
            )
        except (CorruptedError, OSError) as error:
            if state_files.is_transient(error):
                raise
            _logger.error("%s stays unpacked: %s", file.path, error)
            return file.bytes_stored

    def _is_urgent(self, session: _BacklogSession) -> bool:
        """Return whether packing must not wait for an idle core."""
        usage = self._limits.usage_at(session.storage.tree.root, session.request.job_id)
        return self._is_finishing or is_space_short(usage, self._ledger.unpacked.sums[1])

    def _rename_waiting(self, file: UnpackedFile, rename: Callable[[], None]) -> None:
        """Call `rename` if the file still waits; if it does not, its iteration is being removed."""
        if not self._ledger.unpacked.has(file):
            raise FileNotFoundError(file.path)
        rename()

    def _enter_packed(
        self, packed: Sequence[tuple[UnpackedFile, int]], session: _BacklogSession
    ) -> None:
        """Enter the sizes of packed files in the ledger, and in the manifest if no file of the
        iteration waits.
        """
        first, request = packed[0][0], session.request
        saved = sum(file.bytes_stored - size for file, size in packed)
        with self._tree_changes:
            if not self._ledger.unpacked.has(first):
                return  # all of these files are being removed
            manifest = self._update_manifest(packed, session)
            self._ledger.unpacked.enter_packed(packed, synced=session.storage.is_synced)
            self._usage.add(request.job_id, str(session.storage.tree.root), -saved)
            known = self._registry.find(first.session_id)
            if known is not None:
                known.adjust_stored_bytes(first.iteration, -saved)
        # If the rank was restarted, it has a newer session, and the coordinator must not get an
        # older balance after the newer one.
        if manifest is not None and manifest.session and known is not None and not known.has_ended:
            end = FrameId(first.session_id, manifest.session.last_sequence)
            self._ledger.enter_waiting_iteration(end, manifest.status)
        self._count_packed([file for file, size in packed if size != file.bytes_stored], saved)

    def _update_manifest(
        self, packed: Sequence[tuple[UnpackedFile, int]], session: _BacklogSession
    ) -> Manifest | None:
        """Update the manifest of an iteration whose last files are packed; return it, or None."""
        first, storage = packed[0][0], session.storage
        if self._ledger.unpacked.count(first.session_id, first.iteration) > len(packed):
            return None
        kept = self._ledger.kept(first.session_id, first.iteration)
        records = (each.record for each in kept if isinstance(each, StoredRecord))
        sizes = {record.path: record.bytes_stored for record in records}
        sizes |= {file.path: size for file, size in packed}
        folder = storage.layout.rank_folder(session.request.rank)
        try:
            return rank_files.update_manifest(
                storage.tree, folder, first.iteration, first.session_id, sizes
            )
        except CorruptedError as error:
            _logger.error("iteration %d: %s", first.iteration, error)
            return None

    def _count_packed(self, packed: Sequence[UnpackedFile], saved: int) -> None:
        byte_count = sum(file.bytes_stored for file in packed)
        self._counters.add("rankdump_agent_packed_later_bytes_total", byte_count)
        with self._changed:
            files, before, less = self._packed
            self._packed = files + len(packed), before + byte_count, less + saved
            self._changed.notify_all()
