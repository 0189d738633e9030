"""Ingest of one folder into one tree: copies of its files, commits, manifests, removal of source
files, and the files that were skipped.

One thread decides, commits and removes; other threads read and pack, up to a limit of bytes at the
same time. A source file is removed only after its commit and only when it has not changed for a
while, because MindSpore sets the mode of a file by its path after closing it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from rankdump._codec.file_codec import get_codec
from rankdump._core.bounded_executor import execute_bounded
from rankdump._core.plan import OutputSettings
from rankdump._layout.file_name import PACKED_SUFFIX
from rankdump.errors import UnavailableError
from rankdumpd.agent.records import FileStamp
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.agent.storage.tree_lock import TreeLock
from rankdumpd.ingest.dump_file import (
    INGEST_STATE_FOLDER,
    CandidateFile,
    IngestCounts,
    IngestedFile,
    IngestTask,
    SkippedFile,
    SkipReason,
)
from rankdumpd.ingest.file_copy import FileCopier, SettlingFiles, build_file_mark, hold_read_lease
from rankdumpd.ingest.folder import FoundFile, FoundFolder, IngestFolder, check_separate_folders
from rankdumpd.ingest.manifest_index import ManifestIndex, locate_iteration
from rankdumpd.ingest.state import IngestState
from rankdumpd.server import state_files

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IngestJob:
    """A file that has to be ingested."""

    candidate: CandidateFile
    before: IngestedFile | None
    """The file that was ingested from the same path earlier."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The outcome of an `IngestJob`."""

    job: IngestJob
    file: IngestedFile | SkippedFile


_REPORTED_REASONS = (SkipReason.DAMAGED, SkipReason.FAILED, SkipReason.WRITTEN)


class SkippedFiles:
    """Files that were skipped and stay in the source for now, by path."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._skipped: dict[str, SkippedFile] = {}

    def __len__(self) -> int:
        return len(self._skipped)

    def add_file(self, left: SkippedFile) -> None:
        """Remember a skipped file, unless the file is gone or only has to wait."""
        if left.why not in _REPORTED_REASONS:
            self.remove_file(left.path)
        elif self._skipped.get(left.path) != left:
            self._skipped[left.path] = left
            if left.why is not SkipReason.WRITTEN:
                self._report(f"{left.path}: {left.text}")

    def remove_file(self, path: str) -> None:
        """Forget a file that was ingested or is gone."""
        self._skipped.pop(path, None)

    def is_damaged(self, path: str, stamp: FileStamp) -> bool:
        """Return whether this version of the file was found to be corrupted."""
        left = self._skipped.get(path)
        return left is not None and left.why is SkipReason.DAMAGED and left.stamp == stamp

    def report_unfinished(self, there: Callable[[str], bool]) -> None:
        """Forget files that do not exist any more, and report those that are still
        being written.
        """
        for path, left in list(self._skipped.items()):
            if not there(path):
                self.remove_file(path)
            elif left.why is SkipReason.WRITTEN:
                self._report(f"{path}: {left.text}")


REMOVAL_DELAY_S = 2.0
"""Seconds that a source file has to stay unchanged before it is removed."""
_MAX_REMOVAL_ROUNDS = 3


class SourceCleaner:
    """Removes source files; not for use from several threads.

    A closed file may still be in use: MindSpore sets the mode of a dump file by its path after it
    has closed the file. So only files that have not changed for a while are removed.
    """

    def __init__(
        self,
        source: IngestFolder,
        state: IngestState,
        has_copy: Callable[[IngestedFile], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`has_copy` returns whether the tree has the copy of a file; `clock` returns the time in
        the same seconds as the time stamps of files.
        """
        self._source, self._state, self._has_copy = source, state, has_copy
        self._clock = clock
        self._young: dict[str, tuple[float, IngestedFile]] = {}
        """Files that are too young to be removed, by path, each with the time when it may be
        removed; the earliest first.
        """

    def remove(self, files: Iterable[IngestedFile]) -> int:
        """Remove the source files that have not changed since they were ingested, each when it is
        old enough; return how many were removed.
        """
        now_s = self._clock()
        gone: list[str] = []
        # A due file may also be in `files`, which then has the newer version of that path.
        due = takewhile(lambda each: each[0] <= now_s, list(self._young.values()))
        latest = {file.path: file for file in (*(file for _, file in due), *files)}
        for file in latest.values():
            self._young.pop(file.path, None)
            removed = self._source.remove(file.path, file.source, before_s=now_s - REMOVAL_DELAY_S)
            if removed:
                gone.append(file.path)
            elif removed is None:
                self._young[file.path] = now_s + REMOVAL_DELAY_S, file
        if gone:
            self._state.removed(gone)
        return len(gone)

    def next_due_in_s(self) -> float:
        """Return in how many seconds the next young file may be removed; infinity if
        there is none.
        """
        due_s = next((due_s for due_s, _ in self._young.values()), math.inf)
        return max(0.0, due_s - self._clock())

    def remove_young(self, wait: Callable[[float], object]) -> int:
        """Wait for young files and remove them; return how many. Files that keep changing stay."""
        count = 0
        for _ in range(_MAX_REMOVAL_ROUNDS):
            if self._young:
                last_s, _ = self._young[next(reversed(self._young))]
                wait(max(0.0, last_s - self._clock()))
                count += self.remove(())
        return count

    def remove_rest(self) -> int:
        """Remove the files that were kept because their writers could still append to them; return
        how many.
        """
        return self.remove(file for file in self._state.list_plain_files() if self._is_unused(file))

    def remove_empty(self) -> None:
        """Remove the empty folders of the source."""
        self._source.remove_empty()

    def _is_unused(self, file: IngestedFile) -> bool:
        """Return whether the tree has a copy of a file and no process has the source open for
        writing.
        """
        try:
            source = self._source.open(file.path)
        except OSError:
            return False
        with hold_read_lease(source.number) as free:
            return free is not False and self._has_copy(file)


