"""Trees that a server shows. Some may come while it runs, in an order that stays: pages name a tree
by its number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from rankdump._web.dump_source import DumpSource
from rankdump.errors import RankdumpError

MAX_OPEN = 8
"""Trees whose tables are open: each holds memory."""


class SourceList(Sequence[DumpSource]):
    """The trees that could be opened so far; safe to use from several threads."""

    def __init__(self) -> None:
        self._sources: list[DumpSource] = []
        self._waiting: list[Path] = []
        self._known: set[Path] = set()
        self._latest: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, roots: Iterable[Path]) -> None:
        """Add the trees that are not known; those that have not begun yet follow when they have."""
        with self._lock:
            new = [root for root in dict.fromkeys(roots) if root not in self._known]
            self._known.update(new)
            self._waiting += new

    def list_waiting(self) -> tuple[Path, ...]:
        """Return the trees that have not begun yet."""
        with self._lock:
            self._open_waiting()
            return tuple(self._waiting)

    def close(self) -> None:
        """Close all tables."""
        for source in tuple(self):
            source.close()

    def __len__(self) -> int:
        with self._lock:
            self._open_waiting()
            return len(self._sources)

    def __iter__(self) -> Iterator[DumpSource]:
        with self._lock:
            return iter(tuple(self._sources))

    @overload
    def __getitem__(self, index: int) -> DumpSource: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DumpSource]: ...
    def __getitem__(self, index: int | slice) -> DumpSource | Sequence[DumpSource]:
        with self._lock:
            found = self._sources[index]
            if isinstance(index, slice):
                return found
            self._latest[index] = None
            self._latest.move_to_end(index)
            over = len(self._latest) - MAX_OPEN
            late = [self._latest.popitem(last=False)[0] for _ in range(over)]
            closed = [self._sources[number] for number in late]
        for source in closed:
            source.close()
        return found

    def _open_waiting(self) -> None:
        still: list[Path] = []
        for root in self._waiting:
            try:
                self._sources.append(DumpSource(root))
            except (RankdumpError, OSError):
                still.append(root)
        self._waiting = still
