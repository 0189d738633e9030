"""Frozen values that the packages of the agent exchange: frame ids, received records and their
outcomes, metadata frames, rows of statistics and members of operators.

The elements of a record are in memory, or in a file until they are needed. Reading such a file and
the clock of time stamps are the only I/O in this module. Values that exist once for each record are
named tuples, because these are the fastest to create.
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
    """The place of a tensor among the tensors of its operator."""

    member: str
    """Side and slot of the tensor, such as `input.0`."""
    whole: FilePlace | None = None
    """The operator's file, which the tensor's own file is joined into; None if it has
    no such file.
    """
    head_bytes: int = 0
    """Bytes in front of the elements in the tensor's own file."""


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
    """Path of the tensor's own file, relative to the root of the tree; the file is removed after
    the join.
    """
    whole: FilePlace
    head_bytes: int
    bytes_stored: int
    joined: bool
    """Whether the operator's file contains the tensor."""
    timestamp_us: int
    op_name: str
    tensor: BinTensor


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """A tensor that was joined into the file of its operator."""

    sequence: int
    bytes_stored: int
    """Bytes that the tensor takes in the operator's file."""


@dataclass(frozen=True, slots=True)
class FileTail:
    """The last bytes of a file."""

    path: str
    """Path relative to the root of the tree."""
    start: int
    length: int


def format_member(side: TensorSide, slot: int) -> str:
    """Return the word for a tensor's side and slot, such as `input.0`."""
    return f"{side.value}.{slot}"


def parse_member(text: str) -> tuple[TensorSide, int]:
    """Return the side and slot that a word of `format_member` stands for."""
    side, _, slot = text.partition(".")
    return TensorSide(side), int(slot)


def read_wall_clock_us() -> int:
    """Return the present time in microseconds since the epoch."""
    return time.time_ns() // 1000


CORRUPTED = "corrupted"
"""Drop reason for elements that differ from the elements that the rank sent."""
_MAX_REUSED_BYTES = 16 << 20


class _ThreadBuffer(threading.local):
    """One reused buffer for each thread, because touching new pages takes longer than copying."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def get(self, length: int) -> memoryview:
        """Return a view of the first `length` bytes of the buffer of this thread."""
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
        """Return a copy of the elements in memory; CorruptedError when the file is too short.

        The file may change at any time, so checks apply to this copy only. The copy is valid until
        this thread loads other elements.
        """
        if self.length > _MAX_REUSED_BYTES:
            return read_bytes_at(self.file.number, self.at, self.length)
        return _read_into(_thread_buffer.get(self.length), self.file.number, self.at)


RecordElements = memoryview | DeferredElements


def load_elements(elements: RecordElements) -> memoryview:
    """Return the elements in memory; CorruptedError when the file that has them was truncated."""
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
    """Return bytes of an open file; CorruptedError when the file is too short.

    The file is not mapped, because touching mapped memory behind the end of a file ends the
    process.
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
    """Permanent identity of one frame; a resent frame has the same one, so it is recognised."""

    session_id: str
    sequence: int


class ReceivedRecord(NamedTuple):
    """A record with all of its elements."""

    frame_id: FrameId
    head: RecordHead
    data: RecordElements
    """The elements in C order, little endian; readable until the record is committed."""
    checksum: bytes = b""
    """xxh3-128 of the elements, as computed by the rank; empty when the rank sent none."""
    digest: str = ""
    """xxh3-128 of the received elements, in hexadecimal; empty until the record is examined."""
    statistics: tuple[str, ...] | None = None
    """Fields of the record's row in `statistic.csv`; None before the examination, or
    without a row.
    """
    fingerprint: bytes = b""
    """Fingerprint; empty before the examination, or when the plan or the tensor has none."""


class FileStamp(NamedTuple):
    """Stamp that tells a written file from a file that replaced it or was changed afterwards."""

    inode: int
    size_bytes: int
    modified_ns: int


class OriginalFile(NamedTuple):
    """A complete file of a tree, which other files may be hard links to."""

    path: str
    """Path relative to the root of the tree."""
    stamp: FileStamp
    unpacked: str = ""
    """Why the file was stored unpacked and is packed later; empty when it stays as it is."""


