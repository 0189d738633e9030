"""Queue of one session's frames: items that wait for a sequence number, that are to be sent, and
that were sent and are not acknowledged yet.

Pure state; its owner holds the lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankdump._core.record import MAX_FRAME_ROWS, StatisticRows
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._core.session_protocol import CallStacks, IterationEnd, MetadataItem, SessionEnd
from rankdump._wire.frames import make_metadata_frame
from rankdump.wire.v1 import agent_pb2

# Declarations are small, but an agent that never comes must not make them grow for ever.
MAX_WAITING_DECLARATIONS = 10_000
CORRUPTED = "corrupted"
COPY_FAILED = "copy_failed"
NOT_TAKEN_BY_AGENT = "not_taken_by_agent"
_NO_DATA = memoryview(b"")


@dataclass(frozen=True, slots=True)
class RecoveredEntry:
    """An entry of a slab that was given up."""

    frame: agent_pb2.Frame
    data: memoryview
    whole: bool
    tensors: int
    """How many tensors hang on it."""
    checksum: bytes = b""
    """Of the data, as it was sealed."""


QueuedItem: TypeAlias = "StagedRecord | MetadataItem | RecoveredEntry"
BufferedItem: TypeAlias = "StagedRecord | StatisticRows | CallStacks"
"""What takes room of the buffer until it has left."""


@dataclass(slots=True)
class NumberedItem:
    """An item that has its place in the stream."""

    sequence: int
    item: QueuedItem
    loaded_bytes: int = 0
    """How much of a record that is cut is in the slab."""

    @property
    def tensors(self) -> int:
        """How many tensors hang on it."""
        return (
            self.item.tensors if isinstance(self.item, RecoveredEntry) else count_tensors(self.item)
        )


def count_tensors(item: StagedRecord | MetadataItem) -> int:
    """Return how many tensors hang on an item."""
    if isinstance(item, StatisticRows):
        return len(item)
    return int(isinstance(item, StagedRecord))


def find_iteration(item: StagedRecord | MetadataItem) -> int:
    """Return in which iteration its tensors are; 0 for an item on which none hang."""
    if isinstance(item, StatisticRows):
        return item.iteration
    return item.head.iteration if isinstance(item, StagedRecord) else 0


def _is_unbuffered(item: StagedRecord | MetadataItem) -> bool:
    return not isinstance(item, (StagedRecord, StatisticRows, CallStacks))


class FrameQueue:
    """The items of one session, in their order."""

    def __init__(self) -> None:
        self.waiting: deque[StagedRecord | MetadataItem] = deque()
        """Not numbered yet: what is numbered meanwhile overtakes declarations."""
        self.numbered: deque[NumberedItem] = deque()
        """To leave next: before anything gets another number."""
        self.in_flight: deque[NumberedItem] = deque()
        """Left, and held until it is acknowledged."""
        self.last_sequence = 0
        """The highest number given."""
        self.acknowledged = 0
        """The highest number accounted for."""
        self.lost_declarations = 0
        """Declarations that found no room, or were damaged in a slab."""
        self._given: deque[_AssignedSequence] = deque()
        self._given_tensors = self._waiting_tensors = 0
        self._waiting_records = self._waiting_declarations = 0

    @property
    def outstanding(self) -> int:
        """Items that the agent has not accounted for."""
        return len(self.waiting) + self.last_sequence - self.acknowledged

    @property
    def tensors(self) -> int:
        """Tensors that the agent has not accounted for."""
        return self._waiting_tensors + self._given_tensors

    @property
    def held_tensors(self) -> int:
        """Tensors among those that are in this process's own memory."""
        return self._waiting_tensors + sum(
            each.tensors for each in (*self.numbered, *self.in_flight)
        )

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits to leave."""
        return bool(self.waiting or self.numbered)

    @property
    def blocks_records(self) -> bool:
        """Whether a record that comes now would overtake what it must not."""
        return bool(self.numbered) or self._waiting_records > 0

    def add(self, item: StagedRecord | MetadataItem) -> None:
        """Put an item at the end; one declaration too many is counted and left out."""
        tensors = count_tensors(item)
        free = _is_unbuffered(item)
        if free and self._waiting_declarations >= MAX_WAITING_DECLARATIONS:
            self.lost_declarations += 1
            return
        self._waiting_tensors += tensors
        self._waiting_declarations += free
        self._waiting_records += isinstance(item, StagedRecord)
        self.waiting.append(item)

    def pop(self) -> NumberedItem:
        """Take the first waiting item and number it."""
        item = self.waiting.popleft()
        tensors = count_tensors(item)
        self._waiting_tensors -= tensors
        self._waiting_declarations -= _is_unbuffered(item)
        self._waiting_records -= isinstance(item, StagedRecord)
        return NumberedItem(self.assign_sequence(tensors, find_iteration(item)), item)

    def assign_sequence(self, tensors: int, iteration: int) -> int:
        """Return the next number, for an item on which so many tensors of an iteration hang."""
        self.last_sequence += 1
        if tensors:
            self._given.append(_AssignedSequence(self.last_sequence, tensors, iteration))
            self._given_tensors += tensors
        return self.last_sequence

    def retain_declaration(self, each: NumberedItem) -> None:
        """Hold a declaration that lies in a slab: should it be damaged there, it is said again.

        What takes room of the buffer has given it back by then, and is not held; nor are too many.
        """
        item = each.item
        small = not isinstance(item, RecoveredEntry) and _is_unbuffered(item)
        if small and len(self.in_flight) < MAX_WAITING_DECLARATIONS:
            self.in_flight.append(each)

    def acknowledge(self, sequence: int) -> list[BufferedItem]:
        """Let go of everything up to a number; return what room was held for."""
        # What was never sent cannot be accounted for, whoever says so.
        self.acknowledged = max(self.acknowledged, min(sequence, self.last_sequence))
        while self._given and self._given[0].sequence <= self.acknowledged:
            self._given_tensors -= self._given.popleft().tensors
        taken: list[BufferedItem] = []
        for queue in (self.in_flight, self.numbered):
            while queue and queue[0].sequence <= self.acknowledged:
                item = queue.popleft().item
                if isinstance(item, (StagedRecord, StatisticRows, CallStacks)):
                    taken.append(item)
        return taken

    def requeue_unacknowledged(self, carried: Iterable[NumberedItem] = ()) -> int:
        """Put what has left without being accounted for at the front again.

        Numbers that were given and stand nowhere any more leave as what is known of them: how many
        tensors of which iteration are lost. Return how many these are, all together.
        """
        again = {each.sequence: each for each in (*carried, *self.in_flight, *self.numbered)}
        lost = [given for given in self._given if given.sequence not in again]
        for given in lost:
            again[given.sequence] = given.lost()
        for number in range(self.acknowledged + 1, self.last_sequence + 1):
            if number not in again:
                self.lost_declarations += 1
                again[number] = NumberedItem(
                    number, RecoveredEntry(make_blank_frame(number), _NO_DATA, True, 0)
                )
        for each in again.values():
            each.loaded_bytes = 0
        self.in_flight.clear()
        self.numbered = deque(sorted(again.values(), key=lambda each: each.sequence))
        return sum(given.tensors for given in lost)


class _AssignedSequence(NamedTuple):
    """A number on which tensors hang."""

    sequence: int
    tensors: int
    iteration: int

    def lost(self) -> NumberedItem:
        """Return what leaves in the place of what stood there."""
        frame = make_lost_frame(self.sequence, self.iteration, self.tensors, CORRUPTED)
        return NumberedItem(self.sequence, RecoveredEntry(frame, _NO_DATA, True, self.tensors))


def make_loss_frames(items: Iterable[StagedRecord | MetadataItem]) -> list[agent_pb2.Frame]:
    """Return what a rank leaves that waits no longer: its tensors as lost ones, and all ends."""
    tensors: Counter[int] = Counter()
    ends: list[MetadataItem] = []
    for item in items:
        if isinstance(item, (IterationEnd, SessionEnd)):
            ends.append(item)
        else:
            tensors[find_iteration(item)] += count_tensors(item)
    frames: list[agent_pb2.Frame] = []
    for iteration, count in sorted(tensors.items()):
        for begin in range(0, count, MAX_FRAME_ROWS):
            some = min(MAX_FRAME_ROWS, count - begin)
            frames.append(make_lost_frame(len(frames) + 1, iteration, some, NOT_TAKEN_BY_AGENT))
    return frames + [
        make_metadata_frame(number, end) for number, end in enumerate(ends, len(frames) + 1)
    ]


def make_blank_frame(sequence: int) -> agent_pb2.Frame:
    """Return a frame that says nothing, for a number that must not be missing."""
    return agent_pb2.Frame(sequence=sequence, kernel_arguments=agent_pb2.KernelArguments())


def make_lost_frame(sequence: int, iteration: int, tensors: int, reason: str) -> agent_pb2.Frame:
    """Return a frame that says what was lost under its number."""
    said = agent_pb2.Lost(iteration=iteration, tensors=tensors, reason=reason)
    return agent_pb2.Frame(sequence=sequence, lost=said)
