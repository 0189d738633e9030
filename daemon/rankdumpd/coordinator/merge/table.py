"""The batches of all ranks as one table, each rank's events in the order they started. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import (
    COLUMN_TYPES,
    OPEN,
    Column,
    EventColumns,
    EventKind,
    ProcessGroup,
)
from rankdumpd.coordinator.merge.rows import program_order, without_repeats
from rankdumpd.coordinator.merge.texts import Groups, Texts

NEVER = 2**64 - 1
"""End position in the table of what is not complete: nothing stands after it."""
_EVENT = ("graph", "position", "end_position", "name", "kind", "start_us", "end_us", "stream")
_CALL = ("group", "sequence", "element_count", "dtype", "peer", "stall_us")
_TYPES = COLUMN_TYPES | {
    "name": "i4",
    "dtype": "i4",
    "group": "i4",
    "rank": "i8",
    "row": "i8",
    "time_us": "i8",
}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Events of all ranks: rank by rank, in the order of `position` within each."""

    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    """Every communicator once, its ranks sorted; without ranks when nobody declared them."""
    columns: dict[str, Column]
    """Of every event: graph, position, end_position, name, kind, start_us, end_us, stream, and
    `time_us`, the start that never falls within a rank."""
    members: dict[str, Column]
    """Of every collective or message of a rank: its `row`, its `rank`, what only those say
    (`group` indexes the groups), and once more its kind, position and end_position."""
    ranks: dict[int, slice]
    """Rows of each rank that has any."""
    member_ranks: dict[int, slice]
    """Elements of `members` of the same ranks."""
    conflicts: Mapping[int, tuple[int, ...]]
    """Positions at which a rank reported two different events."""

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    def name(self, row: int) -> str:
        """Return the name of the event in a row."""
        return self.names[int(self.columns["name"][row])]


def tabled(events: Mapping[int, Sequence[EventColumns]]) -> Table:
    """Return one table of the batches of each rank; an event sent twice is in it once."""
    filler = _Filler(events)
    for rank in sorted(events):
        batches = [batch for batch in events[rank] if len(batch)]
        if batches:
            filler.add(rank, batches)
    return filler.table()


class _Filler:
    """Takes one rank after the other into columns of the full height."""

    def __init__(self, events: Mapping[int, Sequence[EventColumns]]) -> None:
        self._texts, self._groups = Texts(), Groups(events)
        height = sum(len(batch) for batches in events.values() for batch in batches)
        self._columns = {field: np.empty(height, _TYPES[field]) for field in (*_EVENT, "time_us")}
        self._members: list[dict[str, Column]] = []
        self._ranks: dict[int, slice] = {}
        self._member_ranks: dict[int, slice] = {}
        self._conflicts: dict[int, tuple[int, ...]] = {}
        self._height = self._member_height = 0

    def add(self, rank: int, batches: list[EventColumns]) -> None:
        """Take the events of one rank, sorted, each once."""
        part = {f: _joined([b.columns[f] for b in batches]) for f in _EVENT if f != "name"}
        part["name"] = _joined([self._texts.places_of(b.names, b.columns["name"]) for b in batches])
        calls = np.flatnonzero(part["kind"] != int(EventKind.OPERATOR))
        said = self._said(rank, batches)
        order = program_order(part["position"])
        if order is None:
            order, conflicts = without_repeats(part | _spread(said, calls, len(part["kind"])))
            self._conflicts |= {rank: conflicts} if conflicts else {}
        span = slice(self._height, self._height + len(order))
        for field, column in part.items():
            # Only `raise` needs a buffer, and no index is out of bounds.
            np.take(column, order, out=self._columns[field][span], mode="clip")
        self._ranks[rank], self._height = span, span.stop
        self._complete(rank, span, said, np.searchsorted(calls, order))

    def _said(self, rank: int, batches: list[EventColumns]) -> dict[str, Column]:
        """Return what the calls of those batches say that operators do not, as they come."""
        parts: list[dict[str, Column]] = []
        for batch in batches:
            own = np.flatnonzero(batch.columns["kind"] != int(EventKind.OPERATOR))
            part = {field: batch.columns[field][own] for field in _CALL}
            part["dtype"] = self._texts.places_of(batch.names, part["dtype"])
            part["group"] = self._groups.places_of(rank, batch, part["group"])
            parts.append(part)
        return {field: _joined([part[field] for part in parts]) for field in _CALL}

    def _complete(self, rank: int, span: slice, said: dict[str, Column], at: Column) -> None:
        """Add what follows from the rows of a rank; row i is call `at[i]`, if it is one."""
        columns = {field: column[span] for field, column in self._columns.items()}
        ends = columns["end_position"]
        ends[ends == OPEN] = NEVER
        np.maximum(ends, columns["position"], out=ends)
        np.maximum.accumulate(columns["start_us"], out=columns["time_us"])
        own = np.flatnonzero(columns["kind"] != int(EventKind.OPERATOR))
        members = {field: column[at[own]] for field, column in said.items()}
        members |= {field: columns[field][own] for field in ("kind", "position", "end_position")}
        members |= {"row": own + span.start, "rank": np.full(len(own), rank, "i8")}
        self._members.append(members)
        low, self._member_height = self._member_height, self._member_height + len(own)
        self._member_ranks[rank] = slice(low, self._member_height)

    def table(self) -> Table:
        """Return what has been taken."""
        fields = (*_CALL, "kind", "position", "end_position", "row", "rank")
        empty = [{field: np.empty(0, _TYPES[field]) for field in fields}]
        parts = self._members or empty
        return Table(
            names=self._texts.all(),
            groups=self._groups.all(),
            columns={field: column[: self._height] for field, column in self._columns.items()},
            members={field: _joined([part[field] for part in parts]) for field in fields},
            ranks=self._ranks,
            member_ranks=self._member_ranks,
            conflicts=self._conflicts,
        )


def _joined(columns: list[Column]) -> Column:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _spread(said: dict[str, Column], calls: Column, count: int) -> dict[str, Column]:
    """Return what the calls say as columns of all events."""
    spread = {field: np.zeros(count, column.dtype) for field, column in said.items()}
    for field, column in said.items():
        spread[field][calls] = column
    return spread
