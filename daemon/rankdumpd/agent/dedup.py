"""Which tensors stand in a tree already: each is written once, and linked to from then on.

Decides by the digest; linking and writing are the caller's. Forgets when it is full, and knows
nothing of what an earlier process wrote: then a tensor is written once more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from rankdumpd.agent.values import Examined, Original, Outcome

MOST_ORIGINALS = 32_768
"""Together 20 MB, of the 100 that an idle agent may take."""
LEAST_BYTES = 4096
"""Writing so little costs what a link does (15 us on tmpfs), and takes hardly any room."""
_TURNS = 1024


class Originals:
    """Files that others may be linked to, of all trees; safe to use from several threads."""

    def __init__(self, most: int = MOST_ORIGINALS) -> None:
        self._most = most
        self._known: OrderedDict[str, Original] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(_TURNS)]

    def __len__(self) -> int:
        return len(self._known)

    def once(
        self,
        record: Examined,
        kind: str,
        *,
        link: Callable[[Original], Outcome | None],
        write: Callable[[], Outcome],
    ) -> Outcome:
        """Return the record linked to an identical one of its kind, or written where there is none.

        `kind` names the tree and how files are stored in it. `link` may answer None: not possible.
        """
        if record.head.byte_count < LEAST_BYTES:
            return write()
        key = f"{record.digest} {record.head.kind.dtype} {record.head.kind.shape} {kind}"
        # An input often follows the output it equals at once. Whoever waits here does so no
        # longer than packing the same bytes again would take.
        with self._turns[hash(key) % _TURNS]:
            original = self._find(key)
            outcome = link(original) if original else None
            if outcome is None:
                outcome = write()
                if outcome.original:
                    self._remember(key, outcome.original)
            return outcome

    def _find(self, key: str) -> Original | None:
        with self._lock:
            found = self._known.get(key)
            if found:
                self._known.move_to_end(key)
            return found

    def _remember(self, key: str, original: Original) -> None:
        with self._lock:
            self._known[key] = original
            self._known.move_to_end(key)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
