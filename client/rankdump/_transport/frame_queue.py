"""Queue of the frames of one session: items without a sequence number, numbered items that are to
be sent, and items that were sent but not acknowledged. Pure state; its owner holds the lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rankdump._core.record import MAX_FRAME_ROWS, StatisticRows
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    MetadataItem,
    SessionEnd,
)
from rankdump._wire.frames import make_metadata_frame
from rankdump.wire.v1 import agent_pb2

# Metadata is small, but must not grow without end while there is no agent.
MAX_WAITING_METADATA = 10_000
CORRUPTED = "corrupted"
COPY_FAILED = "copy_failed"
NOT_TAKEN_BY_AGENT = "not_taken_by_agent"
REJECTED_BY_AGENT = "rejected_by_agent"
_NO_DATA = memoryview(b"")


@dataclass(frozen=True, slots=True)
class RecoveredEntry:
    """An entry of a slab that was abandoned."""

    frame: agent_pb2.Frame
    data: memoryview
    whole: bool
    tensors: int
    """Number of tensors in the entry."""
    checksum: bytes = b""
    """Digest of the entry's data, from its seal."""


QueuedItem: TypeAlias = "StagedRecord | MetadataItem | RecoveredEntry"
BufferedItem: TypeAlias = "StagedRecord | StatisticRows | CallStacks"
"""Items that use memory of the staging budget until they are released."""


@dataclass(slots=True)
class NumberedItem:
    """An item with its sequence number."""

    sequence: int
    item: QueuedItem
    loaded_bytes: int = 0
    """Number of bytes of a record in pieces that are in the slab already."""

    @property
    def tensors(self) -> int:
        """Number of tensors in the item."""
        return (
            self.item.tensors if isinstance(self.item, RecoveredEntry) else count_tensors(self.item)
        )


def count_tensors(item: StagedRecord | MetadataItem) -> int:
    """Return the number of tensors in an item."""
    if isinstance(item, StatisticRows):
        return len(item)
    return int(isinstance(item, StagedRecord))


def find_iteration(item: StagedRecord | MetadataItem) -> int:
    """Return the iteration of an item's tensors; 0 for an item without tensors."""
    if isinstance(item, StatisticRows):
        return item.iteration
    return item.head.iteration if isinstance(item, StagedRecord) else 0


def _is_unbuffered(item: StagedRecord | MetadataItem) -> bool:
    return not isinstance(item, (StagedRecord, StatisticRows, CallStacks))


def _is_passable(item: StagedRecord | MetadataItem) -> bool:
    """Return whether records in a slab may overtake the item."""
    return not isinstance(item, (StagedRecord, ChangedPlan))


