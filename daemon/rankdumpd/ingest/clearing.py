"""The source, cleared of what stands in the tree: behind its commit, and only the same file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from itertools import takewhile

from rankdumpd.ingest.settled import leased
from rankdumpd.ingest.source import Source
from rankdumpd.ingest.state import State
from rankdumpd.ingest.values import Taken

SETTLED_S = 2.0
"""How long a file has to be left alone before it is removed."""
_PATIENCE = 3


class Clearing:
    """Removes sources; not for use from several threads.

    Who closed a file may not be done with it: MindSpore changes its mode by its name then
    (mindspore-dump.md 2.11). So only what has been left alone for a while is removed.
    """

    def __init__(
        self,
        source: Source,
        state: State,
        stands: Callable[[Taken], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`stands` says whether the copy of a file is in the tree; the clock is that of files."""
        self._source, self._state, self._stands = source, state, stands
        self._clock = clock
        self._young: dict[str, tuple[float, Taken]] = {}
        """By path, the next that is due first: when it may be removed."""

    def remove(self, files: Iterable[Taken]) -> int:
        """Remove those that are still what was taken, now or by and by; return how many."""
        now_s = self._clock()
        gone: list[str] = []
        for file in (*self._due(now_s), *files):
            self._young.pop(file.path, None)
            removed = self._source.remove(file.path, file.source, before_s=now_s - SETTLED_S)
            if removed:
                gone.append(file.path)
            elif removed is None:
                self._young[file.path] = now_s + SETTLED_S, file
        if gone:
            self._state.removed(gone)
        return len(gone)

    def due_in_s(self) -> float:
        """Return how soon the next that was too young may be removed; never when there is none."""
        due_s = next((due_s for due_s, _ in self._young.values()), math.inf)
        return max(0.0, due_s - self._clock())

    def remove_young(self, wait: Callable[[float], object]) -> int:
        """Remove what was too young, waiting for it, but not for what changes all the time."""
        count = 0
        for _ in range(_PATIENCE):
            if self._young:
                last_s, _ = self._young[next(reversed(self._young))]
                wait(max(0.0, last_s - self._clock()))
                count += self.remove(())
        return count

    def remove_rest(self) -> int:
        """Remove what may have been appended to until now."""
        return self.remove(file for file in self._state.plain() if self._unused(file))

    def remove_empty(self) -> None:
        """Remove the folders that hold nothing."""
        self._source.remove_empty()

    def _due(self, now_s: float) -> list[Taken]:
        return [file for _, file in takewhile(lambda each: each[0] <= now_s, self._young.values())]

    def _unused(self, file: Taken) -> bool:
        """Return whether a copy stands in the tree and nobody has the source open for writing."""
        try:
            descriptor = self._source.open(file.path)
        except OSError:
            return False
        try:
            with leased(descriptor) as free:
                return free is not False and self._stands(file)
        finally:
            os.close(descriptor)
