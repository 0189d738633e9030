"""The journal of a slab: what a rank wrote is read as it was, or not at all."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.event_lists import list_events

from rankdump._core.events import OPEN_END_POSITION, CallOutcome, EventKind, ProcessGroup, RankEvent
from rankdump._core.recorder_protocol import CollectiveCall, StartedEvent
from rankdump._shm.event_journal import EventJournal, read_journal
from rankdump._shm.slab_format import (
    JOURNAL_BYTES,
    JOURNAL_SLOTS,
    JOURNAL_TEXT_BYTES,
    SlabMemory,
    compute_slab_bytes,
    format_slab,
)
from rankdump._shm.slab_ring import SlabReader, SlabWriter

WORLD = ProcessGroup("world", (0, 1, 7))
NAMES = ["Default/Add-op1", "", "Größe", "\udc80"]
CALLS = [
    None,
    CollectiveCall(EventKind.ALL_REDUCE, WORLD, 3, 8, "float32"),
    CollectiveCall(EventKind.RECV, ProcessGroup("p2p", ()), 0, peer=1),
]


class JournalRig:
    """A journal in memory, and the events that it should have."""

    def __init__(self) -> None:
        self.slab = memoryview(bytearray(compute_slab_bytes(0, has_journal=True)))
        format_slab(self.slab, has_journal=True)
        self.memory = self.slab[-JOURNAL_BYTES:]
        self.journal = EventJournal(self.memory)
        self.expected: dict[int, RankEvent] = {}

    def add(self, position: int, name: str, call: CollectiveCall | None) -> StartedEvent:
        begun = StartedEvent(position, 1000 + position, 2, name, call, 5)
        self.journal.add_event(begun, 4)
        event = RankEvent(
            2, 4, position, OPEN_END_POSITION, name, EventKind.OPERATOR, begun.start_us, 0
        )
        event = replace(event, end_us=event.start_us)
        if call is not None:
            event = replace(
                event,
                kind=call.kind,
                group=call.group.name,
                sequence=call.sequence,
                element_count=call.element_count,
                dtype=call.dtype,
                peer=call.peer,
                stall_us=5,
            )
        self.expected[position] = event
        return begun

    def end(self, begun: StartedEvent, outcome: CallOutcome) -> None:
        self.journal.end_event(begun, begun.position + 2, 9000, outcome)
        self.expected[begun.position] = replace(
            self.expected[begun.position],
            end_position=begun.position + 2,
            end_us=9000,
            outcome=outcome,
        )

    def read(self) -> list[RankEvent] | None:
        events = read_journal(SlabMemory(self.slab))
        return None if events is None else list_events(events)

    def list_newest(self) -> list[RankEvent]:
        newest = sorted(self.expected)[-JOURNAL_SLOTS:]
        return [self.expected[position] for position in newest]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(CALLS),
        st.none() | st.sampled_from(CallOutcome),
    ),
    max_size=40,
)


@given(EVENTS)
def test_journal_is_read_as_it_was_written(events):
    """Every event is there, open or complete, with all its fields."""
    rig = JournalRig()
    for position, (name, call, outcome) in enumerate(events, 1):
        begun = rig.add(position, name, call)
        if outcome is not None:
            rig.end(begun, outcome)
    assert rig.read() == rig.list_newest()


def test_journal_keeps_the_newest_events():
    """An old event gives its slot to a new one, and its end does not reach the new one."""
    rig = JournalRig()
    first = rig.add(1, "first", None)
    for position in range(2, JOURNAL_SLOTS + 2):
        rig.add(position, f"Op{position % 50}", None)
    rig.journal.end_event(first, 99_999, 1)
    rig.journal.rename_event(first, "other", None)
    assert rig.read() == rig.list_newest()


def test_journal_keeps_the_texts_of_its_newest_events():
    """Texts that are longer than their space: what is read has its own name, the newest is there.

    The short name was written long before, and is written again before it would be gone.
    """
    rig = JournalRig()
    count = 3 * JOURNAL_TEXT_BYTES // 4000
    for number in range(1, count + 1):
        rig.add(2 * number - 1, "same", None)
        rig.add(2 * number, f"{number:04}" * 1000, CALLS[1])
    found = rig.read()
    assert found is not None
    assert found == [rig.expected[event.position] for event in found]
    newest = 2 * (JOURNAL_TEXT_BYTES // 2 // 4100)
    assert found[-newest:] == rig.list_newest()[-newest:]


def test_journal_of_a_name_that_does_not_fit_counts_as_left():
    """A journal with a gap at its end must not count as the last events of a rank."""
    rig = JournalRig()
    rig.add(1, "Op", None)
    rig.add(2, "x" * JOURNAL_TEXT_BYTES, None)
    assert rig.read() is None


def test_journal_is_read_while_it_is_current_only():
    """A slab that no rank has used has no last events, and neither has one that was left."""
    slab = memoryview(bytearray(compute_slab_bytes(0, has_journal=True)))
    format_slab(slab, has_journal=True)
    assert read_journal(SlabMemory(slab)) is None
    rig = JournalRig()
    assert rig.read() == []
    rig.add(1, "Op", None)
    rig.journal.leave()
    assert rig.read() is None


def test_slab_without_a_journal_has_no_last_events():
    slab = memoryview(bytearray(compute_slab_bytes(0)))
    format_slab(slab)
    assert not SlabWriter(slab).has_journal
    assert read_journal(SlabMemory(slab)) is None


@given(
    st.integers(0, JOURNAL_BYTES - 1) | st.integers(0, 64 + 64 * 8) | st.integers(524_352, 524_800),
    st.binary(min_size=1, max_size=80),
)
def test_damaged_journal_gives_no_other_names(at, damage):
    """What cannot be read is left out; names and groups are those that were written."""
    rig = JournalRig()
    for position in range(1, 8):
        rig.add(position, NAMES[position % 2], CALLS[position % 3])
    rig.memory[at : at + len(damage)] = damage[: JOURNAL_BYTES - at]
    for event in rig.read() or []:
        assert event.name in NAMES
        assert event.group in ("", "world", "p2p")
        assert 0 < event.position < OPEN_END_POSITION


@pytest.mark.parametrize("written", range(0, 56, 8))
def test_slot_of_a_dying_process_is_left_out(written):
    """A process may be killed between any two numbers of a slot that it uses again."""
    rig = JournalRig()
    rig.add(1, "Op", None)
    slot = rig.memory[64 + 64 : 64 + 128]
    rig.add(1 + JOURNAL_SLOTS, "Op", None)
    complete = bytes(slot)
    slot[:] = bytes(written) + struct.pack("<Q", 1)[: 8 * (written > 0)].ljust(64 - written, b"\0")
    slot[:written] = complete[:written]
    assert rig.read() == []


def test_ring_and_journal_of_a_slab_do_not_overlap():
    """A ring that is filled to its end leaves the journal as it is."""
    rig = JournalRig()
    writer = SlabWriter(rig.slab)
    rig.add(1, "Op", CALLS[1])
    while (reservation := writer.reserve(b"frame", 1000)) is not None:
        reservation.data[:] = b"\xff" * 1000
        writer.commit(reservation)
    assert sum(1 for _ in SlabReader(SlabMemory(rig.slab)).read_entries()) > 50
    assert rig.read() == rig.list_newest()
