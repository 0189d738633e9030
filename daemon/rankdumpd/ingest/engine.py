"""The ingest of one folder into one tree: candidates to copies, commits, and removed sources.

One thread decides, commits and removes; others read and pack, as many bytes at once as they may.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from rankdump.codec import codec_named
from rankdump.contract.layout.file_name import PACKED
from rankdumpd.ingest.clearing import Clearing
from rankdumpd.ingest.index import Index, place_of
from rankdumpd.ingest.left import LeftBehind
from rankdumpd.ingest.pool import Job, Pool, Result
from rankdumpd.ingest.settled import Waiting
from rankdumpd.ingest.source import Folder, Found, Source, check_apart
from rankdumpd.ingest.state import State
from rankdumpd.ingest.taking import Taker, mark_of
from rankdumpd.ingest.target import held, tree_of
from rankdumpd.ingest.values import (
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

_PATIENCE = 3
"""How often a file may be looked at that changes each time."""
_POLL_S = 0.05


class Engine:
    """Takes what it is given; its methods are for one thread."""

    def __init__(
        self, task: Task, *, say: Callable[[str], None], stopping: Callable[[], bool]
    ) -> None:
        """`say` is told of each file that is left, `stopping` asked before each is begun."""
        check_apart(task.source, task.tree)
        with contextlib.ExitStack() as unless_ready:
            self.source = Source(task.source)
            unless_ready.callback(self.source.close)
            self._state = State(task.tree, durable=task.delete)
            unless_ready.callback(self._state.close)
            tree = tree_of(task)
            self._hold = held(tree)
            self._target = Source(task.tree)
            unless_ready.pop_all()
        self._task, self._stopping = task, stopping
        # What was written without being synced must not be all that is left of a file.
        self._stored_as = f"{task.codec} synced" if task.delete else task.codec
        codec, original = codec_named(task.codec), self._state.original
        taker = Taker(self.source, tree, codec, original, stored_as=self._stored_as)
        self._pool = Pool(task.threads, task.queue_bytes, taker.take)
        self._index = Index(self._state, tree, source=self.source, target=self._target)
        self._clearing = Clearing(self.source, self._state, self._stands)
        self._left = LeftBehind(say)
        self._interrupted = self._own_leftovers()
        self._begun: set[str] = set()
        self._again: dict[str, Candidate] = {}
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """How this run stands; may be asked from any thread."""
        return replace(self._counts, failed=len(self._left))

    def close(self) -> None:
        """Finish what was begun, and let others in."""
        self._pool.stop()
        self._state.close()
        self._hold.let_go()
        self._target.close()
        self.source.close()

    def scan(self, path: str = "", *, first: bool = False) -> Iterator[Candidate | Folder]:
        """Yield the files below a folder, and each folder before them; say what is no file."""
        for item in self.source.walk(path, skip=lambda below: below == STATE_FOLDER):
            if isinstance(item, Found):
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
        while True:
            results = self._pool.run(self._claimed(self._wanted(candidates, first=first)))
            while group := list(islice(results, _GROUP)):
                young += self._commit(group)
            if not self._again:
                return young
            candidates, self._again = list(self._again.values()), {}

    def take_all(self, wait: Callable[[float], object], *, first: bool = False) -> None:
        """Take everything that is there; `wait` for what only time can tell, but not for ever."""
        if first:
            self._add(found=sum(isinstance(item, Found) for item in self.source.walk()))
        waiting = Waiting()
        files = (item for item in self.scan(first=first) if isinstance(item, Candidate))
        for _ in range(_PATIENCE):
            for left in self.take(files, first=first):
                waiting.add(left.path, left.stamp, time.monotonic())
            if not len(waiting):
                return
            wait(waiting.due_s() - time.monotonic() + _POLL_S)
            files = iter(waiting.take(time.monotonic(), self.source.stamp))
            first = False
        for left in self.take(files):
            self._left.note(replace(left, why=Why.WRITTEN, text="it changes all the time"))

    def clear_due(self) -> float:
        """Remove sources that have been left alone for long enough; return when more are due, in s.

        Infinity when none waits.
        """
        self._add(removed=self._clearing.remove(()))
        return self._clearing.due_in_s()

    def index(self) -> None:
        """Write the manifests of all iterations that have new tensors."""
        self._index.write_all()

    def finish(self, wait: Callable[[float], object]) -> None:
        """Write all manifests; clear the source if that is wanted, waiting for what is young."""
        self.index()
        self._left.close(self.source.there)
        if self._task.clear:
            self._add(removed=self._clearing.remove_rest())
        if self._task.delete:
            self._add(removed=self._clearing.remove_young(wait))
        if self._task.clear:
            self._clearing.remove_empty()

    def _wanted(self, candidates: Iterable[Candidate], *, first: bool) -> Iterator[Job]:
        for candidate in candidates:
            if self._stopping():
                return
            path = candidate.path
            if path in self._begun:
                self._again[path] = candidate  # it may have changed since
                continue
            stamp = self.source.stamp(path)
            if stamp is None or self._left.damaged(path, stamp):
                continue
            before = self._state.get(path)
            if before and before.source == stamp and self._stands(before):
                self._left.forget(path)
                self._add(skipped=first)
                if self._task.delete and before.kind.tensors:
                    self._add(removed=self._clearing.remove([before]))
            elif text := self._occupied(path, before):
                self._left.note(Left(path, Why.FAILED, text, stamp))
            else:
                self._begun.add(path)
                yield Job(candidate, before, stamp.size_bytes)

    def _claimed(self, jobs: Iterator[Job]) -> Iterator[Job]:
        while group := list(islice(jobs, _GROUP)):
            self._state.claim(job.candidate.path for job in group)
            yield from group

    def _stands(self, file: Taken) -> bool:
        """Return whether the copy of a file is there, and as safe as it has to be."""
        safe = not self._task.delete or file.digest.endswith(self._stored_as)
        return safe and self._target.stamp(file.target) == file.stored

    def _occupied(self, path: str, before: Taken | None) -> str:
        """Return why a file cannot have its place in the tree; empty when it can."""
        plain = path.removesuffix(PACKED)
        if plain != path and (self.source.stamp(plain) or self._state.get(plain)):
            return "stands beside the file that would be packed under this name"
        if before is None and path not in self._interrupted:
            for target in (path, path + PACKED):
                if self._target.there(target):
                    return f"another file stands in the tree, as {target}"
        return ""

    def _commit(self, results: list[Result]) -> list[Left]:
        taken = [each.file for each in results if isinstance(each.file, Taken)]
        left = [each.file for each in results if isinstance(each.file, Left)]
        places = [place_of(file.path) for file in taken]
        self._state.commit(taken, places, released=[file.path for file in left])
        self._begun.difference_update(each.job.candidate.path for each in results)
        self._remove_replaced(results)
        self._count(taken)
        if self._task.delete:
            tensors = (file for file in taken if file.kind.tensors)
            self._add(removed=self._clearing.remove(tensors))
        for file in left:
            self._left.note(file)
        for file in taken:
            self._left.forget(file.path)
        for place in filter(None, dict.fromkeys(places)):
            for over in self._index.saw(place):
                self._index.write(over)
        return [file for file in left if file.why is Why.YOUNG]

    def _remove_replaced(self, results: list[Result]) -> None:
        """Remove the copy that a new one does not stand in the place of: packed, or not so."""
        for each in results:
            file, before = each.file, each.job.before
            if not isinstance(file, Taken):
                continue
            if before and before.target != file.target:
                self._target.remove(before.target, before.stored)
            if file.path in self._interrupted:
                self._interrupted.remove(file.path)
                other = file.path if file.target != file.path else file.path + PACKED
                self._discard(other)

    def _discard(self, target: str) -> None:
        stamp = self._target.stamp(target)
        if stamp:
            self._target.remove(target, stamp)

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

    def _own_leftovers(self) -> set[str]:
        """Return what a killed run had begun, and remove the hidden files it left."""
        claimed = set(self._state.claimed())
        for path in claimed:
            folder, slash, _ = path.rpartition("/")
            self._discard(f"{folder}{slash}.{mark_of(path)}.tmp")
        return claimed
