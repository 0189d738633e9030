"""Journal of a slab: the newest events of a rank, written as they happen, so that the agent can
read them when the process has ended. Pure: works on any buffer or store. The journal follows the
ring in a slab of version 3:

     0  state, `text_end`: bytes ever appended to the texts
    64  the slots, 64 bytes each: the event at position p is in slot p modulo the number of slots
        the texts, circular: byte t of all bytes ever appended is at t modulo the area's length

A slot has its position twice, before and after the fields that are written at the start of an
event, so that a slot that a dying process was writing is recognised. `text_end` rises before bytes
are overwritten. A text that lies further back than the area is long has been overwritten, and the
events that refer to it are lost.
"""

from __future__ import annotations

import struct
import threading
import zlib
from array import array
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from rankdump._core.events import (
    OPEN_END_POSITION,
    CallOutcome,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
)
from rankdump._core.recorder_protocol import CollectiveCall, StartedEvent
from rankdump._shm.slab_format import (
    JOURNAL_BYTES,
    JOURNAL_SLOTS,
    JOURNAL_TEXT_BYTES,
    RING_OFFSET,
    SLAB_HEADER_BYTES,
    SlabStore,
    parse_slab_header,
)
from rankdump.errors import CorruptedError


class JournalState(IntEnum):
    """State of a journal."""

    UNUSED = 0
    CURRENT = 1
    """The journal has the newest events of its rank."""
    LEFT = 2
    """The rank has left the journal: its newer events are elsewhere."""


_STATE, _TEXT_END = 0, 1
_SLOTS_OFFSET = 64
# Fields of a slot: position, end position, start, text, iteration, graph, outcome, end, position.
# The end is written when the event ends, so it is not packed at the start.
_SLOT = struct.Struct("@qqqqqIIq")
_SLOT_BYTES = 64
_SLOT_TYPE = np.dtype(
    [
        ("position", "<u8"),
        ("end_position", "<u8"),
        ("start_us", "<i8"),
        ("text", "<u8"),
        ("iteration", "<u8"),
        ("graph", "<u4"),
        ("outcome", "<u4"),
        ("position_again", "<u8"),
        ("end_us", "<i8"),
    ]
)
_SLOT_MASK = JOURNAL_SLOTS - 1
_END_POSITION, _TEXT, _END_US = 1, 3, 7
_OUTCOME = 11
"""Index of the outcome in a slot, in units of four bytes."""
_TEXT_OFFSET = _SLOTS_OFFSET + JOURNAL_SLOTS * _SLOT_BYTES
_TEXT_HEAD = struct.Struct("<II")
"""Head of a text: length and checksum of the bytes that follow."""
_CALL = struct.Struct("<BxHHiQQQQ")
"""Head of the text of a collective: kind, lengths of the element type and of the source, peer,
number, elements, stall, and place of the group's text. Element type, source and name follow. The
text of an operator is one byte for the kind, and its name.
"""
_OPERATOR_MARK = bytes((EventKind.OPERATOR,))
_GROUP = struct.Struct("<I")
"""Head of the text of a group: length of the name. The name follows, and then the ranks as numbers
of four bytes.
"""
_MAX_TEXT_BYTES = JOURNAL_TEXT_BYTES // 8
_MAX_KNOWN_NAMES = 1 << 16
_NUMBER_LIMIT = 1 << 63