class FrameQueue:
    """The items of one session in their order."""

    def __init__(self) -> None:
        self.waiting: deque[StagedRecord | MetadataItem] = deque()
        """Items without a sequence number; records that are placed in a slab meanwhile overtake
        passable items.
        """
        self.numbered: deque[NumberedItem] = deque()
        """Items that are sent next, before any other item gets a number."""
        self.in_flight: deque[NumberedItem] = deque()
        """Items that were sent; they are held until they are acknowledged."""
        self.last_sequence = 0
        """Highest sequence number that was assigned."""
        self.acknowledged = 0
        """Highest sequence number that was acknowledged."""
        self.lost_metadata = 0
        """Number of metadata items that found no space or were damaged in a slab."""
        self._assigned: deque[tuple[int, int, int]] = deque()
        """Sequence number of each item with tensors, the number of these tensors, and their
        iteration.
        """
        self._assigned_tensors = self._waiting_tensors = 0
        self._waiting_impassable = self._waiting_metadata = 0

    @property
    def outstanding(self) -> int:
        """Number of items that are not acknowledged."""
        return len(self.waiting) + self.last_sequence - self.acknowledged

    @property
    def tensors(self) -> int:
        """Number of tensors that are not acknowledged."""
        return self._waiting_tensors + self._assigned_tensors

    @property
    def held_tensors(self) -> int:
        """Number of unacknowledged tensors that are in this process's own memory and
        not in a slab.
        """
        return self._waiting_tensors + sum(
            each.tensors for each in (*self.numbered, *self.in_flight)
        )

    @property
    def has_unsent(self) -> bool:
        """Whether any item waits to be sent."""
        return bool(self.waiting or self.numbered)

    @property
    def blocks_records(self) -> bool:
        """Whether a new record would overtake records, a changed plan or numbered items."""
        return bool(self.numbered) or self._waiting_impassable > 0

    def add(self, item: StagedRecord | MetadataItem) -> None:
        """Add an item at the end; metadata above the limit is counted and left out."""
        is_metadata = _is_unbuffered(item)
        full = self._waiting_metadata >= MAX_WAITING_METADATA
        if is_metadata and full and not isinstance(item, ChangedPlan):
            self.lost_metadata += 1
            return
        self._waiting_tensors += count_tensors(item)
        self._waiting_metadata += is_metadata
        self._waiting_impassable += not _is_passable(item)
        self.waiting.append(item)

    def pop(self) -> NumberedItem:
        """Remove the first waiting item, and number it."""
        item = self.waiting.popleft()
        tensors = count_tensors(item)
        self._waiting_tensors -= tensors
        self._waiting_metadata -= _is_unbuffered(item)
        self._waiting_impassable -= not _is_passable(item)
        return NumberedItem(self.assign_sequence(tensors, find_iteration(item)), item)

    def assign_sequence(self, tensors: int, iteration: int) -> int:
        """Return the next sequence number, for an item that has this number of tensors of an
        iteration.
        """
        self.last_sequence = sequence = self.last_sequence + 1
        if tensors:
            self._assigned.append((sequence, tensors, iteration))
            self._assigned_tensors += tensors
        return sequence

    def retain_metadata(self, each: NumberedItem) -> None:
        """Hold metadata that is in a slab, up to a limit, so that it can be sent again if it is
        damaged there.
        """
        item = each.item
        small = not isinstance(item, RecoveredEntry) and _is_unbuffered(item)
        room = len(self.in_flight) < MAX_WAITING_METADATA
        if small and (room or isinstance(item, ChangedPlan)):
            self.in_flight.append(each)

    def acknowledge(self, sequence: int) -> list[BufferedItem]:
        """Remove all items up to a sequence number; return those that hold memory of the budget."""
        # A number that was never assigned cannot be acknowledged.
        self.acknowledged = max(self.acknowledged, min(sequence, self.last_sequence))
        while self._assigned and self._assigned[0][0] <= self.acknowledged:
            self._assigned_tensors -= self._assigned.popleft()[1]
        taken: list[BufferedItem] = []
        for queue in (self.in_flight, self.numbered):
            while queue and queue[0].sequence <= self.acknowledged:
                item = queue.popleft().item
                if isinstance(item, (StagedRecord, StatisticRows, CallStacks)):
                    taken.append(item)
        return taken

    def requeue_unacknowledged(self, carried: Iterable[NumberedItem] = ()) -> int:
        """Move all items that were sent but not acknowledged to the front again.

        An assigned number whose item is gone is sent as the loss of its tensors. Return the number
        of these tensors.
        """
        again = {each.sequence: each for each in (*carried, *self.in_flight, *self.numbered)}
        lost = [assigned for assigned in self._assigned if assigned[0] not in again]
        for sequence, tensors, iteration in lost:
            frame = make_lost_frame(sequence, iteration, tensors, CORRUPTED)
            again[sequence] = NumberedItem(sequence, RecoveredEntry(frame, _NO_DATA, True, tensors))
        for number in range(self.acknowledged + 1, self.last_sequence + 1):
            if number not in again:
                self.lost_metadata += 1
                blank = RecoveredEntry(make_blank_frame(number), _NO_DATA, True, 0)
                again[number] = NumberedItem(number, blank)
        for each in again.values():
            each.loaded_bytes = 0
        self.in_flight.clear()
        self.numbered = deque(sorted(again.values(), key=lambda each: each.sequence))
        return sum(tensors for _, tensors, _ in lost)


def make_loss_frames(items: Iterable[StagedRecord | MetadataItem]) -> list[agent_pb2.Frame]:
    """Return the last frames of a rank that gives up: its tensors as losses, and all ends of
    iterations.
    """
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
    """Return an empty frame for a sequence number that must not be missing."""
    return agent_pb2.Frame(sequence=sequence, kernel_arguments=agent_pb2.KernelArguments())


def make_lost_frame(sequence: int, iteration: int, tensors: int, reason: str) -> agent_pb2.Frame:
    """Return a frame that reports the loss of tensors."""
    lost = agent_pb2.Lost(iteration=iteration, tensors=tensors, reason=reason)
    return agent_pb2.Frame(sequence=sequence, lost=lost)
