"""Frozen values that the folders of the agent hand to each other: frame ids, received records and
their outcomes, metadata frames, rows of statistics and members of operators.

The elements of a record are in memory, or in a file until they are needed; reading such a file, and
the clock of time stamps, is the only I/O in this module. Values that exist once for each record are
named tuples, which are made fastest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from rankdump._core.record import StatisticRows, TensorSide
from rankdump._core.session_protocol import MetadataItem, RecordHead
from rankdump._layout.tree_paths import FilePlace
from rankdump.errors import CorruptedError


@dataclass(frozen=True, slots=True)
class OperatorMembership:
    """The place of a tensor within its operator."""

    member: str
    """Side and slot, `input.0`."""
    whole: FilePlace | None = None
    """The operator's file, into which the tensor's own is joined; None if it has no such file."""
    head_bytes: int = 0
    """Bytes of the tensor's own file before its elements."""


@dataclass(frozen=True, slots=True)
class BinTensor:
    """A tensor as the header of a `bin` file describes it."""

    side: TensorSide
    slot: int
    dtype: str
    shape: tuple[int, ...]
    byte_count: int


@dataclass(frozen=True, slots=True)
class OperatorMember:
    """A tensor with a `bin` file of its own, as the ledger returns it."""

    sequence: int
    path: str
    """Path of its own file, relative to the root; removed when the tensor is joined."""
    whole: FilePlace
    head_bytes: int
    bytes_stored: int
    joined: bool
    """Whether the operator's file contains it."""
    timestamp_us: int
    op_name: str
    tensor: BinTensor


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """A tensor that was joined into its operator's file."""

    sequence: int
    bytes_stored: int
    """Its share of that file."""


@dataclass(frozen=True, slots=True)
class FileTail:
    """The end of a file."""

    path: str
    """Relative to the root of the tree."""
    start: int
    length: int


def format_member(side: TensorSide, slot: int) -> str:
    """Return the word for one tensor of an operator."""
    return f"{side.value}.{slot}"


def parse_member(text: str) -> tuple[TensorSide, int]:
    """Return the side and slot of such a word."""
    side, _, slot = text.partition(".")
    return TensorSide(side), int(slot)


def read_wall_clock_us() -> int:
    """Return the time in microseconds since the epoch."""
    return time.time_ns() // 1000


CORRUPTED = "corrupted"
"""Drop reason of elements that differ from those that were sent."""
_MAX_REUSED_BYTES = 16 << 20


class _ThreadBuffer(threading.local):
    """A reused buffer for each thread: touching new pages takes longer than copying."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def get(self, length: int) -> memoryview:
        """Return a view of the first bytes of the buffer."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        return memoryview(self._memory)[:length]


_thread_buffer = _ThreadBuffer()


class FileDescriptor:
    """An open file or folder, closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(frozen=True, slots=True)
class DeferredElements:
    """Elements in a file that another process may change or truncate."""

    file: FileDescriptor
    at: int
    length: int

    def __len__(self) -> int:
        return self.length

    def load(self) -> memoryview:
        """Return a copy in memory; CorruptedError when the file is too short.

        The file may change at any time, so checks apply to this copy only. The copy is valid
        until this thread loads the next elements.
        """
        if self.length > _MAX_REUSED_BYTES:
            return read_bytes_at(self.file.number, self.at, self.length)
        return _read_into(_thread_buffer.get(self.length), self.file.number, self.at)


RecordElements = memoryview | DeferredElements


def load_elements(elements: RecordElements) -> memoryview:
    """Return elements in memory; CorruptedError when their file was truncated."""
    return elements if isinstance(elements, memoryview) else elements.load()


def _read_into(target: memoryview, descriptor: int, offset: int) -> memoryview:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, (target[done:],), offset + done)
        if not count:
            missing = len(target) - done
            raise CorruptedError(f"a file ends {missing} bytes before {offset + len(target)}")
        done += count
    return target


def read_bytes_at(descriptor: int, offset: int, length: int) -> memoryview:
    """Return bytes of an open file; CorruptedError when it is too short.

    Mapped memory would not do: touching it behind the end of a file ends the process.
    """
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            missing = length - len(data)
            raise CorruptedError(f"a file ends {missing} bytes before {offset + length}")
        data += more
    return memoryview(data)


class FrameId(NamedTuple):
    """Permanent identity of one frame: resending it changes nothing."""

    session_id: str
    sequence: int


class ReceivedRecord(NamedTuple):
    """A record that arrived completely."""

    frame_id: FrameId
    head: RecordHead
    data: RecordElements
    """In C order, little endian; readable until the record is committed."""
    checksum: bytes = b""
    """xxh3-128 of the elements as the rank sent them; empty when it sent none."""
    digest: str = ""
    """xxh3-128 of the elements as they arrived, hexadecimal; empty until it is examined."""
    statistics: tuple[str, ...] | None = None
    """Texts of its row in `statistic.csv`; None when it has no row, or is not examined yet."""
    fingerprint: bytes = b""
    """Empty where the plan asks for none, or the tensor has none, or it is not examined yet."""


class FileStamp(NamedTuple):
    """Distinguishes a written file from one that replaced it or was changed since."""

    inode: int
    size_bytes: int
    modified_ns: int


class OriginalFile(NamedTuple):
    """A whole file of a tree, which others may be linked to."""

    path: str
    """Relative to the root of the tree."""
    stamp: FileStamp
    unpacked: str = ""
    """Why it was stored unpacked and is packed later; empty when it stays as it is."""


class TreeFile(NamedTuple):
    """A tensor's file in any tree."""

    root: str
    path: str
    """Relative to the root."""


