"""Buffer between the training threads and the sender: one lock, the queue of items, copies that
accelerators make asynchronously, and the condition that wakes the sender at once or for a batch.

An entry whose copy is not complete holds back the entries after it, so only the oldest copy is
polled. Copies are made outside of the lock. This module is independent of gRPC.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rankdump._core.recorder_protocol import (
    DeviceTransfer,
    PlacementResult,
    StagedRecord,
    TensorSource,
)
from rankdump._core.session_protocol import ChangedPlan, MetadataItem, RecordHead
from rankdump._shm.event_journal import EventJournal
from rankdump._shm.slab_ring import SlabReservation
from rankdump._transport.frame_queue import BufferedItem, FrameQueue, NumberedItem
from rankdump._transport.send_ring import SendRing
from rankdump._wire.frames import add_sequence, serialize_record_body

BATCH_ENTRIES = 256
BATCH_BYTES = 32 << 20
BATCH_TIMEOUT_S = 0.01
"""Longest wait for a batch in seconds. Batches are useful because each doorbell takes the
interpreter's lock from the training several times.
"""
_ALREADY_WOKEN = 1 << 62
"""A number of entries that is larger than any that a sender waits for."""
_logger = logging.getLogger(__name__)


class LinkState(Enum):
    """State of the connection."""

    CONNECTING = "connecting"
    """The first attempt to connect is not over."""
    STARTING = "starting"
    """The agent that the job started does not serve yet."""
    ABSENT = "absent"
    """No agent has answered so far."""
    UNRESPONSIVE = "unresponsive"
    """No agent has answered in time so far; there may be one on a busy host."""
    OPENING = "opening"
    """The agent has answered but not opened the session yet, because a disk is busy."""
    WAITING = "waiting"
    """The agent has answered that it cannot open the session at present. Neither steps nor the
    end of the job wait for it.
    """
    UP = "up"
    AWAY = "away"
    """The connection was lost."""
    REJECTED = "rejected"
    """The agent rejected the session for good."""


_LIVE_LINKS = (LinkState.UP, LinkState.AWAY, LinkState.OPENING, LinkState.STARTING)


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How long a training thread waits for space; by default it does not wait."""

    timeout_s: float = 0.0
    """Longest wait in seconds since the agent last accepted anything."""
    only_behind_tensors: bool = False
    """Whether to wait only if tensors that are being sent can make space."""

    def compute_remaining_s(self, *, link: LinkState, has_tensors: bool, idle_s: float) -> float:
        """Return how many seconds remain to wait if the agent has accepted nothing for `idle_s`
        seconds.
        """
        if link not in _LIVE_LINKS or (self.only_behind_tensors and not has_tensors):
            return 0.0
        return self.timeout_s - idle_s


