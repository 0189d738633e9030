"""Requests of one connection after its hello: frames, or doorbells for the shared-memory ring. The
ring is filled here, in order and with large records in pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rankdump._core.record import StatisticRows
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._core.session_protocol import CallStacks
from rankdump._shm.slab_ring import SlabReservation
from rankdump._transport.frame_queue import (
    COPY_FAILED,
    BufferedItem,
    NumberedItem,
    QueuedItem,
    RecoveredEntry,
    make_lost_frame,
)
from rankdump._transport.send_buffer import BATCH_ENTRIES, SPACE_POLL_S, SendBuffer
from rankdump._transport.send_ring import SendRing
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.frames import (
    add_sequence,
    batch_frames,
    compute_checksum,
    make_metadata_frame,
    make_record_frames,
    serialize_chunk_body,
    serialize_record_body,
    split_frame,
)
from rankdump.errors import RankdumpError
from rankdump.wire.v1 import agent_pb2

_NO_DATA = memoryview(b"")


@dataclass(frozen=True, slots=True)
class RingEntry:
    """An entry that is to be put into the ring."""

    body: bytes
    """The serialized frame without its sequence number."""
    data: memoryview
    begin: int = 0
    """Offset of the entry's data in its record, in bytes."""
    whole: bool = True
    is_piece: bool = False
    """Whether the entry is a piece of a larger record."""
    last: bool = True
    """Whether the entry is the last one of its item."""
    freed_item: BufferedItem | None = None
    """Item whose memory can be freed after this entry; None if there is none."""
    iteration: int | None = None
    """Iteration of a record; None for other frames."""


class FrameTooLargeError(RankdumpError):
    """An item that is not a record does not fit into the slab, even if the slab is empty."""


class RingLoader:
    """Puts items into the ring; safe to use while the thread of an earlier stream has not ended
    yet.
    """

    def __init__(self, buffer: SendBuffer) -> None:
        self._buffer = buffer
        self._ready: tuple[QueuedItem, int, RingEntry] | None = None

    def load(self, ring: SendRing) -> bool:
        """Put one entry into the ring; return False if nothing waits or there is no space."""
        with self._buffer.changed:
            first = self._first()
        if first is None:
            return False
        # The entry is serialized outside of the lock, and only once, however long it waits for
        # space.
        entry = self._serialize(first, ring)
        reservation = self._reserve(first.item, entry, ring)
        if reservation is None:
            return False
        reservation.data[:] = entry.data
        self._buffer.publish(ring, reservation, whole=entry.whole)
        self._ready = None
        if entry.freed_item is not None:
            self._buffer.on_release(entry.freed_item)
        return True

    def _first(self) -> NumberedItem | None:
        items = self._buffer.items
        if items.numbered:
            return items.numbered[0]
        return NumberedItem(0, items.waiting[0]) if items.waiting else None

    def _serialize(self, first: NumberedItem, ring: SendRing) -> RingEntry:
        ready = self._ready
        if ready is not None and ready[0] is first.item and ready[1] == first.loaded_bytes:
            return ready[2]
        entry = make_ring_entry(first, ring)
        if len(entry.body) + len(entry.data) > ring.max_content_bytes:
            raise FrameTooLargeError(
                f"a frame of {len(entry.body)} bytes does not fit into the slab"
            )
        self._ready = first.item, first.loaded_bytes, entry
        return entry

    def _reserve(
        self, item: QueuedItem, entry: RingEntry, ring: SendRing
    ) -> SlabReservation | None:
        buffer, items = self._buffer, self._buffer.items
        with buffer.changed:
            first = self._first()
            if buffer.ring is not ring or first is None or first.item is not item:
                return None
            if first.loaded_bytes != entry.begin:
                return None
            sequence = first.sequence or items.last_sequence + 1
            frame = add_sequence(sequence, entry.body)
            reservation = ring.reserve(
                frame, len(entry.data), sequence=sequence, iteration=entry.iteration
            )
            buffer.sender_first = reservation is None
            if reservation is None:
                return None
            if first.sequence:
                items.numbered.popleft()
            else:
                first = items.pop()
            if entry.is_piece:
                ring.note_cut_record(sequence, reservation)
                first.loaded_bytes += len(entry.data)
                # The item is held until it is acknowledged, because its pieces do not stay in the
                # slab.
                if entry.last:
                    items.in_flight.append(first)
                else:
                    items.numbered.appendleft(first)
            else:
                items.retain_metadata(first)
            return reservation


def make_ring_entry(each: NumberedItem, ring: SendRing) -> RingEntry:
    """Return the next entry of an item, after the bytes that are in the slab already."""
    item = each.item
    if isinstance(item, StagedRecord):
        data = item.data[: item.head.byte_count]
        body = serialize_record_body(item.head)
        if len(body) + len(data) <= ring.max_content_bytes:
            return RingEntry(body, data, freed_item=item, iteration=item.head.iteration)
        if not each.loaded_bytes:
            body = serialize_record_body(item.head, compute_checksum(data))
        return _make_piece_entry(each, body, data, ring, item.head.iteration)
    if isinstance(item, RecoveredEntry):
        return _make_resent_entry(each, item, ring)
    done = item if isinstance(item, (StatisticRows, CallStacks)) else None
    return RingEntry(make_metadata_frame(0, item).SerializeToString(), _NO_DATA, freed_item=done)


