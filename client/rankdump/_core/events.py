"""Events of a rank in columns, which are the input of the merge into the global execution order,
and the findings of the merge. Pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


class EventKind(IntEnum):
    """Kind of an event; the numbers are used on the wire."""

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
        """Whether every member of the group takes part in the event."""
        return EventKind.ALL_REDUCE <= self <= EventKind.BARRIER

    @property
    def other_end(self) -> EventKind | None:
        """Kind of the event at the other end of a message; None if the event is no message."""
        ends = {EventKind.SEND: EventKind.RECV, EventKind.RECV: EventKind.SEND}
        return ends.get(self)


class CallOutcome(IntEnum):
    """How a collective or message ended on a rank; the numbers are used on the wire."""

    UNKNOWN = 0
    """It is still open, or only the call has returned: an accelerator may still work on it."""
    COMPLETE = 1
    """It has completed."""
    FAILED = 2
    """It raised an error, which says nothing about the other members."""


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
"""Text of each reason; a reason that a newer rank sends may be missing."""


@dataclass(frozen=True, slots=True)
class UnseenCollectives:
    """Collectives of one iteration that a rank executed but for which it has no events."""

    iteration: int
    group: str
    """Name of the process group; empty if it is not known."""
    count: int
    """Number of the collectives; 0 if it is not known."""
    reason: str
    """A value of `UnseenReason`, or one that a newer version added."""


OPEN_END_POSITION = (1 << 63) - 1
"""End position of an event that is not complete. The `end_us` of an open event is its start; when
the event completes, it is reported again at the same position and replaces the first report. A
failed event stays incomplete; its `end_us` is the time of the failure.
"""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One operator or collective of one rank."""

    graph: int
    iteration: int
    position: int
    """Position of the event's start in the rank's program; it rises by one with each event."""
    end_position: int
    """Position of the rank when the event was complete; equal to `position` if the event blocked
    the rank, OPEN_END_POSITION while the event is not complete.
    """
    name: str
    kind: EventKind
    start_us: int
    """Time in microseconds since the epoch on the rank's own clock."""
    end_us: int
    stream: int = 0
    group: str = ""
    sequence: int = 0
    """Number of a collective in its group, or of a message among those with its group, sender and
    receiver.
    """
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""
    stall_us: int = 0
    """For a collective or message: microseconds for which dumping had delayed the rank from the
    start of its session until the event started.
    """
    source: str = ""
    """For a collective or message: `file:line` of the script that called it; empty if unknown."""
    outcome: int = CallOutcome.UNKNOWN
    """For a collective or message: a value of `CallOutcome`."""


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
"""Column names and their element types; columns named in TEXT_COLUMNS hold indices into the string
table.
"""
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
"""Columns that only collectives and messages use; in events of operators they have the defaults of
`RankEvent`.
"""

EventColumn: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """Many events of one rank; element i of every column describes event i."""

    names: Sequence[str]
    """String table; index 0 is the empty text. Several batches may share a table that grows."""
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, EventColumn]
    """The columns named in EVENT_COLUMN_TYPES, all of one length; they must not be changed."""
    stalled_us: int = 0
    """Microseconds for which dumping had delayed the rank from the session's start to `sent_us`."""
    sent_us: int = 0
    """Time at which the batch was sent, in microseconds on the rank's clock; 0 if unknown. All
    events that began at least a second earlier have been reported.
    """
    unseen: tuple[UnseenCollectives, ...] = ()
    """Collectives for which no batch has an event; their iteration need not have events in this
    batch.
    """

    def __len__(self) -> int:
        return len(self.columns["position"])

    @staticmethod
    def from_events(events: list[RankEvent], groups: tuple[ProcessGroup, ...] = ()) -> EventColumns:
        """Return events as columns."""
        table = {"": 0}
        columns: dict[str, EventColumn] = {}
        for field, code in EVENT_COLUMN_TYPES.items():
            values = [getattr(event, field) for event in events]
            if field in TEXT_COLUMNS:
                values = [table.setdefault(text, len(table)) for text in values]
            columns[field] = np.array(values, dtype=code)
        return EventColumns(tuple(table), groups, columns)


class FindingKind(str, Enum):
    """Kind of a finding of the merge."""

    OPERATION_MISMATCH = "operation_mismatch"
    """Members of one collective call different operations."""
    SIZE_MISMATCH = "size_mismatch"
    """Members of one collective call give different numbers of elements."""
    DTYPE_MISMATCH = "dtype_mismatch"
    """Members of one collective call give different element types."""
    MISSING_MEMBER = "missing_member"
    """A rank that executed other events never arrived at a collective."""
    SILENT_RANK = "silent_rank"
    """A member reported no event of the iteration."""
    ENDED_RANK = "ended_rank"
    """The process of a rank ended, or its session was lost, before the rank ended its session."""
    LONE_MESSAGE = "lone_message"
    """A send has no receive, or a receive has no send."""
    CYCLE = "cycle"
    """Collectives or messages wait for each other in a cycle."""
    SEQUENCE_DIFFERENCE = "sequence_difference"
    """Ranks executed different operators, although their collectives agree."""
    GAP = "gap"
    """Events of a rank were lost before they were merged, so an absent event proves nothing."""
    CONFLICT = "conflict"
    """A rank reported two different events at one position."""
    PARTIAL = "partial"
    """The iteration was published before a rank had finished it."""
    LATE = "late"
    """Events came after their iteration was published, and are not in the order."""
    UNPUBLISHED = "unpublished"
    """The order of an iteration could not be written."""
    COLLECTIVES_NOT_SEEN = "collectives_not_seen"
    """Ranks executed collectives that are not in the execution order."""
    TWO_TREES = "two_trees"
    """Ranks of one job dump into different trees; the execution order is in only one of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An anomaly in an iteration."""

    kind: FindingKind
    iteration: int
    text: str
    """A sentence that is complete in itself: it names iteration, ranks and operators."""
    ranks: tuple[int, ...] = ()
    """Ranks that the finding is about: missing ranks, ranks that differ, or ranks that
    lost events.
    """
    group: str = ""
    sequence: int = -1
    """Number of the collective or message; -1 if the finding is about none."""
    name: str = ""
    """The operator that the finding is about; for a missing member, the last operator that it
    executed.
    """
    position: int = -1
    """Position of that operator in the program of the first of `ranks`; -1 if there is none."""
    provisional: bool = False
    """Whether the iteration is still running, so that what is missing may yet arrive."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""
