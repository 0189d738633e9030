"""What one connection says after its hello: doorbells for the slab, or the frames themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rankdump.ship.bell import BATCH_ENTRIES
from rankdump.ship.depot import ROOM_POLL_S, Depot
from rankdump.ship.items import COPY_FAILED, Carried, Held, Numbered, lost
from rankdump.ship.loading import Loader
from rankdump.ship.ring import Ring
from rankdump.values import Staged
from rankdump.wire.frames import batches, declaration_frame, filled_frames, record_frames
from rankdump.wire.v1 import agent_pb2

TICK_S = 0.5


class Outgoing:
    """The requests of the present stream; one that was replaced ends itself."""

    def __init__(
        self, depot: Depot, *, on_taken: Callable[[Held], None], on_tick: Callable[[], None]
    ) -> None:
        """`on_tick` is called about every TICK_S, whatever there is to say."""
        self._depot = depot
        self._loader = Loader(depot, on_taken)
        self._on_tick = on_tick
        self._ticked_s = 0.0
        self._stream = 0
        self.closing = False
        """Whether a stream ends when nothing waits any more."""

    def begin_stream(self) -> int:
        """Return the number of a new stream; an earlier one is over."""
        with self._depot.changed:
            self.end_stream()
            return self._stream

    def end_stream(self) -> None:
        """Let the present stream say nothing more."""
        with self._depot.changed:
            self._stream += 1
            self.wake()

    def wake(self) -> None:
        """Let everybody look again; under the lock."""
        self._depot.changed.notify_all()
        self._depot.bell.strike()

    def requests(self, stream: int) -> Iterator[agent_pb2.PushRequest]:
        """Yield what is to be said, as it comes, until this stream is no longer the present one."""
        ring = self._depot.ring
        if ring is None:
            while (some := self._next(stream)) is not None:
                yield from batches(frame for each in some for frame in frames_of(each))
            return
        rung = 0
        while (written := self._next_doorbell(stream, ring, rung)) is not None:
            rung = written
            yield agent_pb2.PushRequest(doorbell=agent_pb2.Doorbell(written=written))

    def _next(self, stream: int) -> list[Numbered] | None:
        """Wait for items that go over the stream; None when it has nothing more to say."""
        while True:
            self._tick()
            with self._depot.changed:
                if self._stream != stream:
                    return None
                # A few at a time, so that a long backlog does not hold the lock.
                some = self._depot.some()
                if some or self.closing:
                    return some or None
                self._depot.bell.wait(TICK_S)

    def _next_doorbell(self, stream: int, ring: Ring, rung: int) -> int | None:
        """Wait for entries of the slab; None when there are none to come."""
        depot = self._depot
        while True:
            self._tick()
            self._load(stream, ring)
            depot.copies.finish()
            with depot.changed:
                if self._stream != stream or depot.ring is not ring:
                    return None
                if ring.written == rung:
                    busy = depot.items.unsent or depot.copies.any
                    if self.closing and not busy:
                        return None
                    depot.bell.wait(ROOM_POLL_S if busy else TICK_S)
                    continue
                if not self.closing:
                    depot.bell.gather()
            # Here, because no training thread waits for it.
            written = ring.written
            ring.seal(written)
            return written

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            self._on_tick()

    def _load(self, stream: int, ring: Ring) -> None:
        for _ in range(BATCH_ENTRIES):
            if self._stream != stream or not self._loader.load(ring):
                return


def frames_of(each: Numbered) -> Iterator[agent_pb2.Frame]:
    """Yield an item as it goes over the stream."""
    item = each.item
    if isinstance(item, Staged):
        return record_frames(each.sequence, item.head, item.data)
    if not isinstance(item, Carried):
        return iter((declaration_frame(each.sequence, item),))
    if item.whole:
        return filled_frames(item.frame, item.data, item.checksum)
    # A record whose bytes never came.
    return iter((lost(each.sequence, item.frame.record.iteration, item.tensors, COPY_FAILED),))
