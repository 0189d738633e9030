"""What a rank executed, in columns: the input of the global execution order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


class EventKind(IntEnum):
    """What happened; the numbers are those of the wire."""

    OPERATOR = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    BARRIER = 10
    SEND = 11
    RECV = 12

    @property
    def collective(self) -> bool:
        """Whether every member of the group takes part."""
        return EventKind.ALL_REDUCE <= self <= EventKind.BARRIER


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A communicator: the name its members know it by, and their global ranks."""

    name: str
    ranks: tuple[int, ...]


OPEN = (1 << 63) - 1
"""End position of what has started and is not complete; its `end_us` is its start. When it is
complete it is reported again, at the same position, and that counts."""


@dataclass(frozen=True, slots=True)
class Event:
    """One operator or collective of one rank."""

    graph: int
    iteration: int
    position: int
    """Place of its start in the rank's program, rising by one per event."""
    end_position: int
    """The rank's position when it was complete; equal to `position` when it blocked, and OPEN
    while it is not complete."""
    name: str
    kind: EventKind
    start_us: int
    """Microseconds since the epoch on the rank's own clock."""
    end_us: int
    stream: int = 0
    group: str = ""
    sequence: int = 0
    """Number of the collective in its group; of a message in its (group, sender, receiver)."""
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""
    stall_us: int = 0
    """Of a collective or message: time for which dumping had held the rank up since its session
    began, when it started."""


COLUMN_TYPES: dict[str, str] = {
    "graph": "u4",
    "iteration": "u8",
    "position": "u8",
    "end_position": "u8",
    "name": "u4",
    "kind": "u1",
    "start_us": "i8",
    "end_us": "i8",
    "stream": "u4",
    "group": "u4",
    "sequence": "u8",
    "element_count": "u8",
    "dtype": "u4",
    "peer": "i4",
    "stall_us": "u8",
}
"""Column names and their element types; `name`, `group` and `dtype` index the string table."""

Column: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """Many events of one rank; element i of every column describes event i."""

    names: Sequence[str]
    """String table; index 0 is the empty text. Many batches may share one, which may grow."""
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, Column]
    """The columns of COLUMN_TYPES, all of one length; not to be changed."""
    stalled_us: int = 0
    """Time for which dumping had held the rank up since its session began, when the batch left."""
    sent_us: int = 0
    """When the batch left, on the rank's clock; 0 when it does not say. All that began a second
    before has been told."""

    def __len__(self) -> int:
        return len(self.columns["position"])

    @staticmethod
    def of(events: list[Event], groups: tuple[ProcessGroup, ...] = ()) -> EventColumns:
        """Gather events into columns."""
        table = {"": 0}
        texts = ("name", "group", "dtype")
        columns: dict[str, Column] = {}
        for field, code in COLUMN_TYPES.items():
            values = [getattr(event, field) for event in events]
            if field in texts:
                values = [table.setdefault(text, len(table)) for text in values]
            columns[field] = np.array(values, dtype=code)
        return EventColumns(tuple(table), groups, columns)

    def events(self) -> list[Event]:
        """Return the events one by one; for tests and small batches."""
        lists = {field: column.tolist() for field, column in self.columns.items()}
        for field in ("name", "group", "dtype"):
            lists[field] = [self.names[index] for index in lists[field]]
        lists["kind"] = [EventKind(kind) for kind in lists["kind"]]
        return [Event(**dict(zip(lists, row))) for row in zip(*lists.values())]  # noqa: B905
