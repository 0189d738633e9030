"""Events of a rank, in columns, and the findings of the merge: input and remarks of the global
execution order. Pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


class EventKind(IntEnum):
    """Kind of an event; the numbers are those on the wire."""

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
    def is_collective(self) -> bool:
        """Whether every member of the group takes part."""
        return EventKind.ALL_REDUCE <= self <= EventKind.BARRIER

    @property
    def other_end(self) -> EventKind | None:
        """Kind of the event at the other end of a message; None for no message."""
        ends = {EventKind.SEND: EventKind.RECV, EventKind.RECV: EventKind.SEND}
        return ends.get(self)


class CallOutcome(IntEnum):
    """How a collective or message ended on a rank; the numbers are those on the wire."""

    UNKNOWN = 0
    """It is open, or only the call returned: an accelerator may still work on it."""
    COMPLETE = 1
    """It was carried out."""
    FAILED = 2
    """It raised, which states nothing about the other members."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A communicator: its name, and the global ranks of its members."""

    name: str
    ranks: tuple[int, ...]


class UnseenReason(str, Enum):
    """Why collectives that a rank executed are not among its events."""

    BACKEND_CALL = "backend_call"
    PYTHON_GROUP = "python_group"
    CUDA_GRAPH = "cuda_graph"
    UNREADABLE_CALL = "unreadable_call"


UNSEEN_REASON_TEXTS: dict[str, str] = {
    UnseenReason.BACKEND_CALL: "the script called the backend itself, past torch's operators",
    UnseenReason.PYTHON_GROUP: "a class in Python implements the group",
    UnseenReason.CUDA_GRAPH: "a CUDA graph captured the call, and its replays are not seen",
    UnseenReason.UNREADABLE_CALL: "the call could not be read; a warning of the rank has the error",
}
"""By reason; those of a newer rank may not be among them."""


@dataclass(frozen=True, slots=True)
class UnseenCollectives:
    """Collectives of one iteration that a rank executed and that are not among its events."""

    iteration: int
    group: str
    """Name of the process group; empty when it is not known."""
    count: int
    """0 when the number is not known."""
    reason: str
    """A value of `UnseenReason`, or one that a newer version added."""


OPEN_END_POSITION = (1 << 63) - 1
"""End position of an event that is not complete; its `end_us` is its start. A complete event is
reported again at the same position, and replaces the first report. So is one that has failed: it
stays incomplete, and its `end_us` is the time of the failure."""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One operator or collective of one rank."""

    graph: int
    iteration: int
    position: int
    """Place of its start in the rank's program, rising by one per event."""
    end_position: int
    """The rank's position when it was complete; equal to `position` when it blocked, and
    OPEN_END_POSITION while it is not complete."""
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
    source: str = ""
    """Of a collective or message: `file:line` of the script that made it; empty when unknown."""
    outcome: int = CallOutcome.UNKNOWN
    """Of a collective or message, as in `CallOutcome`."""


EVENT_COLUMN_TYPES: dict[str, str] = {
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
    "source": "u4",
    "outcome": "u1",
}
"""Column names and their element types; TEXT_COLUMNS index the string table."""
TEXT_COLUMNS = ("name", "group", "dtype", "source")
CALL_COLUMNS = (
    "group",
    "sequence",
    "element_count",
    "dtype",
    "peer",
    "stall_us",
    "source",
    "outcome",
)
"""Columns of collectives and messages only; operators have the defaults of `RankEvent`."""

EventColumn: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """Many events of one rank; element i of every column describes event i."""

    names: Sequence[str]
    """String table; index 0 is the empty text. Many batches may share one, which may grow."""
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, EventColumn]
    """The columns of EVENT_COLUMN_TYPES, all of one length; not to be changed."""
    stalled_us: int = 0
    """Time for which dumping had held the rank up from the session's start to `sent_us`."""
    sent_us: int = 0
    """When the batch was sent, on the rank's clock; 0 when unknown. All events that began a second
    earlier have been reported."""
    unseen: tuple[UnseenCollectives, ...] = ()
    """Collectives that are in no batch; their iteration may have no event in this one."""

    def __len__(self) -> int:
        return len(self.columns["position"])

    @staticmethod
    def from_events(events: list[RankEvent], groups: tuple[ProcessGroup, ...] = ()) -> EventColumns:
        """Gather events into columns."""
        table = {"": 0}
        columns: dict[str, EventColumn] = {}
        for field, code in EVENT_COLUMN_TYPES.items():
            values = [getattr(event, field) for event in events]
            if field in TEXT_COLUMNS:
                values = [table.setdefault(text, len(table)) for text in values]
            columns[field] = np.array(values, dtype=code)
        return EventColumns(tuple(table), groups, columns)


class FindingKind(str, Enum):
    """Kind of a finding."""

    OPERATION_MISMATCH = "operation_mismatch"
    """Members of one collective call different operations."""
    SIZE_MISMATCH = "size_mismatch"
    """Members of one collective call give different numbers of elements."""
    DTYPE_MISMATCH = "dtype_mismatch"
    """Members of one collective call give different element types."""
    MISSING_MEMBER = "missing_member"
    """A rank that executed other things never arrived at a collective."""
    SILENT_RANK = "silent_rank"
    """A member reported no event of the iteration."""
    ENDED_RANK = "ended_rank"
    """The process of a rank ended, or its session was lost, before the rank ended its session."""
    LONE_MESSAGE = "lone_message"
    """A send without its receive, or a receive without its send."""
    CYCLE = "cycle"
    """Collectives or messages that wait for each other in a circle."""
    SEQUENCE_DIFFERENCE = "sequence_difference"
    """Ranks whose collectives agree executed different operators."""
    GAP = "gap"
    """Events of a rank were lost on their way, so an absence there proves nothing."""
    CONFLICT = "conflict"
    """A rank reported two different events at one position."""
    PARTIAL = "partial"
    """The iteration was published before a rank had finished it."""
    LATE = "late"
    """Events came after their iteration was published, and are not in the order."""
    UNPUBLISHED = "unpublished"
    """The order of an iteration could not be written."""
    COLLECTIVES_NOT_SEEN = "collectives_not_seen"
    """Ranks executed collectives that are not in the order."""
    TWO_TREES = "two_trees"
    """Ranks of one job dump into different trees: its order is in one of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something odd in an iteration."""

    kind: FindingKind
    iteration: int
    text: str
    """One sentence, complete in itself: it names iteration, ranks and operators."""
    ranks: tuple[int, ...] = ()
    """Ranks concerned: missing ones, different ones, or ones that lost events."""
    group: str = ""
    sequence: int = -1
    """Number of the collective or message; -1 for none."""
    name: str = ""
    """The operator concerned; of a missing member the last one that it did execute."""
    position: int = -1
    """Position of that operator in the program of the first of the ranks; -1 for none."""
    provisional: bool = False
    """The iteration still runs, so what is missing may yet arrive."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""
