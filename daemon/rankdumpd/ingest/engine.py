"""The ingest of one folder into one tree: candidates to copies, commits, and removed sources.

One thread decides, commits and removes; others read and pack, as many bytes at once as they may.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rankdump.codec import codec_named
from rankdump.contract.errors import ConfigError
from rankdump.contract.plan import Output
from rankdumpd.agent.tree import Tree
from rankdumpd.ingest.index import Index, place_of
from rankdumpd.ingest.left import LeftBehind
from rankdumpd.ingest.settled import leased
from rankdumpd.ingest.source import Folder, Found, Source
from rankdumpd.ingest.state import State
from rankdumpd.ingest.taking import Taker, mark_of
from rankdumpd.ingest.values import (
    PACKED_SUFFIX,
    STATE_FOLDER,
    Candidate,
    Counts,
    Left,
    Taken,
    Task,
    Why,
)

_GROUP = 64
"""Files that are claimed, and committed, together."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Result:
    file: Taken | Left
    before: Taken | None
    size_bytes: int


def check_apart(source: Path, tree: Path) -> None:
    """Raise a ConfigError where one of the folders stands in the other."""
    inner, outer = Path(os.path.realpath(source)), Path(os.path.realpath(tree))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        allowed = f"a folder outside of {inner}, and not around it"
        raise ConfigError("--into", "", str(tree), allowed)


