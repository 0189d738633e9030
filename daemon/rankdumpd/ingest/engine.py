"""Ingest of one folder into one tree: candidates to copies, commits, manifests, removed sources,
and the files that were skipped.

One thread decides, commits and removes; others read and pack, up to a limit of bytes at once. A
source is removed only after its commit and only when it was left alone for a while, for
MindSpore changes the mode of a file by its name after closing it (MindSpore 2.3, Dump guide).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from rankdump._codec.file_codec import get_codec
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
    """A file that is to be taken."""

    candidate: CandidateFile
    before: IngestedFile | None
    """What was taken of that path earlier."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What became of it."""

    job: IngestJob
    file: IngestedFile | SkippedFile


class IngestPool:
    """Threads that take files; nothing ends one but `stop`."""

    def __init__(
        self,
        threads: int,
        queue_bytes: int,
        take: Callable[[CandidateFile, IngestedFile | None], IngestedFile | SkippedFile],
    ) -> None:
        self._take, self._queue_bytes = take, queue_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rankdumpd-ingest")
        self._done: queue.SimpleQueue[IngestResult] = queue.SimpleQueue()

    def run(self, jobs: Iterable[IngestJob]) -> Iterator[IngestResult]:
        """Yield what becomes of each, in the order in which they are done.

        One that exceeds the limit runs alone.
        """
        in_flight = size_bytes = 0
        for job in jobs:
            while in_flight and size_bytes + job.size_bytes > self._queue_bytes:
                result = self._done.get()
                in_flight, size_bytes = in_flight - 1, size_bytes - result.job.size_bytes
                yield result
            in_flight, size_bytes = in_flight + 1, size_bytes + job.size_bytes
            self._threads.submit(self._work, job)
        for _ in range(in_flight):
            yield self._done.get()

    def stop(self) -> None:
        """Finish what has begun, and end the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _work(self, job: IngestJob) -> None:
        path = job.candidate.path
        file: IngestedFile | SkippedFile = SkippedFile(
            path, SkipReason.FAILED, "an error of this program"
        )
        try:
            file = self._take(job.candidate, job.before)
        except MemoryError:
            file = SkippedFile(path, SkipReason.FAILED, f"no memory for its {job.size_bytes} bytes")
        except Exception:
            _logger.exception("%s", path)
        finally:
            self._done.put(IngestResult(job, file))


_REPORTED_REASONS = (SkipReason.DAMAGED, SkipReason.FAILED, SkipReason.WRITTEN)


class SkippedFiles:
    """The files that are left for now, by path."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._left: dict[str, SkippedFile] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add_file(self, left: SkippedFile) -> None:
        """Remember a file; one that is gone, or has to wait, is none."""
        if left.why not in _REPORTED_REASONS:
            self.remove_file(left.path)
        elif self._left.get(left.path) != left:
            self._left[left.path] = left
            if left.why is not SkipReason.WRITTEN:
                self._say(f"{left.path}: {left.text}")

    def remove_file(self, path: str) -> None:
        """It was taken, or is gone."""
        self._left.pop(path, None)

    def is_damaged(self, path: str, stamp: FileStamp) -> bool:
        """Return whether exactly this file was found to be damaged."""
        left = self._left.get(path)
        return left is not None and left.why is SkipReason.DAMAGED and left.stamp == stamp

    def to_retry(self) -> list[str]:
        """Return what may go better now."""
        return [path for path, left in self._left.items() if left.why is not SkipReason.DAMAGED]

    def report_unfinished(self, there: Callable[[str], bool]) -> None:
        """Forget what is gone meanwhile, and say what is still being written."""
        for path, left in list(self._left.items()):
            if not there(path):
                self.remove_file(path)
            elif left.why is SkipReason.WRITTEN:
                self._say(f"{path}: {left.text}")


REMOVAL_DELAY_S = 2.0
"""How long a file has to be left alone before it is removed."""
_MAX_REMOVAL_ROUNDS = 3


