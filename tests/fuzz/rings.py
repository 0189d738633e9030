"""Targets for a slab in its file, processed by the agent's own intake: a ring with doorbells, and
the journal of a rank that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.input_pieces import chosen
from fuzz.streams import MOST_RECORD_BYTES, PLANS, REQUEST, settle, slab_of, told

from rankdump._core.plan import DumpPlan
from rankdump._shm.slab_format import (
    JOURNAL_BYTES,
    JOURNAL_SLOTS,
    JOURNAL_TEXT_BYTES,
    compute_slab_bytes,
    format_slab,
)
from rankdump.errors import RankdumpError
from rankdumpd.agent.commit.committer import compute_cost_bytes
from rankdumpd.agent.ingress.session_intake import FailureCounter, SessionIntake
from rankdumpd.agent.limits.admission import ResourcePolicy, ResourceUsage
from rankdumpd.agent.limits.usage import QueueBudget
from rankdumpd.agent.records import ReceivedRecord, load_elements
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.shm.ring_reader import RingReader
from rankdumpd.agent.shm.slab_file import SlabFile

_ROOM = ResourceUsage(ResourcePolicy(MOST_RECORD_BYTES))
_MOST_BELLS = 8
_NO_LIMIT = 1 << 62
"""Nobody would make room for who waits: there is one thread."""


class _RingSession:
    """A session with its intake; received frames are committed on request."""

    def __init__(self, plan: DumpPlan) -> None:
        self.session = RankSession(REQUEST, plan)
        self.budget = QueueBudget(_NO_LIMIT)
        self._taken: list[Any] = []
        self._cost = 0
        rooms: Any = self
        self.intake = SessionIntake(
            self.session,
            budget=self.budget,
            workers=rooms,
            committer=rooms,
            look_up_usage=lambda: _ROOM,
            failures=FailureCounter(),
        )

    def submit(self, items: Sequence[Any], beside: Any) -> None:
        """Take records with their storage, as workers do, or frames with their cost."""
        self._taken += items
        self._cost += beside if isinstance(beside, int) else sum(map(_cost_of, items))

    def settle(self) -> None:
        """Read elements as workers do, then commit, give space back and acknowledge."""
        taken, self._taken = self._taken, []
        for item in taken:
            if isinstance(item, ReceivedRecord):
                assert len(load_elements(item.data)) == item.head.byte_count
        settle(self.session, taken)
        self.budget.release(self._cost, items=len(taken))
        self._cost = 0
        self.session.acknowledge()


def _cost_of(parcel: ReceivedRecord) -> int:
    return compute_cost_bytes(parcel.head.byte_count)


def _read(rooms: _RingSession, read: Callable[[], object]) -> None:
    """Take something in; a fault in it ends the stream, and what came before it counts."""
    try:
        read()
    except RankdumpError:
        pass
    finally:
        rooms.settle()


def _file_of(content: memoryview) -> SlabFile:
    """Return a slab in a file of memory, which costs no disk."""
    descriptor = os.memfd_create("rankdump-fuzz")
    os.pwrite(descriptor, content, 0)
    return SlabFile(Path("ring.slab"), descriptor)


def rings(data: bytes) -> None:
    """A slab that holds anything, and bells that announce anything; then its rank is gone.

    The input is the number of bells, they, and a slab as that of `slabs`.
    """
    which, rest = chosen(data, len(PLANS))
    count, rest = chosen(rest, _MOST_BELLS + 1)
    bells = [int.from_bytes(rest[at : at + 8], "little") for at in range(0, 8 * count, 8)]
    slab = _file_of(slab_of(rest[8 * count :]))
    rooms = _RingSession(PLANS[which])
    ring = RingReader(slab, rooms.intake, acknowledged=0, add_finding=rooms.session.add_finding)
    rooms.session.attach_ring(ring)
    for bell in bells:
        _read(rooms, partial(ring.read, bell))
    _read(rooms, ring.read_remains)
    rooms.session.attach_ring(None)
    ring.give_up()
    slab.close()
    assert (rooms.budget.items, rooms.budget.used_bytes) == (0, 0)
    told(rooms.session)


_SLOT_BYTES = 64


def journal_of(data: bytes) -> memoryview:
    """Return a slab with an empty ring and a journal.

    The input is state and end of the texts, the number of slots, they, each in the place of its
    position, and the texts.
    """
    memory = memoryview(bytearray(compute_slab_bytes(0, has_journal=True)))
    format_slab(memory, has_journal=True)
    journal = memory[-JOURNAL_BYTES:]
    head, rest = data[:16], data[16:]
    journal[: len(head)] = head
    count, rest = chosen(rest, 256)
    for at in range(0, count * _SLOT_BYTES, _SLOT_BYTES):
        slot = rest[at : at + _SLOT_BYTES]
        place = 64 + int.from_bytes(slot[:8], "little") % JOURNAL_SLOTS * _SLOT_BYTES
        journal[place : place + len(slot)] = slot
    texts = rest[count * _SLOT_BYTES :][:JOURNAL_TEXT_BYTES]
    begin = 64 + JOURNAL_SLOTS * _SLOT_BYTES
    journal[begin : begin + len(texts)] = texts
    return memory


def journals(data: bytes) -> None:
    """A journal that holds anything, of a rank that is gone; what is read goes in as a frame."""
    which, rest = chosen(data, len(PLANS))
    slab = _file_of(journal_of(rest))
    rooms = _RingSession(PLANS[which])
    ring = RingReader(slab, rooms.intake, acknowledged=0, add_finding=rooms.session.add_finding)
    _read(rooms, ring.read_remains)
    _read(rooms, ring.read_journal)
    ring.give_up()
    slab.close()
    assert (rooms.budget.items, rooms.budget.used_bytes) == (0, 0)
    told(rooms.session)
