"""What waits to leave, with and without a number, and what has left and may have to leave again.

Pure state of one session; its owner holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.contract.exchange import Declaration
from rankdump.values import Staged
from rankdump.wire.v1 import agent_pb2

# Declarations are small, but an agent that never comes must not make them grow for ever.
MAX_WAITING_DECLARATIONS = 10_000


@dataclass(frozen=True, slots=True)
class Carried:
    """An entry of a slab that was given up."""

    frame: agent_pb2.Frame
    data: memoryview
    whole: bool
    is_record: bool


Item: TypeAlias = "Staged | Declaration | Carried"


@dataclass(slots=True)
class Numbered:
    """An item that has its place in the stream."""

    sequence: int
    item: Item
    gone_bytes: int = 0
    """How much of a record that is cut is in the slab."""

    @property
    def is_record(self) -> bool:
        """Whether a tensor hangs on it."""
        return isinstance(self.item, Staged) or (
            isinstance(self.item, Carried) and self.item.is_record
        )


class Items:
    """The items of one session, in their order."""

    def __init__(self) -> None:
        self.waiting: deque[Staged | Declaration] = deque()
        """Not numbered yet: what is numbered meanwhile overtakes declarations."""
        self.numbered: deque[Numbered] = deque()
        """To leave next: before anything gets another number."""
        self.window: deque[Numbered] = deque()
        """Left, and held until it is acknowledged."""
        self.last = 0
        """The highest number given."""
        self.acknowledged = 0
        """The highest number accounted for."""
        self.lost_declarations = 0
        """Declarations that found no room."""
        self._records: deque[int] = deque()
        self._waiting_records = 0

    @property
    def outstanding(self) -> int:
        """Items that the agent has not accounted for."""
        return len(self.waiting) + self.last - self.acknowledged

    @property
    def records(self) -> int:
        """Tensors that the agent has not accounted for."""
        return self._waiting_records + len(self._records)

    @property
    def held_records(self) -> int:
        """Tensors among those that are in this process's own memory."""
        return self._waiting_records + sum(
            each.is_record for each in (*self.numbered, *self.window)
        )

    @property
    def unsent(self) -> bool:
        """Whether anything waits to leave."""
        return bool(self.waiting or self.numbered)

    @property
    def bars_the_way(self) -> bool:
        """Whether a record that comes now would overtake what it must not."""
        return bool(self.numbered) or self._waiting_records > 0

    def add(self, item: Staged | Declaration) -> None:
        """Put an item at the end; one declaration too many is counted and left out."""
        if isinstance(item, Staged):
            self._waiting_records += 1
        elif len(self.waiting) - self._waiting_records >= MAX_WAITING_DECLARATIONS:
            self.lost_declarations += 1
            return
        self.waiting.append(item)

    def pop(self) -> Numbered:
        """Take the first waiting item and number it."""
        item = self.waiting.popleft()
        is_record = isinstance(item, Staged)
        self._waiting_records -= is_record
        return Numbered(self.number(is_record=is_record), item)

    def number(self, *, is_record: bool) -> int:
        """Return the next number."""
        self.last += 1
        if is_record:
            self._records.append(self.last)
        return self.last

    def acknowledge(self, sequence: int) -> list[Staged]:
        """Let go of everything up to a number; return what room was held for."""
        # What was never sent cannot be accounted for, whoever says so.
        self.acknowledged = max(self.acknowledged, min(sequence, self.last))
        while self._records and self._records[0] <= self.acknowledged:
            self._records.popleft()
        taken: list[Staged] = []
        for queue in (self.window, self.numbered):
            while queue and queue[0].sequence <= self.acknowledged:
                item = queue.popleft().item
                if isinstance(item, Staged):
                    taken.append(item)
        return taken

    def send_again(self, carried: Iterable[Numbered] = ()) -> None:
        """Put what has left without being accounted for at the front again."""
        again = [*carried, *self.window, *self.numbered]
        for each in again:
            each.gone_bytes = 0
        self.window.clear()
        self.numbered = deque(sorted(again, key=lambda each: each.sequence))