class BatchingCondition:
    """Counts the entries of a slab to wake the sender for a batch; the caller holds the lock."""

    def __init__(self, lock: threading.RLock) -> None:
        self._rung = threading.Condition(lock)
        self._entries = self._bytes = 0
        self._enough = 1

    def count_entry(self, byte_count: int) -> None:
        """Count an entry; wake the sender if it waits for no more entries."""
        self._entries += 1
        self._bytes += byte_count
        if self._entries >= self._enough or self._bytes >= BATCH_BYTES:
            # The sender has been woken; until it runs, further entries must not wake it again.
            self._enough = _ALREADY_WOKEN
            self._rung.notify_all()

    def wake_sender(self) -> None:
        """Wake the sender for anything that is not an entry."""
        if self._enough == 1:
            self._enough = _ALREADY_WOKEN
            self._rung.notify_all()

    def end_batch(self) -> None:
        """Wake the sender although its batch is not full, because nothing can be added to it."""
        if self._enough == BATCH_ENTRIES:
            self._enough = _ALREADY_WOKEN
            self._rung.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for an entry or a call of `wake_sender`; return False if neither came in time."""
        self._enough = 1
        return self._rung.wait(timeout_s)

    def wait_for_batch(self) -> None:
        """Wait until a batch is full or its time is over, and begin the next batch."""
        self._enough = BATCH_ENTRIES
        if self._entries < BATCH_ENTRIES and self._bytes < BATCH_BYTES:
            self._rung.wait(BATCH_TIMEOUT_S)
        self._entries = self._bytes = 0
        self._enough = 1


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """An entry of a slab that an accelerator is filling."""

    head: RecordHead
    ring: SendRing
    reservation: SlabReservation
    transfer: DeviceTransfer


# While the agent reads pieces it frees space without a message, so the sender polls.
SPACE_POLL_S = 0.01
_MAX_ITEMS_AT_ONCE = 64


class SendBuffer:
    """Items on their way to the agent; safe to use from several threads.

    `submit` never waits; `place_record` waits for space as long as the wait policy allows.
    """

    def __init__(
        self,
        *,
        on_release: Callable[[BufferedItem], None],
        on_copy_failed: Callable[[RecordHead], None],
        wait_policy: WaitPolicy = WaitPolicy(),
        on_journal: Callable[[EventJournal | None], None] = lambda journal: None,
    ) -> None:
        self.on_release = on_release
        """Called with each item that no longer needs its memory."""
        self._on_copy_failed = on_copy_failed
        self.on_journal = on_journal
        """Called with the journal of each slab that is used, and with None if no
        journal is used.
        """
        self._wait_policy = wait_policy
        self._lock = lock = threading.RLock()
        """The lock of the condition `changed`; it is used directly for each tensor, which is
        faster.
        """
        self.changed = threading.Condition(lock)
        """Notified when an acknowledgement has arrived or the connection has changed."""
        self.batching = BatchingCondition(lock)
        self.items = FrameQueue()
        self._copies: deque[PendingCopy] = deque()
        self._publishing_copies = threading.Lock()
        self.ring: SendRing | None = None
        self.link = LinkState.CONNECTING
        self.closed = False
        """Whether no further items are accepted."""
        self.sender_first = False
        """Whether waiting items found no space, so that training threads must not use free space
        before them.
        """
        self._progress_s = time.monotonic()
        self._released = 0
        self._catching_up = False  # items from before the slab go first; later ones use the heap

    # -- from training threads

    def idle_s(self) -> float:
        """Return the seconds since the agent last accepted something, or since nothing
        was waiting.
        """
        with self.changed:
            if self.ring is not None and self.ring.released != self._released:
                self._released = self.ring.released
                self._progress_s = time.monotonic()
            return time.monotonic() - self._progress_s if self.items.outstanding else 0.0

    @property
    def has_waiting_tensors(self) -> bool:
        """Whether the agent has yet to accept a tensor."""
        with self.changed:
            return self.items.tensors > 0

    def compute_remaining_wait_s(self) -> float:
        """Return how many seconds a tensor may still wait for space; 0 or less if it
        may not wait.
        """
        return self._wait_policy.compute_remaining_s(
            link=self.link, has_tensors=self.has_waiting_tensors, idle_s=self.idle_s()
        )

    def use_wait_policy(self, wait_policy: WaitPolicy) -> None:
        """Use another wait policy from now on."""
        self._wait_policy = wait_policy

    def submit(self, item: StagedRecord | MetadataItem) -> None:
        """Add an item at the end; never blocks."""
        if self.closed:
            return
        with self.changed:
            # Records after a changed plan use the heap until it is sent, because none may overtake
            # it.
            self._catching_up = self._catching_up or isinstance(item, ChangedPlan)
            if not self.items.outstanding:
                self._progress_s = time.monotonic()
            self.items.add(item)
            self.batching.wake_sender()

    def place_record(self, head: RecordHead, source: TensorSource) -> PlacementResult:
        """Copy a tensor into the slab; a failed copy is reported to `on_copy_failed`."""
        ring = self.ring
        if ring is None:
            return PlacementResult.ELSEWHERE
        body = serialize_record_body(head)
        if len(body) + head.kind.byte_count > ring.max_content_bytes:
            return PlacementResult.ELSEWHERE
        while (reservation := self._reserve(ring, body, head)) is None:
            if self.ring is not ring or self._catching_up or self.closed:
                return PlacementResult.ELSEWHERE
            left_s = self.compute_remaining_wait_s()
            if left_s <= 0:
                return PlacementResult.FULL
            with self.changed:
                self.batching.end_batch()
                self.changed.wait(min(left_s, SPACE_POLL_S))
        self._fill(head, ring, reservation, source)
        return PlacementResult.DONE

    def _fill(
        self, head: RecordHead, ring: SendRing, reservation: SlabReservation, source: TensorSource
    ) -> None:
        whole = begun = False
        try:
            accelerator, transfer = source.accelerator(), None
            if accelerator is not None:
                transfer = ring.begin_copy(accelerator, reservation.data)
            if transfer is None:
                source.copy_into(reservation.data)
                whole = True
            else:
                self._copies.append(PendingCopy(head, ring, reservation, transfer))
                begun = True
        except Exception:  # its number is assigned, so the entry must follow without data
            self._on_copy_failed(head)
        finally:
            if not begun:
                self.publish(ring, reservation, whole=whole)

    def _reserve(self, ring: SendRing, body: bytes, head: RecordHead) -> SlabReservation | None:
        items, iteration, data_bytes = self.items, head.iteration, head.kind.byte_count
        with self._lock:
            if self.ring is not ring or self.closed or items.blocks_records or self.sender_first:
                return None
            self._catching_up = False
            sequence = items.last_sequence + 1
            frame = add_sequence(sequence, body)
            reservation = ring.reserve(frame, data_bytes, sequence, iteration)
            if reservation is not None:
                if items.acknowledged == items.last_sequence and not items.waiting:
                    self._progress_s = time.monotonic()
                items.assign_sequence(1, iteration)
            return reservation

    def publish(self, ring: SendRing, reservation: SlabReservation, *, whole: bool) -> None:
        """Publish a reserved entry, with its data or without."""
        ring.publish(reservation, whole=whole)
        with self._lock:
            if self.ring is not ring and not ring.open_entries:
                self.changed.notify_all()
            self.batching.count_entry(len(reservation.data))

    # -- from the sender

    @property
    def has_pending_copies(self) -> bool:
        """Whether an accelerator's copy was not complete at the last poll."""
        return bool(self._copies)

    def publish_finished_copies(self) -> None:
        """Publish the entries whose copies are complete."""
        with self._publishing_copies:
            while self._copies:
                copy = self._copies[0]
                try:
                    whole = copy.transfer.is_done()
                    if not whole:
                        return
                except Exception:  # its number is assigned, so the entry must follow without data
                    self._on_copy_failed(copy.head)
                    whole = False
                self._copies.popleft()
                self.publish(copy.ring, copy.reservation, whole=whole)

    def pop_items(self) -> list[NumberedItem]:
        """Remove a few items that go over the stream; they are held until they are acknowledged."""
        items = self.items
        some = [
            items.numbered.popleft() for _ in range(min(len(items.numbered), _MAX_ITEMS_AT_ONCE))
        ]
        some += [
            items.pop() for _ in range(min(len(items.waiting), _MAX_ITEMS_AT_ONCE - len(some)))
        ]
        items.in_flight.extend(some)
        return some

    def acknowledge(self, sequence: int) -> None:
        """Release the items that the agent has acknowledged."""
        with self.changed:
            before = self.items.acknowledged
            taken = self.items.acknowledge(sequence)
            if self.items.acknowledged > before:
                self._progress_s = time.monotonic()
            self.changed.notify_all()
            self.batching.wake_sender()
        for item in taken:
            self.on_release(item)

    def set_link(self, link: LinkState) -> None:
        """Set the state of the connection."""
        with self.changed:
            self.link = link
            self.changed.notify_all()

    def renew_patience(self) -> None:
        """Restart the waiting time: an agent that was stuck gets the full time again."""
        self._progress_s = time.monotonic()

    def abandon_ring(self) -> None:
        """Abandon the slab; its unacknowledged items are sent first over what replaces it."""
        with self.changed:
            ring, self.ring = self.ring, None
        if ring is not None:
            self.on_journal(None)
            if ring.journal is not None:
                ring.journal.leave()
            # Copies that are not complete are short, and no new ones begin.
            self.wait_for_copies(ring)
            ring.seal(ring.written)
        with self.changed:
            carried: list[NumberedItem] = []
            if ring is not None:
                carried = list(ring.read_unacknowledged(self.items.acknowledged))
                ring.close()
            lost = self.items.requeue_unacknowledged(carried)
        if lost:
            _logger.warning("rankdump: %d tensors were damaged in shared memory", lost)

    def wait_for_copies(self, ring: SendRing, timeout_s: float = math.inf) -> None:
        """Wait until no entry of an abandoned slab is being filled."""
        deadline_s = time.monotonic() + timeout_s
        while ring.open_entries and time.monotonic() < deadline_s:
            self.publish_finished_copies()
            with self.changed:
                if ring.open_entries:
                    self.changed.wait(SPACE_POLL_S)

    def use_ring(self, ring: SendRing) -> None:
        """Send all items through a slab from now on."""
        with self.changed:
            self.ring, self._released = ring, ring.released
            self.sender_first = False
            self._catching_up = self.items.blocks_records
        self.on_journal(ring.journal)
