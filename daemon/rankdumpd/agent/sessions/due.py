"""Declarations of one session that have not taken effect yet, and why they wait."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from rankdump.contract.exchange import IterationEnd, SessionEnd
from rankdumpd.agent.values import Declared


class Due:
    """One thread takes out, any may ask.

    While the session waits for its disk only ends are kept, to be told of: declarations stand in
    the ledger, and are read from there again, some at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, Declared] = {}
        self._begun_to = self._read_to = self._told_to = 0
        self._behind = False
        self.waits = False
        """An effect failed and is tried again later: until then nothing takes effect."""
        self.complaint = ""
        """Why something of the session waits for its disk, for people."""

    @property
    def all_here(self) -> bool:
        """Whether the ledger has none that is not here."""
        return not self.waits and not self._behind

    @property
    def read_to(self) -> int | None:
        """Number up to which they were read again; None when none are left to be read."""
        return self._read_to if self._behind else None

    @property
    def goodbyes(self) -> list[int]:
        """Numbers of the goodbyes that stand here; none while they wait like all else."""
        with self._lock:
            items = () if self.waits else self._items.items()
            return [at for at, item in items if isinstance(item.declaration, SessionEnd)]

    def restore(self, items: Iterable[Declared]) -> None:
        """Take what the ledger had when this process began."""
        with self._lock:
            self._items = {item.ticket.sequence: item for item in items}
            self._begun_to = max(self._items, default=0)

    def add(self, items: Collection[Declared]) -> None:
        """Take what has just been committed."""
        if not self.all_here:
            items = [item for item in items if self.waits and _is_end(item)]
        with self._lock:
            self._items.update((item.ticket.sequence, item) for item in items)

    def next(self, watermark: int) -> Declared | None:
        """Take out the first that the watermark has passed; while all wait, each end once."""
        with self._lock:
            first = min(self._items, default=None)
            if first is None or first > watermark:
                return None
            if self.waits:
                self._told_to = first
            else:
                self._begun_to = max(self._begun_to, first)
            return self._items.pop(first)

    def begun(self, item: Declared) -> bool:
        """Return whether it may have been applied in part, by an earlier process or this one."""
        return item.ticket.sequence <= self._begun_to

    def set_back(self, failed: Declared | None) -> None:
        """Wait from now on; what failed is the first to be tried again."""
        with self._lock:
            kept = [*self._items.values(), *([failed] if failed else [])]
            ends = {item.ticket.sequence: item for item in kept if _is_end(item)}
            self._items = {number: end for number, end in ends.items() if number > self._told_to}
            self.waits, self._behind = True, False

    def resume(self) -> None:
        """Begin again with what the ledger has."""
        with self._lock:
            self._items, self._read_to = {}, 0
            self.waits, self._behind = False, True

    def refill(self, items: Collection[Declared], *, all_there: bool) -> None:
        """Take what the ledger has next."""
        with self._lock:
            self._items.update((item.ticket.sequence, item) for item in items)
            self._read_to = max(self._items, default=self._read_to)
            self._behind = not all_there

    def complaints(self) -> list[str]:
        """Return why something waits, a sentence; nothing when nothing does."""
        return [self.complaint] if self.complaint else []


def _is_end(item: Declared) -> bool:
    return isinstance(item.declaration, (IterationEnd, SessionEnd))