def _make_resent_entry(each: NumberedItem, item: RecoveredEntry, ring: SendRing) -> RingEntry:
    frame = agent_pb2.Frame()
    frame.CopyFrom(item.frame)
    frame.ClearField("sequence")
    iteration = None
    if frame.HasField("record"):
        iteration = frame.record.iteration
        # The data may have been damaged in the old slab, so the frame keeps the digest of the seal.
        frame.record.checksum = item.frame.record.checksum or item.checksum
    body = frame.SerializeToString()
    if not item.whole:
        return RingEntry(body, _NO_DATA, whole=False, iteration=iteration)
    if len(body) + len(item.data) <= ring.max_content_bytes:
        return RingEntry(body, item.data, iteration=iteration)
    return _make_piece_entry(each, body, item.data, ring, iteration)


def _make_piece_entry(
    each: NumberedItem, body: bytes, data: memoryview, ring: SendRing, iteration: int | None
) -> RingEntry:
    begin = each.loaded_bytes
    end = min(begin + ring.piece_bytes, len(data))
    return RingEntry(
        body if begin == 0 else serialize_chunk_body(begin),
        data[begin:end],
        begin=begin,
        is_piece=True,
        last=end == len(data),
        iteration=None if begin else iteration,
    )


TICK_S = 0.5


class PushStream:
    """Requests of the present stream; a stream that was replaced ends by itself."""

    def __init__(
        self, buffer: SendBuffer, outbox: StepOutbox | None, *, on_tick: Callable[[], None]
    ) -> None:
        """`on_tick` is called about every TICK_S seconds, whether there is anything to send or not.
        `outbox` has the steps of the black box, if there is one.
        """
        self._buffer, self._outbox = buffer, outbox
        if outbox is not None:
            outbox.on_news = self._wake_sender
        self._loader = RingLoader(buffer)
        self._on_tick = on_tick
        self._ticked_s = 0.0
        self._stream = 0
        self.closing = False
        """Whether the stream ends as soon as nothing waits."""

    def begin_stream(self) -> int:
        """End the present stream; return the number of a new one."""
        with self._buffer.changed:
            self.end_stream()
            return self._stream

    def end_stream(self) -> None:
        """End the present stream."""
        with self._buffer.changed:
            self._stream += 1
            self.wake()

    def wake(self) -> None:
        """Wake all waiting threads; the caller holds the lock."""
        self._buffer.changed.notify_all()
        self._buffer.batching.wake_sender()

    def requests(self, stream: int) -> Iterator[agent_pb2.PushRequest]:
        """Yield requests as items arrive, until another stream replaces this one."""
        ring = self._buffer.ring
        if ring is None:
            while (some := self._next(stream)) is not None:
                yield from self._take_beside(stream)
                yield from batch_frames(frame for each in some for frame in make_frames(each))
            return
        rung = 0
        while (written := self._next_doorbell(stream, ring, rung)) is not None:
            yield from self._take_beside(stream)
            if written != rung:
                rung = written
                yield agent_pb2.PushRequest(doorbell=agent_pb2.Doorbell(written=written))

    def _next(self, stream: int) -> list[NumberedItem] | None:
        """Wait for items that go over the stream; return None when the stream ends."""
        while True:
            self._tick()
            with self._buffer.changed:
                if self._stream != stream:
                    return None
                # Only a few items are taken at a time, so that a long backlog does not hold the
                # lock.
                some = self._buffer.pop_items()
                if some or self._has_beside:
                    return some
                if self.closing:
                    return None
                self._buffer.batching.wait(TICK_S)

    def _next_doorbell(self, stream: int, ring: SendRing, rung: int) -> int | None:
        """Wait for entries of the slab; return its new position, or None when the stream ends."""
        buffer = self._buffer
        while True:
            self._tick()
            for _ in range(BATCH_ENTRIES):
                if self._stream != stream or not self._loader.load(ring):
                    break
            buffer.publish_finished_copies()
            with buffer.changed:
                if self._stream != stream or buffer.ring is not ring:
                    return None
                if ring.written == rung and self._has_beside:
                    return rung
                if ring.written == rung:
                    busy = buffer.items.has_unsent or buffer.has_pending_copies
                    if self.closing and not busy:
                        return None
                    buffer.batching.wait(SPACE_POLL_S if busy else TICK_S)
                    continue
                if not self.closing:
                    buffer.batching.wait_for_batch()
            # Entries are sealed here, where no training thread waits for it.
            written = ring.written
            ring.seal(written)
            return written

    @property
    def _has_beside(self) -> bool:
        return self._outbox is not None and self._outbox.has_waiting

    def _take_beside(self, stream: int) -> Iterator[agent_pb2.PushRequest]:
        if self._outbox is not None:
            for request in self._outbox.take_requests(stream):
                yield request
                if self.closing:
                    # The agent is receiving data, although it acknowledges nothing.
                    self._buffer.renew_patience()

    def _wake_sender(self) -> None:
        with self._buffer.changed:
            self._buffer.batching.wake_sender()

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            self._on_tick()


def make_frames(each: NumberedItem) -> Iterator[agent_pb2.Frame]:
    """Yield the frames of an item for the stream."""
    item = each.item
    if isinstance(item, StagedRecord):
        return make_record_frames(each.sequence, item.head, item.data)
    if not isinstance(item, RecoveredEntry):
        return iter((make_metadata_frame(each.sequence, item),))
    if item.whole:
        return split_frame(item.frame, item.data, item.checksum)
    # The bytes of the record never came, so its loss is sent.
    return iter(
        (make_lost_frame(each.sequence, item.frame.record.iteration, item.tensors, COPY_FAILED),)
    )
