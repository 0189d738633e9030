"""Metadata frames of one session that are not applied yet, with the reason why they are deferred,
and the program order of each graph, which is determined from events. No I/O: the caller reads
frames from the ledger.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from rankdump._core.events import EventColumns
from rankdump._core.session_protocol import IterationEnd, SessionEnd
from rankdumpd.agent.records import MetadataFrame


class PendingMetadata:
    """Queue of metadata frames; one thread removes frames, any thread may read the state.

    While the session is suspended, only ends are kept, because they are reported. All frames are in
    the ledger and are read from there in batches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, MetadataFrame] = {}
        self._begun_to = self._read_to = self._reported_to = 0
        self._behind = False
        self.is_suspended = False
        """Whether a frame could not be applied and is retried later; until then no frame is
        applied.
        """
        self.problem = ""
        """Why frames of the session are deferred, as the text of a finding."""

    @property
    def is_complete(self) -> bool:
        """Whether every pending frame of the ledger is in this queue."""
        return not self.is_suspended and not self._behind

    @property
    def read_to(self) -> int | None:
        """Sequence number up to which frames were read from the ledger; None when none are left
        there.
        """
        return self._read_to if self._behind else None

    @property
    def session_ends(self) -> list[int]:
        """Sequence numbers of the pending session ends; none while the session is suspended."""
        with self._lock:
            items = () if self.is_suspended else self._items.items()
            return [at for at, item in items if isinstance(item.declaration, SessionEnd)]

    def restore(self, items: Iterable[MetadataFrame]) -> None:
        """Start with the frames that an earlier process left in the ledger."""
        with self._lock:
            self._items = {item.frame_id.sequence: item for item in items}
            self._begun_to = max(self._items, default=0)

    def add(self, items: Collection[MetadataFrame]) -> None:
        """Add frames that have just been committed."""
        if not self.is_complete:
            items = [item for item in items if self.is_suspended and _is_end(item)]
        with self._lock:
            self._items.update((item.frame_id.sequence, item) for item in items)

    def pop_next(self, watermark: int) -> MetadataFrame | None:
        """Remove and return the first frame up to the watermark; while suspended, each end once."""
        with self._lock:
            first = min(self._items, default=None)
            if first is None or first > watermark:
                return None
            if self.is_suspended:
                self._reported_to = first
            else:
                self._begun_to = max(self._begun_to, first)
            return self._items.pop(first)

    def was_begun(self, item: MetadataFrame) -> bool:
        """Return whether an earlier process or this one may have applied a part of a frame."""
        return item.frame_id.sequence <= self._begun_to

    def suspend(self, failed: MetadataFrame | None) -> None:
        """Suspend the session; the failed frame is the first one to be retried."""
        with self._lock:
            kept = [*self._items.values(), *([failed] if failed else [])]
            ends = {item.frame_id.sequence: item for item in kept if _is_end(item)}
            self._items = {
                number: end for number, end in ends.items() if number > self._reported_to
            }
            self.is_suspended, self._behind = True, False

    def resume(self) -> None:
        """Resume the session with the frames in the ledger."""
        with self._lock:
            self._items, self._read_to = {}, 0
            self.is_suspended, self._behind = False, True

    def add_from_ledger(self, items: Collection[MetadataFrame], *, all_there: bool) -> None:
        """Add the next frames that were read from the ledger."""
        with self._lock:
            self._items.update((item.frame_id.sequence, item) for item in items)
            self._read_to = max(self._items, default=self._read_to)
            self._behind = not all_there


def _is_end(item: MetadataFrame) -> bool:
    return isinstance(item.declaration, (IterationEnd, SessionEnd))


_EventPiece = tuple[npt.NDArray[np.uint64], list[str]]


class ProgramOrder:
    """Events of running iterations. The order of each graph is determined from them and written
    once.
    """

    def __init__(self, written: Iterable[int] = ()) -> None:
        self._written = set(written)
        self._pieces: dict[int, dict[int, list[_EventPiece]]] = {}

    @property
    def written(self) -> frozenset[int]:
        """Numbers of the graphs whose order is in the tree."""
        return frozenset(self._written)

    def add_events(self, events: EventColumns) -> None:
        """Add a batch of events."""
        columns = events.columns
        pairs = np.stack((columns["iteration"], columns["graph"].astype(np.uint64)), axis=1)
        for iteration, graph in np.unique(pairs, axis=0).tolist():
            pieces = self._pieces.setdefault(iteration, defaultdict(list))[graph]
            if graph in self._written:
                continue
            chosen = np.flatnonzero((pairs[:, 0] == iteration) & (pairs[:, 1] == graph))
            found: list[int] = columns["name"][chosen].tolist()
            names = [str(events.names[index]) for index in found]
            pieces.append((columns["position"][chosen], names))

    def graphs(self, iteration: int) -> frozenset[int]:
        """Return the numbers of the graphs that ran in an iteration."""
        return frozenset(self._pieces.get(iteration, ()))

    def unwritten(self, iteration: int) -> dict[int, list[str]]:
        """Return the operator names in program order for each graph whose order is not in the tree
        yet.
        """
        return {
            graph: _order_names(pieces)
            for graph, pieces in self._pieces.get(iteration, {}).items()
            if graph not in self._written and pieces
        }

    def mark_written(self, graph: int) -> None:
        """Note that the order of a graph is in the tree, as the framework compiled it."""
        self._written.add(graph)

    def forget_iterations(self, iteration: int) -> None:
        """Forget an iteration and all earlier ones, because the orders of their graphs are in the
        tree.
        """
        self._written |= self._pieces.get(iteration, {}).keys()
        self._pieces = {i: pieces for i, pieces in self._pieces.items() if i > iteration}


def _order_names(pieces: list[_EventPiece]) -> list[str]:
    positions = np.concatenate([positions for positions, _ in pieces])
    names = [name for _, some in pieces for name in some]
    # A call is sent while it is open and again when it is complete, so its last event counts.
    _, last = np.unique(positions[::-1], return_index=True)
    return [names[len(names) - 1 - index] for index in last.tolist()]
