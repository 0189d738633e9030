"""Copies that accelerators make on their own: begun by training threads, published by the sender.

An entry whose copy is under way holds back those after it, so looking at the oldest is enough.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rankdump.contract.exchange import RecordHead
from rankdump.contract.slab_writer import Reservation
from rankdump.ship.ring import Ring
from rankdump.values import Transfer


@dataclass(frozen=True, slots=True)
class Copy:
    """An entry of a slab that fills by itself."""

    head: RecordHead
    ring: Ring
    room: Reservation
    transfer: Transfer


class Publish(Protocol):
    """Ends an entry, with its data or without."""

    def __call__(self, ring: Ring, room: Reservation, *, whole: bool) -> None:
        """Publish it."""
        ...


class Copies:
    """Safe to use from several threads."""

    def __init__(self, publish: Publish, on_torn: Callable[[RecordHead], None]) -> None:
        self._publish, self._on_torn = publish, on_torn
        self._under_way: deque[Copy] = deque()
        self._finishing = threading.Lock()

    @property
    def any(self) -> bool:
        """Whether a copy is under way, as far as anybody looked."""
        return bool(self._under_way)

    def add(self, copy: Copy) -> None:
        """Take a copy that was begun."""
        self._under_way.append(copy)

    def finish(self) -> None:
        """Publish what is there by now."""
        with self._finishing:
            while self._under_way:
                copy = self._under_way[0]
                try:
                    whole = copy.transfer.done()
                    if not whole:
                        return
                except Exception:  # the number is given, so the record must follow
                    self._on_torn(copy.head)
                    whole = False
                self._under_way.popleft()
                self._publish(copy.ring, copy.room, whole=whole)
