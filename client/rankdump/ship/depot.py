"""Where the training threads leave items and the sender takes them: one lock, and room to wait for.

Knows nothing of gRPC. Copies are made outside the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from rankdump.contract.exchange import Declaration, RecordHead
from rankdump.contract.slab_writer import Reservation
from rankdump.ship.bell import Bell
from rankdump.ship.copies import Copies, Copy
from rankdump.ship.items import Held, Items, Numbered
from rankdump.ship.link import Link
from rankdump.ship.ring import Ring
from rankdump.values import Placing, Staged, TensorSource
from rankdump.wire.frames import numbered, record_body

logger = logging.getLogger(__name__)

# The agent gives room back without a word while it takes in pieces, so it is looked for.
ROOM_POLL_S = 0.01
_AT_ONCE = 64


class Depot:
    """Safe to use from several threads; `submit` never waits, `place` as long as patience lasts."""

    def __init__(
        self, *, on_taken: Callable[[Held], None], on_torn: Callable[[RecordHead], None]
    ) -> None:
        self._on_taken, self._on_torn = on_taken, on_torn
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """Notified when an acknowledgement came or the connection changed."""
        self.bell = Bell(lock)
        self.items = Items()
        self.copies = Copies(self.publish, on_torn)
        """Those that accelerators make on their own."""
        self.ring: Ring | None = None
        self.link = Link.CONNECTING
        self.closed = False
        """Whether nothing is taken any more."""
        self.sender_first = False
        """Whether what waits found no room: whoever fills the slab now would starve it."""
        self._progress_s = time.monotonic()
        self._released = 0
        self._catching_up = False  # what waited for a slab goes first, and is followed on the heap

    # -- from training threads

    def idle_s(self) -> float:
        """Return seconds since the agent last took something, or since nothing was waiting."""
        with self.changed:
            if self.ring is not None and self.ring.released != self._released:
                self._released = self.ring.released
                self._progress_s = time.monotonic()
            return time.monotonic() - self._progress_s if self.items.outstanding else 0.0

    def submit(self, item: Staged | Declaration) -> None:
        """Put an item at the end; never blocks."""
        if self.closed:
            return
        with self.changed:
            if not self.items.outstanding:
                self._progress_s = time.monotonic()
            self.items.add(item)
            self.bell.strike()

    def place(
        self, head: RecordHead, source: TensorSource, patience_s: Callable[[], float]
    ) -> Placing:
        """Copy a tensor straight into the slab; a copy that fails is told to `on_torn`."""
        ring = self.ring
        if ring is None:
            return Placing.ELSEWHERE
        body = record_body(head)
        if not ring.fits(len(body), head.byte_count):
            return Placing.ELSEWHERE
        while (room := self._reserve(ring, body, head)) is None:
            if self.ring is not ring or self._catching_up or self.closed:
                return Placing.ELSEWHERE
            left_s = patience_s()
            if left_s <= 0:
                return Placing.FULL
            with self.changed:
                self.changed.wait(min(left_s, ROOM_POLL_S))
        self._fill(head, ring, room, source)
        return Placing.DONE

    def _fill(self, head: RecordHead, ring: Ring, room: Reservation, source: TensorSource) -> None:
        whole = begun = False
        try:
            transfer = ring.begin_copy(source, room.data)
            if transfer is None:
                source.copy_into(room.data)
                whole = True
            else:
                self.copies.add(Copy(head, ring, room, transfer))
                begun = True
        except Exception:  # told by `on_torn`: the number is given, so the record must follow
            self._on_torn(head)
        finally:
            if not begun:
                self.publish(ring, room, whole=whole)

    def _reserve(self, ring: Ring, body: bytes, head: RecordHead) -> Reservation | None:
        with self.changed:
            if self.ring is not ring or self.closed or self.items.bars_the_way:
                return None
            if self.sender_first:
                return None
            self._catching_up = False
            sequence, iteration = self.items.last + 1, head.iteration
            frame = numbered(sequence, body)
            room = ring.reserve(frame, head.byte_count, sequence=sequence, iteration=iteration)
            if room is not None:
                if not self.items.outstanding:
                    self._progress_s = time.monotonic()
                self.items.number(1, iteration)
                ring.copying += 1
            return room

    def publish(self, ring: Ring, room: Reservation, *, whole: bool) -> None:
        """End an entry that was reserved, with its data or without."""
        ring.publish(room, whole=whole)
        with self.changed:
            ring.copying -= 1
            if not ring.copying and self.ring is not ring:
                self.changed.notify_all()
            self.bell.count(len(room.data))

    # -- from the sender

    def some(self) -> list[Numbered]:
        """Take a few items that go over the stream; they are held until acknowledged."""
        items = self.items
        some = [items.numbered.popleft() for _ in range(min(len(items.numbered), _AT_ONCE))]
        some += [items.pop() for _ in range(min(len(items.waiting), _AT_ONCE - len(some)))]
        items.window.extend(some)
        return some

    def acknowledge(self, sequence: int) -> None:
        """Let go of what the agent has accounted for."""
        with self.changed:
            before = self.items.acknowledged
            taken = self.items.acknowledge(sequence)
            if self.items.acknowledged > before:
                self._progress_s = time.monotonic()
            self.changed.notify_all()
            self.bell.strike()
        for item in taken:
            self._on_taken(item)

    def set_link(self, link: Link) -> None:
        """Note how the connection stands."""
        with self.changed:
            self.link = link
            self.changed.notify_all()

    def renew_patience(self) -> None:
        """Begin to wait anew: even an agent that was stuck gets its time again."""
        self._progress_s = time.monotonic()

    def give_up_ring(self) -> None:
        """Leave the slab; what of it is not accounted for goes first on the way that follows."""
        with self.changed:
            ring, self.ring = self.ring, None
        if ring is not None:
            # Copies under way are short, and nothing new begins.
            self.settle(ring)
            ring.seal(ring.written)
        with self.changed:
            carried: list[Numbered] = []
            if ring is not None:
                carried = list(ring.rest(self.items.acknowledged))
                ring.close()
            lost = self.items.send_again(carried)
        if lost:
            logger.warning("rankdump: %d tensors were damaged in shared memory", lost)

    def settle(self, ring: Ring, timeout_s: float = math.inf) -> None:
        """Wait until nobody fills an entry of a slab that was given up."""
        deadline_s = time.monotonic() + timeout_s
        while ring.copying and time.monotonic() < deadline_s:
            self.copies.finish()
            with self.changed:
                if ring.copying:
                    self.changed.wait(ROOM_POLL_S)

    def take_ring(self, ring: Ring) -> None:
        """Send everything through a slab from now on."""
        with self.changed:
            self.ring, self._released = ring, ring.released
            self.sender_first = False
            self._catching_up = self.items.bars_the_way