class Engine:
    """Takes what it is given; its methods are for one thread."""

    def __init__(
        self, task: Task, *, say: Callable[[str], None], stopping: Callable[[], bool]
    ) -> None:
        """`say` is told of each file that is left, `stopping` asked before each is begun."""
        check_apart(task.source, task.tree)
        self.source = Source(task.source)
        self._state = State(task.tree, durable=task.delete)
        self._target = Source(task.tree)
        self._tree = _tree(task)
        # What was written without being synced must not be all that is left of a file.
        self._stored_as = f"{task.codec} synced" if task.delete else task.codec
        self._taker = Taker(
            self.source,
            self._tree,
            codec_named(task.codec),
            self._state.original,
            stored_as=self._stored_as,
        )
        self._index = Index(self._state, self._tree, self.source)
        self._task, self._stopping = task, stopping
        self._pool = ThreadPoolExecutor(task.threads, thread_name_prefix="rankdumpd-ingest")
        self._done: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._results: list[_Result] = []
        self._in_flight = self._bytes_in_flight = 0
        self._left = LeftBehind(say)
        self._interrupted = self._own_leftovers()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """How this run stands; may be asked from any thread."""
        return replace(self._counts, failed=len(self._left))

    def close(self) -> None:
        """Finish what was begun, and let others in."""
        self._pool.shutdown(cancel_futures=True)
        self._state.close()
        self._target.close()
        self.source.close()

    def scan(self, path: str = "", *, first: bool = False) -> Iterator[Candidate | Folder]:
        """Yield the files below a folder, and each folder before them; say what is no file."""
        for item in self.source.walk(path, skip=lambda below: below == STATE_FOLDER):
            if isinstance(item, Found):
                self._add(found=first)
                yield Candidate(item.path)
            elif isinstance(item, Folder):
                yield item
            elif item.harmless:
                self._add(skipped=first)
            else:
                self._left.note(Left(item.path, Why.FAILED, item.text))

    def take(self, candidates: Iterable[Candidate], *, first: bool = False) -> list[Left]:
        """Take what is settled, and commit it; return what has to wait for a while.

        With `first`, files of an earlier run are counted.
        """
        young: list[Left] = []
        wanted = self._wanted(candidates, first=first)
        while group := list(islice(wanted, _GROUP)):
            self._state.claim(candidate.path for candidate, _, _ in group)
            for candidate, before, size in group:
                while self._in_flight and self._bytes_in_flight + size > self._task.queue_bytes:
                    self._gather()
                self._submit(candidate, before, size)
            young += self._commit()
        while self._in_flight:
            self._gather()
        return young + self._commit()

    def retry(self) -> list[Left]:
        """Take what could not be read or written before."""
        return self.take([Candidate(path) for path in self._left.to_retry()])

    def index(self) -> None:
        """Write the manifests of all iterations that have new tensors."""
        self._index.write_all()

    def finish(self) -> None:
        """Write all manifests; of the source, remove what nobody appends to any more."""
        self.index()
        self._left.close(self.source.there)
        if self._task.delete:
            self._remove([file for file in self._state.plain() if self._unused(file)])
            self.source.remove_empty()

    def _wanted(
        self, candidates: Iterable[Candidate], *, first: bool
    ) -> Iterator[tuple[Candidate, Taken | None, int]]:
        for candidate in candidates:
            if self._stopping():
                return
            path = candidate.path
            stamp = self.source.stamp(path)
            if stamp is None or self._left.damaged(path, stamp):
                continue
            before = self._state.get(path)
            if before and before.source == stamp and self._stands(before):
                self._left.forget(path)
                self._add(skipped=first)
                if self._task.delete and before.kind.tensors:
                    self._remove([before])
            elif text := self._occupied(path, before):
                self._left.note(Left(path, Why.FAILED, text, stamp))
            else:
                yield candidate, before, stamp.size_bytes

    def _stands(self, file: Taken) -> bool:
        """Return whether the copy of a file is there, and as safe as it has to be."""
        safe = not self._task.delete or file.digest.endswith(self._stored_as)
        return safe and self._target.stamp(file.target) == file.stored

    def _occupied(self, path: str, before: Taken | None) -> str:
        """Return why a file cannot have its place in the tree; empty when it can."""
        plain = path.removesuffix(PACKED_SUFFIX)
        if plain != path and (self.source.stamp(plain) or self._state.get(plain)):
            return "stands beside the file that would be packed under this name"
        if before is None and path not in self._interrupted:
            for target in (path, path + PACKED_SUFFIX):
                if self._target.there(target):
                    return f"another file stands in the tree, as {target}"
        return ""

    def _submit(self, candidate: Candidate, before: Taken | None, size: int) -> None:
        self._in_flight += 1
        self._bytes_in_flight += size

        def work() -> None:
            result: Taken | Left = Left(candidate.path, Why.FAILED, "an error of this program")
            try:
                result = self._taker.take(candidate, before)
            except MemoryError:
                result = Left(candidate.path, Why.FAILED, f"no memory for its {size} bytes")
            except Exception:
                _log.exception("%s", candidate.path)
            finally:
                self._done.put(_Result(result, before, size))

        self._pool.submit(work)

    def _gather(self) -> None:
        result = self._done.get()
        self._in_flight -= 1
        self._bytes_in_flight -= result.size_bytes
        self._results.append(result)

    def _commit(self) -> list[Left]:
        results, self._results = self._results, []
        taken = [each.file for each in results if isinstance(each.file, Taken)]
        left = [each.file for each in results if isinstance(each.file, Left)]
        places = [place_of(file.path) for file in taken]
        self._state.commit(taken, places, released=[file.path for file in left])
        for each in results:
            if isinstance(each.file, Taken):
                self._left.forget(each.file.path)
                if each.before and each.before.target != each.file.target:
                    self._target.remove(each.before.target, each.before.stored)
        self._count(taken)
        if self._task.delete:
            self._remove([file for file in taken if file.kind.tensors])
        for file in left:
            self._left.note(file)
        for place in filter(None, dict.fromkeys(places)):
            for over in self._index.saw(place):
                self._index.write(over)
        return [file for file in left if file.why is Why.YOUNG]

    def _count(self, taken: list[Taken]) -> None:
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

    def _remove(self, files: list[Taken]) -> None:
        gone = [file.path for file in files if self.source.remove(file.path, file.source)]
        if gone:
            self._state.removed(gone)
            self._add(removed=len(gone))

    def _unused(self, file: Taken) -> bool:
        """Return whether a copy stands in the tree and nobody has the source open for writing."""
        try:
            descriptor = self.source.open(file.path)
        except OSError:
            return False
        try:
            with leased(descriptor) as free:
                return free is not False and self._stands(file)
        finally:
            os.close(descriptor)

    def _own_leftovers(self) -> set[str]:
        """Return what a killed run had begun, and remove the hidden files it left."""
        claimed = set(self._state.claimed())
        for path in claimed:
            folder, slash, _ = path.rpartition("/")
            hidden = f"{folder}{slash}.{mark_of(path)}.tmp"
            stamp = self._target.stamp(hidden)
            if stamp:
                self._target.remove(hidden, stamp)
        return claimed


def _tree(task: Task) -> Tree:
    output = Output(str(task.tree))
    return Tree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        synced=task.delete,
    )
