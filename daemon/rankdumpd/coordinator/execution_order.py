"""Merged execution order of one iteration: its lines, its collectives and messages with all
members, and the findings about it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankdump._core.events import EventColumn, EventKind, Finding, ProcessGroup
from rankdump._core.status import OrderEntry

_LINE_FIELDS = ("call", "graph", "name", "rank", "start_us", "end_us", "stream", "position")
_CALL_FIELDS = (
    *("graph", "name", "kind", "group", "sequence", "start_us", "end_us"),
    *("element_count", "dtype", "peer"),
)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedCalls:
    """Collectives and messages of one iteration, in their order, with all members.

    Element i of every column of `columns` describes call i; the members of call i are the
    elements `bounds[i]` to `bounds[i + 1]` of every column of `members`.
    """

    columns: dict[str, EventColumn]
    """graph, name, kind, group (index into the groups), sequence, start_us, end_us, and of its
    first member element_count, dtype (index into the names), peer."""
    bounds: EventColumn
    members: dict[str, EventColumn]
    """rank, start_us, end_us, position, end_position (OPEN_END_POSITION for those that wait),
    stream, stall_us, peer."""
    missing: Mapping[int, tuple[int, ...]]
    """Ranks that should have taken part and did not, by call; without complete calls."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def locate_members(self, calls: EventColumn) -> tuple[EventColumn, EventColumn]:
        """Return how many members each of these calls has, and the places of all of them."""
        starts = self.bounds[calls]
        counts = self.bounds[calls + 1] - starts
        shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return counts, np.arange(len(shifts)) + shifts


@dataclass(frozen=True, slots=True, eq=False)
class GlobalOrder:
    """The merged order of one iteration in columns; `entries` yields its lines."""

    iteration: int
    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, EventColumn]
    """One element per line: call (-1 for an operator), graph, name, rank, start_us, end_us,
    stream, position (in the program of the rank; of a call, that of its first member)."""
    calls: OrderedCalls
    findings: tuple[Finding, ...]
    skews: Mapping[str, int] = field(default_factory=dict[str, int])
    """Microseconds added to the last times of each clock whose ranks left their collectives before
    or after the others; without clocks that needed no correction."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""

    def __len__(self) -> int:
        return len(self.columns["call"])

    def entries(self, first_position: int = 0) -> Iterator[OrderEntry]:
        """Yield the lines in order, with positions from `first_position` on."""
        columns = (self.columns[column].tolist() for column in _LINE_FIELDS)
        lines: Iterable[tuple[int, ...]] = zip(*columns, strict=True)
        for position, line in enumerate(lines, first_position):
            call = line[0]
            yield self._operator(position, line) if call < 0 else self.call_entry(position, call)

    def _operator(self, position: int, line: tuple[int, ...]) -> OrderEntry:
        _, graph, name, rank, start, end, stream, place = line
        return OrderEntry(
            position=position,
            graph=graph,
            iteration=self.iteration,
            ranks=(rank,),
            name=self.names[name],
            kind=EventKind.OPERATOR,
            start_us=start,
            end_us=end,
            rank_positions=(place,),
            streams=(stream,),
            attempt=self.attempt,
        )

    def call_entry(self, position: int, call: int) -> OrderEntry:
        """Return the line of one call."""
        low, high = self.calls.bounds[call : call + 2]
        members = self.calls.members
        graph, name, kind, group, sequence, start, end, elements, dtype, peer = (
            int(self.calls.columns[column][call]) for column in _CALL_FIELDS
        )
        return OrderEntry(
            position=position,
            graph=graph,
            iteration=self.iteration,
            ranks=tuple(members["rank"][low:high].tolist()),
            name=self.names[name],
            kind=EventKind(kind),
            group=self.groups[group].name,
            sequence=sequence,
            start_us=start,
            end_us=end,
            missing=self.calls.missing.get(call, ()),
            rank_positions=tuple(members["position"][low:high].tolist()),
            streams=tuple(members["stream"][low:high].tolist()),
            element_count=elements,
            dtype=self.names[dtype],
            peer=peer,
            attempt=self.attempt,
        )