class SourceCleaner:
    """Removes sources; not for use from several threads.

    Who closed a file may not be done with it: MindSpore changes its mode by its name then
    (mindspore-dump.md 2.11). So only what has been left alone for a while is removed.
    """

    def __init__(
        self,
        source: IngestFolder,
        state: IngestState,
        stands: Callable[[IngestedFile], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`stands` says whether the copy of a file is in the tree; the clock is that of files."""
        self._source, self._state, self._stands = source, state, stands
        self._clock = clock
        self._young: dict[str, tuple[float, IngestedFile]] = {}
        """By path, the next that is due first: when it may be removed."""

    def remove(self, files: Iterable[IngestedFile]) -> int:
        """Remove those that are still what was taken, now or by and by; return how many."""
        now_s = self._clock()
        gone: list[str] = []
        for file in (*self._due(now_s), *files):
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
        """Return how soon the next that was too young may be removed; never when there is none."""
        due_s = next((due_s for due_s, _ in self._young.values()), math.inf)
        return max(0.0, due_s - self._clock())

    def remove_young(self, wait: Callable[[float], object]) -> int:
        """Remove what was too young, waiting for it, but not for what changes all the time."""
        count = 0
        for _ in range(_MAX_REMOVAL_ROUNDS):
            if self._young:
                last_s, _ = self._young[next(reversed(self._young))]
                wait(max(0.0, last_s - self._clock()))
                count += self.remove(())
        return count

    def remove_rest(self) -> int:
        """Remove what may have been appended to until now."""
        return self.remove(file for file in self._state.list_plain_files() if self._unused(file))

    def remove_empty(self) -> None:
        """Remove the folders that hold nothing."""
        self._source.remove_empty()

    def _due(self, now_s: float) -> list[IngestedFile]:
        return [file for _, file in takewhile(lambda each: each[0] <= now_s, self._young.values())]

    def _unused(self, file: IngestedFile) -> bool:
        """Return whether a copy stands in the tree and nobody has the source open for writing."""
        try:
            descriptor = self._source.open(file.path)
        except OSError:
            return False
        try:
            with hold_read_lease(descriptor) as free:
                return free is not False and self._stands(file)
        finally:
            os.close(descriptor)


def open_target_tree(task: IngestTask) -> DumpTree:
    """Return the tree of a task, with the usual modes."""
    output = OutputSettings(str(task.tree))
    modes = output.file_mode, output.folder_mode
    return DumpTree(output.root, file_mode=modes[0], folder_mode=modes[1], synced=task.delete)


def lock_target_tree(tree: DumpTree) -> TreeLock:
    """Hold a tree; UnavailableError while somebody mends it."""
    hold = TreeLock(tree)
    try:
        hold.acquire()
    except BlockingIOError as error:
        raise UnavailableError(f"{tree.root}: {error.strerror}; try again then") from None
    except OSError as error:
        raise state_files.explain_state_error(tree.root, "--into", error) from None
    return hold


_GROUP_FILES = 64
"""Files that are claimed, and committed, together."""

_MAX_ATTEMPTS = 3
"""How often a file may be looked at that changes each time."""
_POLL_S = 0.05


class IngestEngine:
    """Takes what it is given; its methods are for one thread."""

    def __init__(
        self, task: IngestTask, *, say: Callable[[str], None], stopping: Callable[[], bool]
    ) -> None:
        """`say` is told of each file that is left, `stopping` asked before each is begun."""
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
        # What was written without being synced must not be all that is left of a file.
        self._stored_as = f"{task.codec} synced" if task.delete else task.codec
        codec, original = get_codec(task.codec), self._state.find_original
        taker = FileCopier(self.source, tree, codec, original, stored_as=self._stored_as)
        self._pool = IngestPool(task.threads, task.queue_bytes, taker.copy_file)
        self._index = ManifestIndex(self._state, tree, source=self.source, target=self._target)
        self._clearing = SourceCleaner(self.source, self._state, self._stands)
        self._left = SkippedFiles(say)
        self._interrupted = self._own_leftovers()
        self._begun: set[str] = set()
        self._again: dict[str, CandidateFile] = {}
        self._counts = IngestCounts()

    @property
    def counts(self) -> IngestCounts:
        """How this run stands; may be asked from any thread."""
        return replace(self._counts, failed=len(self._left))

    def close(self) -> None:
        """Finish what was begun, and let others in."""
        self._pool.stop()
        self._state.close()
        self._hold.release()
        self._target.close()
        self.source.close()

    def scan(self, path: str = "", *, first: bool = False) -> Iterator[CandidateFile | FoundFolder]:
        """Yield the files below a folder, and each folder before them; say what is no file."""
        for item in self.source.walk(path, skip=lambda below: below == INGEST_STATE_FOLDER):
            if isinstance(item, FoundFile):
                yield CandidateFile(item.path)
            elif isinstance(item, FoundFolder):
                yield item
            elif item.harmless:
                self._add(skipped=first)
            else:
                self._left.add_file(SkippedFile(item.path, SkipReason.FAILED, item.text))

    def ingest_files(
        self, candidates: Iterable[CandidateFile], *, first: bool = False
    ) -> list[SkippedFile]:
        """Take what is settled, and commit it; return what has to wait for a while.

        With `first`, files of an earlier run are counted.
        """
        young: list[SkippedFile] = []
        while True:
            results = self._pool.run(self._claimed(self._wanted(candidates, first=first)))
            while group := list(islice(results, _GROUP_FILES)):
                young += self._commit(group)
            if not self._again:
                return young
            candidates, self._again = list(self._again.values()), {}

    def ingest_all(self, wait: Callable[[float], object], *, first: bool = False) -> None:
        """Take everything that is there; `wait` for what only time can tell, but not for ever."""
        if first:
            self._add(found=sum(isinstance(item, FoundFile) for item in self.source.walk()))
        waiting = SettlingFiles()
        files = (item for item in self.scan(first=first) if isinstance(item, CandidateFile))
        for _ in range(_MAX_ATTEMPTS):
            for left in self.ingest_files(files, first=first):
                waiting.add(left.path, left.stamp, time.monotonic())
            if not len(waiting):
                return
            wait(waiting.next_due_s() - time.monotonic() + _POLL_S)
            files = iter(waiting.pop_settled(time.monotonic(), self.source.read_stamp))
            first = False
        for left in self.ingest_files(files):
            self._left.add_file(
                replace(left, why=SkipReason.WRITTEN, text="it changes all the time")
            )

    def remove_due(self) -> float:
        """Remove sources that have been left alone for long enough; return when more are due, in s.

        Infinity when none waits.
        """
        self._add(removed=self._clearing.remove(()))
        return self._clearing.next_due_in_s()

    def write_manifests(self) -> None:
        """Write the manifests of all iterations that have new tensors."""
        self._index.write_manifests()

    def finish(self, wait: Callable[[float], object]) -> None:
        """Write all manifests; clear the source if that is wanted, waiting for what is young."""
        self.write_manifests()
        self._left.report_unfinished(self.source.exists)
        if self._task.clear:
            self._add(removed=self._clearing.remove_rest())
        if self._task.delete:
            self._add(removed=self._clearing.remove_young(wait))
        if self._task.clear:
            self._clearing.remove_empty()

    def _wanted(self, candidates: Iterable[CandidateFile], *, first: bool) -> Iterator[IngestJob]:
        for candidate in candidates:
            if self._stopping():
                return
            path = candidate.path
            if path in self._begun:
                self._again[path] = candidate  # it may have changed since
                continue
            stamp = self.source.read_stamp(path)
            if stamp is None or self._left.is_damaged(path, stamp):
                continue
            before = self._state.find_file(path)
            if before and before.source == stamp and self._stands(before):
                self._left.remove_file(path)
                self._add(skipped=first)
                if self._task.delete and before.kind.holds_tensors:
                    self._add(removed=self._clearing.remove([before]))
            elif text := self._occupied(path, before):
                self._left.add_file(SkippedFile(path, SkipReason.FAILED, text, stamp))
            else:
                self._begun.add(path)
                yield IngestJob(candidate, before, stamp.size_bytes)

    def _claimed(self, jobs: Iterator[IngestJob]) -> Iterator[IngestJob]:
        while group := list(islice(jobs, _GROUP_FILES)):
            self._state.claim(job.candidate.path for job in group)
            yield from group

    def _stands(self, file: IngestedFile) -> bool:
        """Return whether the copy of a file is there, and as safe as it has to be."""
        safe = not self._task.delete or file.digest.endswith(self._stored_as)
        return safe and self._target.read_stamp(file.target) == file.stored

    def _occupied(self, path: str, before: IngestedFile | None) -> str:
        """Return why a file cannot have its place in the tree; empty when it can."""
        plain = path.removesuffix(PACKED_SUFFIX)
        if plain != path and (self.source.read_stamp(plain) or self._state.find_file(plain)):
            return "stands beside the file that would be packed under this name"
        if before is None and path not in self._interrupted:
            for target in (path, path + PACKED_SUFFIX):
                if self._target.exists(target):
                    return f"another file stands in the tree, as {target}"
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
            self._left.add_file(file)
        for file in taken:
            self._left.remove_file(file.path)
        for place in filter(None, dict.fromkeys(places)):
            for over in self._index.note_iteration(place):
                self._index.write_manifest(over)
        return [file for file in left if file.why is SkipReason.YOUNG]

    def _remove_replaced(self, results: list[IngestResult]) -> None:
        """Remove the copy that a new one does not stand in the place of: packed, or not so."""
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

    def _own_leftovers(self) -> set[str]:
        """Return what a killed run had begun, and remove the hidden files it left."""
        claimed = set(self._state.list_claimed())
        for path in claimed:
            folder, slash, _ = path.rpartition("/")
            self._discard(f"{folder}{slash}.{build_file_mark(path)}.tmp")
        return claimed
