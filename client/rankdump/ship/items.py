"""What waits to leave, with and without a number, and what has left and may have to leave again.

Pure state of one session; its owner holds the lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankdump.contract.exchange import CallStacks, Declaration, IterationEnd, SessionEnd
from rankdump.contract.figure_rows import MAX_ROWS, FigureRows
from rankdump.values import Staged
from rankdump.wire.frames import declaration_frame
from rankdump.wire.v1 import agent_pb2

# Declarations are small, but an agent that never comes must not make them grow for ever.
MAX_WAITING_DECLARATIONS = 10_000
CORRUPTED = "corrupted"
COPY_FAILED = "copy_failed"
NOT_TAKEN = "not_taken_by_agent"
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Carried:
    """An entry of a slab that was given up."""

    frame: agent_pb2.Frame
    data: memoryview
    whole: bool
    tensors: int
    """How many tensors hang on it."""
    checksum: bytes = b""
    """Of the data, as it was sealed."""


Item: TypeAlias = "Staged | Declaration | Carried"
Held: TypeAlias = "Staged | FigureRows | CallStacks"
"""What takes room of the buffer until it has left."""


@dataclass(slots=True)
class Numbered:
    """An item that has its place in the stream."""

    sequence: int
    item: Item
    gone_bytes: int = 0
    """How much of a record that is cut is in the slab."""

    @property
    def tensors(self) -> int:
        """How many tensors hang on it."""
        return self.item.tensors if isinstance(self.item, Carried) else tensors_of(self.item)


def tensors_of(item: Staged | Declaration) -> int:
    """Return how many tensors hang on an item."""
    if isinstance(item, FigureRows):
        return len(item)
    return int(isinstance(item, Staged))


def iteration_of(item: Staged | Declaration) -> int:
    """Return in which iteration its tensors are; 0 for an item on which none hang."""
    if isinstance(item, FigureRows):
        return item.iteration
    return item.head.iteration if isinstance(item, Staged) else 0


def _takes_no_room(item: Staged | Declaration) -> bool:
    return not isinstance(item, (Staged, FigureRows, CallStacks))


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
        """Declarations that found no room, or were damaged in a slab."""
        self._given: deque[_Given] = deque()
        self._given_tensors = self._waiting_tensors = 0
        self._waiting_records = self._waiting_declarations = 0

    @property
    def outstanding(self) -> int:
        """Items that the agent has not accounted for."""
        return len(self.waiting) + self.last - self.acknowledged

    @property
    def tensors(self) -> int:
        """Tensors that the agent has not accounted for."""
        return self._waiting_tensors + self._given_tensors

    @property
    def held_tensors(self) -> int:
        """Tensors among those that are in this process's own memory."""
        return self._waiting_tensors + sum(each.tensors for each in (*self.numbered, *self.window))

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
        tensors = tensors_of(item)
        free = _takes_no_room(item)
        if free and self._waiting_declarations >= MAX_WAITING_DECLARATIONS:
            self.lost_declarations += 1
            return
        self._waiting_tensors += tensors
        self._waiting_declarations += free
        self._waiting_records += isinstance(item, Staged)
        self.waiting.append(item)

    def pop(self) -> Numbered:
        """Take the first waiting item and number it."""
        item = self.waiting.popleft()
        tensors = tensors_of(item)
        self._waiting_tensors -= tensors
        self._waiting_declarations -= _takes_no_room(item)
        self._waiting_records -= isinstance(item, Staged)
        return Numbered(self.number(tensors, iteration_of(item)), item)

    def number(self, tensors: int, iteration: int) -> int:
        """Return the next number, for an item on which so many tensors of an iteration hang."""
        self.last += 1
        if tensors:
            self._given.append(_Given(self.last, tensors, iteration))
            self._given_tensors += tensors
        return self.last

    def keep(self, each: Numbered) -> None:
        """Hold a declaration that lies in a slab: should it be damaged there, it is said again.

        What takes room of the buffer has given it back by then, and is not held; nor are too many.
        """
        item = each.item
        small = not isinstance(item, Carried) and _takes_no_room(item)
        if small and len(self.window) < MAX_WAITING_DECLARATIONS:
            self.window.append(each)

    def acknowledge(self, sequence: int) -> list[Held]:
        """Let go of everything up to a number; return what room was held for."""
        # What was never sent cannot be accounted for, whoever says so.
        self.acknowledged = max(self.acknowledged, min(sequence, self.last))
        while self._given and self._given[0].sequence <= self.acknowledged:
            self._given_tensors -= self._given.popleft().tensors
        taken: list[Held] = []
        for queue in (self.window, self.numbered):
            while queue and queue[0].sequence <= self.acknowledged:
                item = queue.popleft().item
                if isinstance(item, (Staged, FigureRows, CallStacks)):
                    taken.append(item)
        return taken

    def send_again(self, carried: Iterable[Numbered] = ()) -> int:
        """Put what has left without being accounted for at the front again.

        Numbers that were given and stand nowhere any more leave as what is known of them: how many
        tensors of which iteration are lost. Return how many these are, all together.
        """
        again = {each.sequence: each for each in (*carried, *self.window, *self.numbered)}
        lost = [given for given in self._given if given.sequence not in again]
        for given in lost:
            again[given.sequence] = given.lost()
        for number in range(self.acknowledged + 1, self.last + 1):
            if number not in again:
                self.lost_declarations += 1
                again[number] = Numbered(number, Carried(blank(number), _NOTHING, True, 0))
        for each in again.values():
            each.gone_bytes = 0
        self.window.clear()
        self.numbered = deque(sorted(again.values(), key=lambda each: each.sequence))
        return sum(given.tensors for given in lost)


class _Given(NamedTuple):
    """A number on which tensors hang."""

    sequence: int
    tensors: int
    iteration: int

    def lost(self) -> Numbered:
        """Return what leaves in the place of what stood there."""
        frame = lost(self.sequence, self.iteration, self.tensors, CORRUPTED)
        return Numbered(self.sequence, Carried(frame, _NOTHING, True, self.tensors))


def left_frames(items: Iterable[Staged | Declaration]) -> list[agent_pb2.Frame]:
    """Return what a rank leaves that waits no longer: its tensors as lost ones, and all ends."""
    tensors: Counter[int] = Counter()
    ends: list[Declaration] = []
    for item in items:
        if isinstance(item, (IterationEnd, SessionEnd)):
            ends.append(item)
        else:
            tensors[iteration_of(item)] += tensors_of(item)
    frames: list[agent_pb2.Frame] = []
    for iteration, count in sorted(tensors.items()):
        for begin in range(0, count, MAX_ROWS):
            some = min(MAX_ROWS, count - begin)
            frames.append(lost(len(frames) + 1, iteration, some, NOT_TAKEN))
    return frames + [
        declaration_frame(number, end) for number, end in enumerate(ends, len(frames) + 1)
    ]


def blank(sequence: int) -> agent_pb2.Frame:
    """Return a frame that says nothing, for a number that must not be missing."""
    return agent_pb2.Frame(sequence=sequence, kernel_arguments=agent_pb2.KernelArguments())


def lost(sequence: int, iteration: int, tensors: int, reason: str) -> agent_pb2.Frame:
    """Return a frame that says what was lost under its number."""
    said = agent_pb2.Lost(iteration=iteration, tensors=tensors, reason=reason)
    return agent_pb2.Frame(sequence=sequence, lost=said)