class BaselineVerdict(str, Enum):
    """What a baseline says of a record; the value is the word in metrics."""

    SAME = "same"
    DIFFERENT = "different"
    ABSENT = "absent"
    """It has no such tensor."""
    UNAVAILABLE = "unavailable"
    """It could not be asked."""


class BaselineProblem(NamedTuple):
    """Why a baseline does not say anything of an iteration of a rank."""

    kind: str
    """The same for problems of which people need to know one only."""
    text: str


class BaselineMatch(NamedTuple):
    """What a baseline says of a record."""

    verdict: BaselineVerdict
    file: TreeFile | None = None
    """The file that has the elements, for the same."""
    problem: BaselineProblem | None = None


class StatisticTableRow(NamedTuple):
    """One line of a table of statistics."""

    table: FilePlace
    text: str
    """The line, without its end."""


class RecordStatus(str, Enum):
    """The outcome of a record in one word; the value is the word in the ledger."""

    STORED = "stored"
    LINKED = "linked"
    SAME_AS_BASELINE = "same_as_baseline"
    DEGRADED = "degraded"
    DROPPED = "dropped"

    # Enum's own hash is a Python call, which every count by status would pay for.
    __hash__ = str.__hash__


class RecordOutcome(NamedTuple):
    """The outcome of a record; `reason` is empty unless it was degraded or dropped."""

    frame_id: FrameId
    head: RecordHead
    status: RecordStatus
    reason: str = ""
    path: str = ""
    """Relative to the root of the tree; empty when there is no file of its own. There is no file
    where it is the same as in the baseline.
    """
    digest: str = ""
    bytes_stored: int = 0
    """Bytes of its file; 0 for a link."""
    row: StatisticTableRow | None = None
    original: OriginalFile | None = None
    """The file that was written for it."""
    membership: OperatorMembership | None = None
    """None unless tensors of an operator share a time stamp."""
    unpacked: str = ""
    """Why its file was stored unpacked and is packed later; empty when it stays as it is."""
    fingerprint: bytes = b""
    baseline: BaselineMatch | None = None
    """None where its plan has no baseline."""


@dataclass(frozen=True, slots=True)
class MetadataFrame:
    """A numbered frame that is neither a record nor rows of statistics."""

    frame_id: FrameId
    declaration: MetadataItem
    raw: bytes
    """The frame as it arrived, for the ledger."""


RejectedPlaces: TypeAlias = "Mapping[str, Sequence[int]]"
"""Places of the rows of a frame that are dropped, by reason."""


@dataclass(frozen=True, slots=True)
class StatisticRowsResult:
    """Rows of statistics, and which of them are dropped."""

    frame_id: FrameId
    rows: StatisticRows
    refused: RejectedPlaces
    raw: bytes
    """The frame as it arrived, for the ledger."""

    @property
    def status(self) -> RecordStatus:
        """Outcome of the rows that are kept."""
        return RecordStatus.DEGRADED if self.rows.degraded else RecordStatus.STORED

    @property
    def reason(self) -> str:
        """Why the rows that are kept are degraded; empty where they are not."""
        return self.rows.degraded

    @property
    def kept(self) -> int:
        """Number of rows that are kept."""
        return len(self.rows) - sum(map(len, self.refused.values()))


def make_drop_outcome(frame_id: FrameId, head: RecordHead, reason: str) -> RecordOutcome:
    """Return the outcome of a record that is not in the tree."""
    return RecordOutcome(frame_id, head, RecordStatus.DROPPED, reason)


@dataclass(frozen=True, slots=True)
class QuietRank:
    """A session without frames in flight: all that arrived are committed."""

    job_id: str
    rank: int
    session_id: str
    watermark: int
    """Number of the last committed frame."""


SMALL_RECORD_BYTES = 16 << 10
"""Up to this size, handing a record to another thread costs more than writing it."""