class EventJournal:
    """Writer of a journal, on the rank's side; safe to use from several threads.

    No method raises: after a failure the journal counts as left.
    """

    def __init__(self, memory: memoryview) -> None:
        """Take over the journal of a slab that no other rank has used."""
        self._numbers = memory[:_SLOTS_OFFSET].cast("q")
        self._slots = memory[_SLOTS_OFFSET:_TEXT_OFFSET]
        self._slot_numbers = self._slots.cast("q")
        self._slot_outcomes = self._slots.cast("I")
        self._texts = memory[_TEXT_OFFSET : _TEXT_OFFSET + JOURNAL_TEXT_BYTES]
        self._pack_into = _SLOT.pack_into
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        """Places in the texts of the names of operators."""
        self._groups: dict[ProcessGroup, int] = {}
        self._text_end = self._numbers[_TEXT_END]
        self._fresh_from = 0
        """Texts from this place on may be referred to again, because they will outlive the new
        slot.
        """
        self._numbers[_STATE] = JournalState.CURRENT

    def leave(self) -> None:
        """Note that newer events of the rank are elsewhere."""
        self._numbers[_STATE] = JournalState.LEFT

    # These methods run for every event of a job, so they make no further call if the name is known.

    def add_event(self, begun: StartedEvent, iteration: int) -> None:
        """Add an event that has started."""
        position = begun.position
        try:
            text = self._known.get(begun.name, -1)
            if text < self._fresh_from or begun.collective is not None:
                text = self._append_event(begun.name, begun.collective, begun.stall_us)
            self._pack_into(
                self._slots,
                (position & _SLOT_MASK) << 6,
                position,
                OPEN_END_POSITION,
                begun.start_us,
                text,
                iteration,
                begun.graph,
                0,
                position,
            )
        except Exception:  # such as a number or a name that does not fit
            self.leave()

    def end_event(
        self, begun: StartedEvent, end_position: int, end_us: int, outcome: int = 0
    ) -> None:
        """Note that an event is complete, if its slot has not been reused."""
        position, numbers = begun.position, self._slot_numbers
        at = (position & _SLOT_MASK) << 3
        try:
            if numbers[at] == position:
                if outcome:
                    self._slot_outcomes[2 * at + _OUTCOME] = outcome
                numbers[at + _END_US] = end_us
                numbers[at + _END_POSITION] = end_position
        except Exception:  # such as a number that does not fit
            self.leave()

    def rename_event(self, begun: StartedEvent, name: str, call: CollectiveCall | None) -> None:
        """Set the name and the collective of an event that were not known at its start."""
        try:
            at = (begun.position & _SLOT_MASK) << 3
            if self._slot_numbers[at] == begun.position:
                self._slot_numbers[at + _TEXT] = self._append_event(name, call, begun.stall_us)
        except Exception:  # such as a name that does not fit
            self.leave()

    def _append_event(self, name: str, call: CollectiveCall | None, stall_us: int) -> int:
        spelled = name.encode(errors="surrogatepass")
        with self._lock:
            if call is None:
                if len(self._known) >= _MAX_KNOWN_NAMES:
                    self._known.clear()
                text = self._known[name] = self._append(_OPERATOR_MARK + spelled)
                return text
            dtype = call.dtype.encode(errors="surrogatepass")
            source = call.source.encode(errors="surrogatepass")
            group = self._groups.get(call.group, -1)
            if group < self._fresh_from:
                group = self._groups[call.group] = self._append(_spell_group(call.group))
            head = _CALL.pack(
                call.kind,
                len(dtype),
                len(source),
                call.peer,
                call.sequence,
                call.element_count,
                stall_us,
                group,
            )
            return self._append(head + dtype + source + spelled)

    def _append(self, content: bytes) -> int:
        """Append a text; return its place. The caller holds the lock."""
        total = _TEXT_HEAD.size + len(content)
        if total > _MAX_TEXT_BYTES:
            raise ValueError(f"a text of {total} bytes, at most {_MAX_TEXT_BYTES}")
        place = self._text_end
        offset = place % JOURNAL_TEXT_BYTES
        if offset + total > JOURNAL_TEXT_BYTES:
            # A text never wraps around the end of the area.
            place, offset = place + JOURNAL_TEXT_BYTES - offset, 0
        self._text_end = self._numbers[_TEXT_END] = place + total
        head = _TEXT_HEAD.pack(len(content), zlib.crc32(content))
        self._texts[offset : offset + total] = head + content
        # Half of the area is for the texts that are appended while a slot refers to this one.
        self._fresh_from = max(0, self._text_end - JOURNAL_TEXT_BYTES // 2)
        return place


def _spell_group(group: ProcessGroup) -> bytes:
    name = group.name.encode(errors="surrogatepass")
    ranks = array("I", group.ranks).tobytes()
    if len(name) + len(ranks) > _MAX_TEXT_BYTES // 2:
        # The ranks are left out if there are too many: other members, and batches of events, have
        # them.
        ranks = b""
    return _GROUP.pack(len(name)) + name + ranks


def read_journal(store: SlabStore) -> EventColumns | None:
    """Return the events in the journal of a slab, by position; None if the journal is not current.

    CorruptedError if the memory is not a slab. Events that were not written completely, or are
    damaged, are left out.
    """
    header = store.read(0, min(store.length, SLAB_HEADER_BYTES))
    _, ring_bytes = parse_slab_header(header, store.length)
    begin = RING_OFFSET + ring_bytes
    if store.length - begin < JOURNAL_BYTES:
        return None
    state, text_end = np.frombuffer(store.read(begin, 16), "<u8").tolist()
    if state != JournalState.CURRENT:
        return None
    slots = np.frombuffer(
        store.read(begin + _SLOTS_OFFSET, JOURNAL_SLOTS * _SLOT_BYTES), _SLOT_TYPE
    )
    position = slots["position"]
    whole = (position > 0) & (position == slots["position_again"])
    whole &= position % JOURNAL_SLOTS == np.arange(JOURNAL_SLOTS)
    for field in ("position", "end_position", "iteration"):
        whole &= slots[field] < _NUMBER_LIMIT
    found = slots[whole]
    texts = _JournalTexts(bytes(store.read(begin + _TEXT_OFFSET, JOURNAL_TEXT_BYTES)), text_end)
    events: list[RankEvent] = []
    groups: dict[str, ProcessGroup] = {}
    for row in found[np.argsort(found["position"], kind="stable")].tolist():
        event = _make_event(row, texts, groups)
        if event is not None:
            events.append(event)
    return EventColumns.from_events(events, tuple(groups.values()))


class _JournalText(NamedTuple):
    """Contents of the text that the slot of an event refers to."""

    kind: int
    name: str
    peer: int = -1
    sequence: int = 0
    element_count: int = 0
    stall_us: int = 0
    dtype: str = ""
    source: str = ""
    group: ProcessGroup | None = None


class _JournalTexts:
    """Copy of the texts of a journal; every place and every length is checked."""

    def __init__(self, content: bytes, text_end: int) -> None:
        self._content, self._text_end = content, text_end
        self._events: dict[int, _JournalText | None] = {}

    def find_event(self, place: int) -> _JournalText | None:
        """Return the text of an event at a place; None if it was overwritten or is damaged."""
        if place not in self._events:
            try:
                self._events[place] = self._parse_event(place)
            except (CorruptedError, UnicodeDecodeError, struct.error):
                self._events[place] = None
        return self._events[place]

    def _parse_event(self, place: int) -> _JournalText:
        content = self._read(place)
        if content[:1] == _OPERATOR_MARK:
            return _JournalText(EventKind.OPERATOR, _decode(content[1:]))
        kind, dtype_bytes, source_bytes, peer, *numbers, at = _CALL.unpack_from(content)
        sequence, element_count, stall_us = numbers
        if not EventKind.OPERATOR < kind <= max(EventKind) or max(numbers) >= _NUMBER_LIMIT:
            raise CorruptedError(
                f"damaged: the journal has no call at position {place} of its texts"
            )
        source_at = _CALL.size + dtype_bytes
        name_at = source_at + source_bytes
        return _JournalText(
            kind,
            _decode(content[name_at:]),
            peer,
            sequence,
            element_count,
            stall_us,
            _decode(content[_CALL.size : source_at]),
            _decode(content[source_at:name_at]),
            self._parse_group(at),
        )

    def _parse_group(self, place: int) -> ProcessGroup:
        content = self._read(place)
        (name_bytes,) = _GROUP.unpack_from(content)
        name_end = _GROUP.size + name_bytes
        if (len(content) - name_end) % 4 or len(content) < name_end:
            raise CorruptedError(
                f"damaged: the journal has no group at position {place} of its texts"
            )
        ranks = np.frombuffer(content[name_end:], "<u4").tolist()
        return ProcessGroup(_decode(content[_GROUP.size : name_end]), tuple(ranks))

    def _read(self, place: int) -> bytes:
        offset = place % JOURNAL_TEXT_BYTES
        if not self._text_end - JOURNAL_TEXT_BYTES <= place < self._text_end:
            raise CorruptedError(f"the journal has overwritten the text at position {place}")
        length, checksum = _TEXT_HEAD.unpack_from(self._content, offset)
        begin = offset + _TEXT_HEAD.size
        content = self._content[begin : begin + length]
        if len(content) != length or zlib.crc32(content) != checksum:
            raise CorruptedError(f"damaged: the text at position {place} of the journal")
        return content


def _decode(spelled: bytes) -> str:
    return spelled.decode(errors="surrogatepass")


def _make_event(
    row: tuple[int, ...], texts: _JournalTexts, groups: dict[str, ProcessGroup]
) -> RankEvent | None:
    """Return the event of a slot, and add its group to `groups`; None if its text was
    overwritten.
    """
    position, end_position, start_us, place, iteration, graph, outcome, _, end_us = row
    text = texts.find_event(place)
    if text is None:
        return None
    if text.group is not None and text.group.ranks:
        groups[text.group.name] = text.group
    is_over = end_position != OPEN_END_POSITION or outcome == CallOutcome.FAILED
    return RankEvent(
        graph=graph,
        iteration=iteration,
        position=position,
        end_position=max(position, end_position),
        name=text.name,
        kind=EventKind(text.kind),
        start_us=start_us,
        # A failed event is open, and has the time of its failure as its end.
        end_us=end_us if is_over else start_us,
        group="" if text.group is None else text.group.name,
        sequence=text.sequence,
        element_count=text.element_count,
        dtype=text.dtype,
        peer=text.peer,
        stall_us=text.stall_us,
        source=text.source,
        outcome=outcome if outcome <= max(CallOutcome) else CallOutcome.UNKNOWN,
    )