class TreeFile(NamedTuple):
    """The file of a tensor in any tree, such as a baseline."""

    root: str
    path: str
    """Path relative to the root of the tree."""


class BaselineVerdict(str, Enum):
    """Result of looking a record up in a baseline; the value is the word in metrics."""

    SAME = "same"
    DIFFERENT = "different"
    ABSENT = "absent"
    """The baseline has no such tensor."""
    UNAVAILABLE = "unavailable"
    """The baseline could not be read."""


class BaselineProblem(NamedTuple):
    """Why a baseline cannot be used for an iteration of a rank."""

    kind: str
    """Kind of the problem; only the first problem of a kind is reported."""
    text: str


class BaselineMatch(NamedTuple):
    """Result of looking a record up in a baseline, with the file or the problem."""

    verdict: BaselineVerdict
    file: TreeFile | None = None
    """The file of the baseline that has the same elements; None unless the verdict is SAME."""
    problem: BaselineProblem | None = None


class StatisticTableRow(NamedTuple):
    """One line of a table of statistics."""

    table: FilePlace
    text: str
    """The line without its line end."""


class RecordStatus(str, Enum):
    """The outcome of a record in one word; the ledger stores the value."""

    STORED = "stored"
    LINKED = "linked"
    SAME_AS_BASELINE = "same_as_baseline"
    DEGRADED = "degraded"
    DROPPED = "dropped"

    # The hash of Enum is implemented in Python and would slow down every count by status.
    __hash__ = str.__hash__


class RecordOutcome(NamedTuple):
    """The outcome of a record; `reason` is empty unless the record was degraded or dropped."""

    frame_id: FrameId
    head: RecordHead
    status: RecordStatus
    reason: str = ""
    path: str = ""
    """Path of the record's file, relative to the root of the tree; empty without a file of its own,
    as for a record that is the same as in the baseline.
    """
    digest: str = ""
    bytes_stored: int = 0
    """Bytes of the record's file; 0 for a link."""
    row: StatisticTableRow | None = None
    original: OriginalFile | None = None
    """The file that was written for the record; None if none was written."""
    membership: OperatorMembership | None = None
    """Place of the tensor in its operator; None unless tensors of an operator share a
    time stamp.
    """
    unpacked: str = ""
    """Why the record's file was stored unpacked and is packed later; empty when it
    stays as it is.
    """
    fingerprint: bytes = b""
    baseline: BaselineMatch | None = None
    """Result of the lookup in the baseline; None if the plan has no baseline."""


@dataclass(frozen=True, slots=True)
class MetadataFrame:
    """A numbered frame that is neither a record nor rows of statistics."""

    frame_id: FrameId
    declaration: MetadataItem
    raw: bytes
    """The bytes of the frame as it arrived, which the ledger stores."""


RejectedPlaces: TypeAlias = "Mapping[str, Sequence[int]]"
"""Positions of the dropped rows in a frame, by drop reason."""


@dataclass(frozen=True, slots=True)
class StatisticRowsResult:
    """Rows of statistics of a frame, and which of them are dropped."""

    frame_id: FrameId
    rows: StatisticRows
    refused: RejectedPlaces
    raw: bytes
    """The bytes of the frame as it arrived, which the ledger stores."""

    @property
    def status(self) -> RecordStatus:
        """Outcome of the rows that are kept."""
        return RecordStatus.DEGRADED if self.rows.degraded else RecordStatus.STORED

    @property
    def reason(self) -> str:
        """Why the kept rows are degraded; empty if they are not."""
        return self.rows.degraded

    @property
    def kept(self) -> int:
        """Number of rows that are kept."""
        return len(self.rows) - sum(map(len, self.refused.values()))


def make_drop_outcome(frame_id: FrameId, head: RecordHead, reason: str) -> RecordOutcome:
    """Return the outcome of a record that is dropped for this reason."""
    return RecordOutcome(frame_id, head, RecordStatus.DROPPED, reason)


@dataclass(frozen=True, slots=True)
class QuietRank:
    """A session without frames in flight: all frames that arrived are committed."""

    job_id: str
    rank: int
    session_id: str
    watermark: int
    """Sequence number of the last committed frame."""


SMALL_RECORD_BYTES = 16 << 10
"""Size in bytes up to which handing a record to another thread costs more than writing it."""
