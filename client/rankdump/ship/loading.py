"""Moves what waits into the slab, in order, one entry at a time; large records in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankdump.contract.errors import RankdumpError
from rankdump.contract.exchange import CallStacks
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.slab_writer import Reservation
from rankdump.ship.depot import Depot
from rankdump.ship.items import Carried, Held, Item, Numbered
from rankdump.ship.ring import Ring
from rankdump.values import Staged
from rankdump.wire.frames import (
    checksum_of,
    chunk_body,
    declaration_frame,
    numbered,
    record_body,
)
from rankdump.wire.v1 import agent_pb2

_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Load:
    """One entry to be made."""

    body: bytes
    """The frame without its number."""
    data: memoryview
    begin: int = 0
    """Where in the record the data begins."""
    whole: bool = True
    cuts: bool = False
    """Whether it is a piece of a larger record."""
    last: bool = True
    """Whether nothing of the item follows."""
    done: Held | None = None
    """What is free with this entry."""
    iteration: int | None = None
    """Of a record."""


class TooLargeError(RankdumpError):
    """An item that is no record and has no room in this slab, however empty."""


class Loader:
    """The sender's hand; safe while the thread of an earlier stream has not ended yet."""

    def __init__(self, depot: Depot, on_taken: Callable[[Held], None]) -> None:
        self._depot = depot
        self._on_taken = on_taken
        self._ready: tuple[Item, int, Load] | None = None

    def load(self, ring: Ring) -> bool:
        """Make one entry; False when nothing waits, or there is no room."""
        with self._depot.changed:
            first = self._first()
        if first is None:
            return False
        # Serialised outside the lock, and once however long it waits for room.
        load = self._load_of(first, ring)
        room = self._reserve(first.item, load, ring)
        if room is None:
            return False
        room.data[:] = load.data
        self._depot.publish(ring, room, whole=load.whole)
        self._ready = None
        if load.done is not None:
            self._on_taken(load.done)
        return True

    def _first(self) -> Numbered | None:
        items = self._depot.items
        if items.numbered:
            return items.numbered[0]
        return Numbered(0, items.waiting[0]) if items.waiting else None

    def _load_of(self, first: Numbered, ring: Ring) -> Load:
        ready = self._ready
        if ready is not None and ready[0] is first.item and ready[1] == first.gone_bytes:
            return ready[2]
        load = load_of(first, ring)
        if not ring.fits(len(load.body), len(load.data)):
            raise TooLargeError(f"a frame of {len(load.body)} bytes has no room in its slab")
        self._ready = first.item, first.gone_bytes, load
        return load

    def _reserve(self, item: Item, load: Load, ring: Ring) -> Reservation | None:
        depot, items = self._depot, self._depot.items
        with depot.changed:
            first = self._first()
            if depot.ring is not ring or first is None or first.item is not item:
                return None
            if first.gone_bytes != load.begin:
                return None
            sequence = first.sequence or items.last + 1
            frame = numbered(sequence, load.body)
            room = ring.reserve(frame, len(load.data), sequence=sequence, iteration=load.iteration)
            depot.sender_first = room is None
            if room is None:
                return None
            ring.copying += 1
            if first.sequence:
                items.numbered.popleft()
            else:
                first = items.pop()
            if load.cuts:
                ring.cut(sequence, room)
                first.gone_bytes += len(load.data)
                # Held until acknowledged: its pieces do not stay in the slab.
                if load.last:
                    items.window.append(first)
                else:
                    items.numbered.appendleft(first)
            else:
                items.keep(first)
            return room


def load_of(each: Numbered, ring: Ring) -> Load:
    """Return the next entry of an item, given what of it is in the slab."""
    item = each.item
    if isinstance(item, Staged):
        data = item.data[: item.head.byte_count]
        body = record_body(item.head)
        if ring.fits(len(body), len(data)):
            return Load(body, data, done=item, iteration=item.head.iteration)
        if not each.gone_bytes:
            body = record_body(item.head, checksum_of(data))
        return _piece(each, body, data, ring, item.head.iteration)
    if isinstance(item, Carried):
        return _load_again(each, item, ring)
    done = item if isinstance(item, (FigureRows, CallStacks)) else None
    return Load(declaration_frame(0, item).SerializeToString(), _EMPTY, done=done)


def _load_again(each: Numbered, item: Carried, ring: Ring) -> Load:
    frame = agent_pb2.Frame()
    frame.CopyFrom(item.frame)
    frame.ClearField("sequence")
    iteration = None
    if frame.HasField("record"):
        iteration = frame.record.iteration
        # It may have been damaged where it lay, so it keeps what it was sealed with.
        frame.record.checksum = item.frame.record.checksum or item.checksum
    body = frame.SerializeToString()
    if not item.whole:
        return Load(body, _EMPTY, whole=False, iteration=iteration)
    if ring.fits(len(body), len(item.data)):
        return Load(body, item.data, iteration=iteration)
    return _piece(each, body, item.data, ring, iteration)


def _piece(
    each: Numbered, body: bytes, data: memoryview, ring: Ring, iteration: int | None
) -> Load:
    begin = each.gone_bytes
    end = min(begin + ring.piece_bytes, len(data))
    return Load(
        body if begin == 0 else chunk_body(begin),
        data[begin:end],
        begin=begin,
        cuts=True,
        last=end == len(data),
        iteration=None if begin else iteration,
    )