def open_target_tree(task: IngestTask) -> DumpTree:
    """Return the tree of a task, with the default modes."""
    output = OutputSettings(str(task.tree))
    return DumpTree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        synced=task.delete,
    )


def lock_target_tree(tree: DumpTree) -> TreeLock:
    """Lock a tree; UnavailableError while it is being repaired."""
    hold = TreeLock(tree)
    try:
        hold.acquire()
    except BlockingIOError as error:
        raise UnavailableError(f"{tree.root}: {error.strerror}; try again later") from None
    except OSError as error:
        raise state_files.explain_state_error(tree.root, "--into", error) from None
    return hold


_GROUP_FILES = 64
"""Number of files that are claimed, and committed, in one transaction."""

_MAX_ATTEMPTS = 3
"""Number of attempts for a file that keeps changing."""
_POLL_S = 0.05


class IngestEngine:
    """Ingests the files of one folder into one tree; all methods are for the same thread."""

    def __init__(
        self, task: IngestTask, *, report: Callable[[str], None], stopping: Callable[[], bool]
    ) -> None:
        """Call `report` with each skipped file, and check `stopping` before each file."""
        check_separate_folders(task.source, task.tree)
        with contextlib.ExitStack() as unless_ready:
            self.source = IngestFolder(task.source)
            unless_ready.callback(self.source.close)
            self._state = IngestState(task.tree, durable=task.delete)
            unless_ready.callback(self._state.close)
            tree = open_target_tree(task)
            self._hold = lock_target_tree(tree)
            self._target = IngestFolder(task.tree)
            unless_ready.pop_all()
        self._task, self._stopping = task, stopping
        # With `delete`, a copy must be synced to disk, because it will be the only one left.
        self._stored_as = f"{task.codec} synced" if task.delete else task.codec
        codec, original = get_codec(task.codec), self._state.find_original
        self._copier = FileCopier(self.source, tree, codec, original, stored_as=self._stored_as)
        self._pool = ThreadPoolExecutor(task.threads, thread_name_prefix="rankdumpd-ingest")
        self._index = ManifestIndex(self._state, tree, source=self.source, target=self._target)
        self._clearing = SourceCleaner(self.source, self._state, self._has_copy)
        self._skipped = SkippedFiles(report)
        self._interrupted = self._recover_claims()
        self._begun: set[str] = set()
        self._to_repeat: dict[str, CandidateFile] = {}
        self._counts = IngestCounts()

    @property
    def counts(self) -> IngestCounts:
        """Counts of this run; may be read from any thread."""
        return replace(self._counts, failed=len(self._skipped))

    def close(self) -> None:
        """Finish the files that were begun, and release tree and folder."""
        self._pool.shutdown(cancel_futures=True)
        self._state.close()
        self._hold.release()
        self._target.close()
        self.source.close()

    def scan(self, path: str = "", *, first: bool = False) -> Iterator[CandidateFile | FoundFolder]:
        """Yield the files below a folder, each folder before its files; report other entries."""
        for item in self.source.walk(path, skip=lambda below: below == INGEST_STATE_FOLDER):
            if isinstance(item, FoundFile):
                yield CandidateFile(item.path)
            elif isinstance(item, FoundFolder):
                yield item
            elif item.harmless:
                self._add(skipped=first)
            else:
                self._skipped.add_file(SkippedFile(item.path, SkipReason.FAILED, item.text))

    def ingest_files(
        self, candidates: Iterable[CandidateFile], *, first: bool = False
    ) -> list[SkippedFile]:
        """Ingest and commit the files that are complete; return those that have to wait.

        With `first`, files that an earlier run ingested are counted.
        """
        young: list[SkippedFile] = []
        while True:
            jobs = self._claimed(self._wanted(candidates, first=first))
            results = execute_bounded(
                self._pool, self._copy, jobs, lambda job: job.size_bytes, self._task.queue_bytes
            )
            while group := list(islice(results, _GROUP_FILES)):
                young += self._commit(group)
            if not self._to_repeat:
                return young
            candidates, self._to_repeat = list(self._to_repeat.values()), {}

    def ingest_all(self, wait: Callable[[float], object], *, first: bool = False) -> None:
        """Ingest all files; `wait` is called with seconds to wait for files that may still be
        written.
        """
        if first:
            self._add(found=sum(isinstance(item, FoundFile) for item in self.source.walk()))
        waiting = SettlingFiles()
        files = (item for item in self.scan(first=first) if isinstance(item, CandidateFile))
        for _ in range(_MAX_ATTEMPTS):
            for skipped in self.ingest_files(files, first=first):
                waiting.add(skipped.path, skipped.stamp, time.monotonic())
            if not len(waiting):
                return
            wait(waiting.next_due_s() - time.monotonic() + _POLL_S)
            files = iter(waiting.pop_settled(time.monotonic(), self.source.read_stamp))
            first = False
        for skipped in self.ingest_files(files):
            self._skipped.add_file(
                replace(skipped, why=SkipReason.WRITTEN, text="the file keeps changing")
            )

    def remove_due(self) -> float:
        """Remove source files that are old enough; return in how many seconds the next ones are
        due.

        Infinity when there are none.
        """
        self._add(removed=self._clearing.remove(()))
        return self._clearing.next_due_in_s()

    def write_manifests(self) -> None:
        """Write the manifests of all iterations that have new tensors."""
        self._index.write_manifests()

    def finish(self, wait: Callable[[float], object]) -> None:
        """Write all manifests; clear the source if the task asks for it."""
        self.write_manifests()
        self._skipped.report_unfinished(self.source.exists)
        if self._task.clear:
            self._add(removed=self._clearing.remove_rest())
        if self._task.delete:
            self._add(removed=self._clearing.remove_young(wait))
        if self._task.clear:
            self._clearing.remove_empty()

    def _copy(self, job: IngestJob) -> IngestResult:
        path, text = job.candidate.path, "internal error, see the log"
        try:
            return IngestResult(job, self._copier.copy_file(job.candidate, job.before))
        except MemoryError:
            text = f"out of memory for its {job.size_bytes} bytes"
        except Exception:
            _logger.exception("cannot ingest %s", path)
        return IngestResult(job, SkippedFile(path, SkipReason.FAILED, text))

    def _wanted(self, candidates: Iterable[CandidateFile], *, first: bool) -> Iterator[IngestJob]:
        for candidate in candidates:
            if self._stopping():
                return
            path = candidate.path
            if path in self._begun:
                self._to_repeat[path] = candidate  # the source may have changed in the meantime
                continue
            stamp = self.source.read_stamp(path)
            if stamp is None or self._skipped.is_damaged(path, stamp):
                continue
            before = self._state.find_file(path)
            if before and before.source == stamp and self._has_copy(before):
                self._skipped.remove_file(path)
                self._add(skipped=first)
                if self._task.delete and before.kind.holds_tensors:
                    self._add(removed=self._clearing.remove([before]))
            elif text := self._occupied(path, before):
                self._skipped.add_file(SkippedFile(path, SkipReason.FAILED, text, stamp))
            else:
                self._begun.add(path)
                yield IngestJob(candidate, before, stamp.size_bytes)

    def _claimed(self, jobs: Iterator[IngestJob]) -> Iterator[IngestJob]:
        while group := list(islice(jobs, _GROUP_FILES)):
            self._state.claim(job.candidate.path for job in group)
            yield from group

    def _has_copy(self, file: IngestedFile) -> bool:
        """Return whether the tree has the copy of a file; if source files are deleted, a synced
        copy.
        """
        safe = not self._task.delete or file.digest.endswith(self._stored_as)
        return safe and self._target.read_stamp(file.target) == file.stored

    def _occupied(self, path: str, before: IngestedFile | None) -> str:
        """Return why the path of a file in the tree is taken; empty when it is free."""
        plain = path.removesuffix(PACKED_SUFFIX)
        if plain != path and (self.source.read_stamp(plain) or self._state.find_file(plain)):
            return "the compressed copy of a file beside it would have the same name"
        if before is None and path not in self._interrupted:
            for target in (path, path + PACKED_SUFFIX):
                if self._target.exists(target):
                    return f"the tree has another file {target}"
        return ""

    def _commit(self, results: list[IngestResult]) -> list[SkippedFile]:
        taken = [each.file for each in results if isinstance(each.file, IngestedFile)]
        left = [each.file for each in results if isinstance(each.file, SkippedFile)]
        places = [locate_iteration(file.path) for file in taken]
        self._state.commit(taken, places, released=[file.path for file in left])
        self._begun.difference_update(each.job.candidate.path for each in results)
        self._remove_replaced(results)
        self._count(taken)
        if self._task.delete:
            tensors = (file for file in taken if file.kind.holds_tensors)
            self._add(removed=self._clearing.remove(tensors))
        for file in left:
            self._skipped.add_file(file)
        for file in taken:
            self._skipped.remove_file(file.path)
        for place in filter(None, dict.fromkeys(places)):
            for over in self._index.note_iteration(place):
                self._index.write_manifest(over)
        return [file for file in left if file.why is SkipReason.YOUNG]

    def _remove_replaced(self, results: list[IngestResult]) -> None:
        """Remove earlier copies whose name differs from the new one, because only one of both is
        compressed.
        """
        for each in results:
            file, before = each.file, each.job.before
            if not isinstance(file, IngestedFile):
                continue
            if before and before.target != file.target:
                self._target.remove(before.target, before.stored)
            if file.path in self._interrupted:
                self._interrupted.remove(file.path)
                other = file.path if file.target != file.path else file.path + PACKED_SUFFIX
                self._discard(other)

    def _discard(self, target: str) -> None:
        stamp = self._target.read_stamp(target)
        if stamp:
            self._target.remove(target, stamp)

    def _count(self, taken: list[IngestedFile]) -> None:
        fresh = [file for file in taken if not file.linked]
        self._add(
            files=len(taken),
            bytes_in=sum(file.source.size_bytes for file in taken),
            bytes_stored=sum(file.stored.size_bytes for file in fresh),
            linked=len(taken) - len(fresh),
        )

    def _add(self, **more: int) -> None:
        changes = {name: getattr(self._counts, name) + count for name, count in more.items()}
        self._counts = replace(self._counts, **changes)

    def _recover_claims(self) -> set[str]:
        """Return the paths whose copies a killed run had begun, and remove its hidden files."""
        claimed = set(self._state.list_claimed())
        for path in claimed:
            folder, slash, _ = path.rpartition("/")
            self._discard(f"{folder}{slash}.{build_file_mark(path)}.tmp")
        return claimed
