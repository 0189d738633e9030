"""Table with the events of all ranks: batches are joined rank by rank in the order of each program,
each event is in it once, and names and process groups are numbered for all ranks together. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump._core.events import (
    CALL_COLUMNS,
    EVENT_COLUMN_TYPES,
    OPEN_END_POSITION,
    EventColumn,
    EventColumns,
    EventKind,
    ProcessGroup,
)

_MAX_POSITIONS_PER_EVENT = 4
"""Positions are sorted by counting if their range has at most this many positions per event."""
_IDENTITY_FIELDS = ("name", "kind", "group", "sequence")
"""Fields that are equal in two reports of one event; times are not among them, because they may be
corrected differently.
"""


def find_program_order(position: EventColumn) -> EventColumn | None:
    """Return the order of the positions; None when a position is repeated."""
    count = len(position)
    if np.all(position[1:] > position[:-1]):
        return np.arange(count)
    low, high = int(position.min()), int(position.max())
    if high - low < _MAX_POSITIONS_PER_EVENT * count:
        # Nearly every position in the range has an event, so counting is faster than comparing.
        places = np.full(high - low + 1, -1, "i8")
        places[(position - position.dtype.type(low)).astype("i8")] = np.arange(count)
        order = places[places >= 0]
    else:
        order = np.argsort(position, kind="stable")
        if np.any(position[order][1:] == position[order][:-1]):
            return None
    return order if len(order) == count else None


def drop_repeated_events(events: Mapping[str, EventColumn]) -> tuple[EventColumn, tuple[int, ...]]:
    """Return the order with one event for each position, and the positions at which events differ.

    A complete event replaces an open one, and a failed event replaces one that still waited;
    otherwise the first event counts.
    """
    position, opened = events["position"], events["end_position"] == OPEN_END_POSITION
    failures_us = np.where(opened, events["end_us"], 0)
    order = np.lexsort((-failures_us, opened, position))
    repeat = np.flatnonzero(position[order][1:] == position[order][:-1]) + 1
    again, kept = order[repeat], np.delete(order, repeat)
    first = kept[np.searchsorted(position[kept], position[again])]
    differs = np.zeros(len(repeat), dtype=bool)
    for field in _IDENTITY_FIELDS:
        differs |= events[field][again] != events[field][first]
    return kept, tuple(np.unique(position[again[differs]]).tolist())


class TextIndex:
    """One string table for all batches; the table of each batch is translated only once."""

    def __init__(self) -> None:
        self._index = {"": 0}
        self._known: dict[int, tuple[Sequence[str], EventColumn]] = {}

    def translate(self, names: Sequence[str], indexes: EventColumn) -> EventColumn:
        """Return the numbers in this table of the names that a column of a batch refers to."""
        # The names are kept beside their translation, so that no other table can get the same id.
        places = self._known.get(id(names), (names, np.empty(0, "i4")))[1]
        if len(places) < len(names):
            grown = np.full(len(names), -1, "i4")
            grown[: len(places)] = places
            places = grown
            self._known[id(names)] = names, places
        found = places[indexes]
        if len(found) and found.min() < 0:
            used = np.zeros(len(places), bool)
            used[indexes] = True
            new: list[int] = np.flatnonzero(used & (places < 0)).tolist()
            for at in new:
                places[at] = self._index.setdefault(names[at], len(self._index))
            found = places[indexes]
        return found

    def list_texts(self) -> tuple[str, ...]:
        """Return all texts, in the order of their numbers."""
        return tuple(self._index)


class ProcessGroupIndex:
    """All process groups by name and members, because two groups may have the same name."""

    def __init__(self, events: Mapping[int, Sequence[EventColumns]]) -> None:
        self._index: dict[ProcessGroup, int] = {}
        self._sorted: dict[ProcessGroup, ProcessGroup] = {}
        self._own: dict[int, dict[str, ProcessGroup]] = {}
        self._declared: dict[str, dict[ProcessGroup, None]] = {}
        for batch in (batch for batches in events.values() for batch in batches):
            for name, group in self._groups_of(batch).items():
                self._declared.setdefault(name, {})[group] = None

    def translate(self, rank: int, batch: EventColumns, indexes: EventColumn) -> EventColumn:
        """Return the number in this index of each event's group in a batch."""
        used, inverse = np.unique(indexes, return_inverse=True)
        own = self._groups_of(batch)
        places: list[int] = []
        texts: list[int] = used.tolist()
        for text in texts:
            name = batch.names[text]
            group = own.get(name) or self._of_others(rank, name)
            places.append(self._index.setdefault(group, len(self._index)))
        return np.array(places, "i4")[inverse]

    def list_groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups, in the order of their numbers."""
        return tuple(self._index)

    def _groups_of(self, batch: EventColumns) -> dict[str, ProcessGroup]:
        own = self._own.get(id(batch.groups))
        if own is None:
            own = {group.name: self._normal(group) for group in batch.groups}
            self._own[id(batch.groups)] = own
        return own

    def _normal(self, group: ProcessGroup) -> ProcessGroup:
        normal = self._sorted.get(group)
        if normal is None:
            normal = ProcessGroup(group.name, tuple(sorted(set(group.ranks))))
            normal = self._sorted.setdefault(normal, normal)
            self._sorted[group] = normal
        return normal

    def _of_others(self, rank: int, name: str) -> ProcessGroup:
        fitting = (group for group in self._declared.get(name, ()) if rank in group.ranks)
        return next(fitting, ProcessGroup(name, ()))


NEVER_ENDED = 2**64 - 1
"""End position of calls that are not complete: no event comes after them."""
_EVENT_FIELDS = (
    "graph",
    "position",
    "end_position",
    "name",
    "kind",
    "start_us",
    "end_us",
    "stream",
)
_COLUMN_TYPES = EVENT_COLUMN_TYPES | {
    "name": "i4",
    "dtype": "i4",
    "source": "i4",
    "group": "i4",
    "rank": "i8",
    "row": "i8",
    "time_us": "i8",
}


@dataclass(frozen=True, slots=True, eq=False)
class EventTable:
    """Events of all ranks: rank by rank, within each rank in the order of `position`."""

    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    """Every process group once, with sorted ranks; without ranks if no rank has declared them."""
    columns: dict[str, EventColumn]
    """Columns with an element for every event: graph, position, end_position, name, kind, start_us,
    end_us, stream, and `time_us`, the latest start up to this event within its rank.
    """
    members: dict[str, EventColumn]
    """Columns with an element for every collective or message of a rank: `row`, `rank`, the fields
    that operators do not have (`group` is an index into the groups), and again kind, position and
    end_position.
    """
    ranks: dict[int, slice]
    """Rows of each rank that has any."""
    member_ranks: dict[int, slice]
    """Elements of `members` that belong to each of these ranks."""
    conflicts: Mapping[int, tuple[int, ...]]
    """Positions at which a rank has reported two different events."""

    def __getitem__(self, column: str) -> EventColumn:
        return self.columns[column]

    def name(self, row: int) -> str:
        """Return the name of the event in a row."""
        return self.names[int(self.columns["name"][row])]


def build_event_table(events: Mapping[int, Sequence[EventColumns]]) -> EventTable:
    """Return one table with the batches of all ranks; an event that was sent twice is
    in it once.
    """
    builder = _EventTableBuilder(events)
    for rank in sorted(events):
        batches = [batch for batch in events[rank] if len(batch)]
        if batches:
            builder.add(rank, batches)
    return builder.build()


class _EventTableBuilder:
    """Copies the events of one rank after the other into columns for all ranks."""

    def __init__(self, events: Mapping[int, Sequence[EventColumns]]) -> None:
        self._texts, self._groups = TextIndex(), ProcessGroupIndex(events)
        height = sum(len(batch) for batches in events.values() for batch in batches)
        self._columns = {
            field: np.empty(height, _COLUMN_TYPES[field]) for field in (*_EVENT_FIELDS, "time_us")
        }
        self._members: list[dict[str, EventColumn]] = []
        self._ranks: dict[int, slice] = {}
        self._member_ranks: dict[int, slice] = {}
        self._conflicts: dict[int, tuple[int, ...]] = {}
        self._height = self._member_height = 0

    def add(self, rank: int, batches: list[EventColumns]) -> None:
        """Add the events of one rank, sorted by position, each once."""
        part = {
            f: _concatenate([b.columns[f] for b in batches]) for f in _EVENT_FIELDS if f != "name"
        }
        part["name"] = _concatenate(
            [self._texts.translate(b.names, b.columns["name"]) for b in batches]
        )
        calls = np.flatnonzero(part["kind"] != int(EventKind.OPERATOR))
        call_fields = self._collect_call_fields(rank, batches)
        order = find_program_order(part["position"])
        if order is None:
            order, conflicts = drop_repeated_events(
                part | _spread_calls(call_fields, calls, len(part["kind"]))
            )
            self._conflicts |= {rank: conflicts} if conflicts else {}
        span = slice(self._height, self._height + len(order))
        for field, column in part.items():
            # All indexes are within bounds; `mode` is set because any mode except `raise` avoids a
            # buffer.
            np.take(column, order, out=self._columns[field][span], mode="clip")
        self._ranks[rank], self._height = span, span.stop
        self._complete(rank, span, call_fields, np.searchsorted(calls, order))

    def _collect_call_fields(
        self, rank: int, batches: list[EventColumns]
    ) -> dict[str, EventColumn]:
        """Return the fields that only calls have, in the order in which the calls arrived."""
        parts: list[dict[str, EventColumn]] = []
        for batch in batches:
            own = np.flatnonzero(batch.columns["kind"] != int(EventKind.OPERATOR))
            part = {field: batch.columns[field][own] for field in CALL_COLUMNS}
            for field in ("dtype", "source"):
                part[field] = self._texts.translate(batch.names, part[field])
            part["group"] = self._groups.translate(rank, batch, part["group"])
            parts.append(part)
        return {field: _concatenate([part[field] for part in parts]) for field in CALL_COLUMNS}

    def _complete(
        self, rank: int, span: slice, call_fields: dict[str, EventColumn], at: EventColumn
    ) -> None:
        """Fill the derived columns of a rank and add its members; if row i is a call, it is call
        `at[i]`.
        """
        columns = {field: column[span] for field, column in self._columns.items()}
        ends = columns["end_position"]
        ends[ends == OPEN_END_POSITION] = NEVER_ENDED
        np.maximum(ends, columns["position"], out=ends)
        np.maximum.accumulate(columns["start_us"], out=columns["time_us"])
        own = np.flatnonzero(columns["kind"] != int(EventKind.OPERATOR))
        members = {field: column[at[own]] for field, column in call_fields.items()}
        members |= {field: columns[field][own] for field in ("kind", "position", "end_position")}
        members |= {"row": own + span.start, "rank": np.full(len(own), rank, "i8")}
        self._members.append(members)
        low, self._member_height = self._member_height, self._member_height + len(own)
        self._member_ranks[rank] = slice(low, self._member_height)

    def build(self) -> EventTable:
        """Return the table of all ranks that were added."""
        fields = (*CALL_COLUMNS, "kind", "position", "end_position", "row", "rank")
        empty = [{field: np.empty(0, _COLUMN_TYPES[field]) for field in fields}]
        parts = self._members or empty
        return EventTable(
            names=self._texts.list_texts(),
            groups=self._groups.list_groups(),
            columns={field: column[: self._height] for field, column in self._columns.items()},
            members={field: _concatenate([part[field] for part in parts]) for field in fields},
            ranks=self._ranks,
            member_ranks=self._member_ranks,
            conflicts=self._conflicts,
        )


def _concatenate(columns: list[EventColumn]) -> EventColumn:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _spread_calls(
    call_fields: dict[str, EventColumn], calls: EventColumn, count: int
) -> dict[str, EventColumn]:
    """Return fields of calls as columns with an element for every event."""
    spread = {field: np.zeros(count, column.dtype) for field, column in call_fields.items()}
    for field, column in call_fields.items():
        spread[field][calls] = column
    return spread
