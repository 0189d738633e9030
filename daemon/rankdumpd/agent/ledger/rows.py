"""Rows of the ledger: the values that the ledger returns, and their conversion from and to columns.
Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from rankdump._core.events import EventColumns
from rankdump._core.graph import GraphPart
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import StatisticRows
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    KernelArguments,
    SessionEnd,
    SessionRequest,
)
from rankdump._core.status import SessionState
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._core.tensor_layout import TensorLayout
from rankdump._core.timeouts import RankTimeouts
from rankdump._layout.tree_paths import FilePlace
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import (
    BinTensor,
    FrameId,
    MetadataFrame,
    OperatorMember,
    OperatorMembership,
    RecordOutcome,
    RecordStatus,
    RejectedPlaces,
    StatisticRowsResult,
    parse_member,
)


class StoredRecord(NamedTuple):
    """A record that is in the tree, as the ledger returns it."""

    sequence: int
    graph: int
    fingerprint: bytes
    record: ManifestRecord


@dataclass(frozen=True, slots=True)
class StoredStatisticRows:
    """Rows of statistics as the ledger returns them."""

    sequence: int
    raw: bytes
    refused: RejectedPlaces


@dataclass(frozen=True, slots=True)
class LedgerSessionRow:
    """A session as the ledger returns it."""

    request: SessionRequest
    state: SessionState
    watermark: int
    """Every frame up to this sequence number is committed; frames above it may be, too."""
    iterations_seen: int
    notes: tuple[str, ...]
    ordered_graphs: tuple[int, ...]
    """Graphs whose program order is in the tree."""


@dataclass(frozen=True, slots=True)
class OutcomeCountRow:
    """Committed records of one iteration with the same outcome."""

    iteration: int
    status: RecordStatus
    reason: str
    records: int
    bytes_in: int
    bytes_stored: int


class ReportItemKind(str, Enum):
    """Content of an item of the report log; the ledger stores the value."""

    SESSION = "session"
    TIMEOUTS = "timeouts"
    EVENTS = "events"
    BALANCE = "balance"


@dataclass(frozen=True, slots=True)
class ReportItem:
    """An item for the coordinator, with its permanent number."""

    number: int
    kind: ReportItemKind
    session_id: str
    job_id: str
    rank: int
    events: int
    """Number of events in the item."""
    body: bytes
    """The frame as the rank sent it, or the JSON of a session or a balance."""


@dataclass(frozen=True, slots=True)
class EndedIteration:
    """An iteration of a job that has ended on all of the job's ranks at this agent."""

    job_id: str
    iteration: int
    ended_us: int
    """Time at which the last rank ended the iteration, in microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class IterationRemoval:
    """One rank's part of an iteration that is being removed."""

    session_id: str
    iteration: int
    byte_count: int
    """Bytes that the removal frees; files with other hard links free none."""
    began_us: int
    about: Mapping[str, object]
    """Details such as `job`, `rank`, and `why` the iteration is removed."""


SESSION_COLUMNS = "request, plan, state, watermark, iterations_seen, notes, graphs, secret_hash"
FRAME_COLUMNS = "sequence, body, refused"
KEPT_COLUMNS = (
    "sequence, graph, hex(fingerprint), CASE joined WHEN 0 THEN path ELSE whole END, timestamp_us,"
    " op_type, op_name, argument, dtype, shape, bytes_in, bytes_stored, digest, member, microbatch,"
    " phase, CASE layout WHEN 0 THEN NULL ELSE (SELECT body FROM layouts WHERE number = layout)"
    " END, baseline, same_as"
)
"""Columns with the fields of a ManifestRecord in their order; the fingerprint is in hexadecimal,
because JSON has no bytes.
"""
_SHAPE_INDEX = ManifestRecord._fields.index("shape")
_LAYOUT_INDEX = ManifestRecord._fields.index("layout")
MEMBER_COLUMNS = (
    "sequence, path, whole, whole_name, head_bytes, bytes_stored, joined, timestamp_us, op_name,"
    " member, dtype, shape, bytes_in"
)
RECORD_PLACES = f"({', '.join('?' * 22)}, 0, ?, ?, ?, ?, ?, ?)"
_MAX_REMEMBERED_LAYOUTS = 1 << 13
_NO_MEMBER = OperatorMembership("")
_NO_FILE = ("", "")
# In a dictionary, because reading the value of an enumeration member is a Python call.
_STATUS_WORDS = {status: status.value for status in RecordStatus}
_LIMIT = 1 << 63


def read_number(value: object) -> int:
    """Return the number in a column; CorruptedError when the column has no valid number."""
    if not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise CorruptedError(f"the ledger has {value!r:.40} in the place of a number")
    return value


def read_session_row(row: tuple[Any, ...]) -> LedgerSessionRow:
    """Return a session from the columns of SESSION_COLUMNS; CorruptedError if a column
    is invalid.
    """
    request, plan, state, watermark, seen, notes, graphs, secret_hash = row
    try:
        about, secret = json.loads(request), bytes.fromhex(secret_hash)
        return LedgerSessionRow(
            request=SessionRequest(**about, plan_json=plan, config_source=b"", secret=secret),
            state=SessionState(state),
            watermark=read_number(watermark),
            iterations_seen=read_number(seen),
            notes=tuple(json.loads(notes)),
            ordered_graphs=tuple(map(read_number, json.loads(graphs))),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptedError(f"the ledger has a session that cannot be read: {error}") from None


@lru_cache(maxsize=_MAX_REMEMBERED_LAYOUTS)
def make_layout_row(layout: TensorLayout) -> tuple[int, str]:
    """Return the columns of a layout; its number is a digest, so that equal layouts share a row."""
    body = json.dumps(layout, default=make_plain)
    digest = hashlib.blake2b(body.encode(), digest_size=8).digest()
    # SQLite has signed integers, and 0 means that a record has no layout.
    return int.from_bytes(digest, "big", signed=True) or 1, body


@lru_cache(maxsize=_MAX_REMEMBERED_LAYOUTS)
def _read_layout(body: str) -> TensorLayout:
    return read_json(TensorLayout, json.loads(body), minimum=0)


def make_record_row(outcome: RecordOutcome) -> tuple[str | int | bytes | None, ...]:
    """Return the columns of a record."""
    head, kind = outcome.head, outcome.head.kind
    row, member = outcome.row, outcome.membership or _NO_MEMBER
    return (
        outcome.frame_id.session_id,
        outcome.frame_id.sequence,
        kind.graph,
        head.iteration,
        _STATUS_WORDS[outcome.status],
        outcome.reason,
        outcome.path,
        kind.op_type,
        kind.op_name,
        kind.argument,
        kind.dtype,
        _format_shape(kind.shape),
        kind.byte_count,
        outcome.bytes_stored,
        outcome.digest,
        head.timestamp_us,
        row.table.path if row else "",
        row.text if row else "",
        member.member,
        member.head_bytes,
        member.whole.path if member.whole else "",
        member.whole.mapped_from if member.whole else "",
        kind.microbatch,
        kind.phase,
        make_layout_row(kind.layout)[0] if kind.layout is not None else 0,
        outcome.fingerprint,
        *(_NO_FILE if outcome.baseline is None else outcome.baseline.file or _NO_FILE),
    )


def read_stored_record(row: tuple[Any, ...]) -> StoredRecord:
    """Return a record from the columns of KEPT_COLUMNS."""
    sequence, graph, fingerprint, *fields = row
    fields[_SHAPE_INDEX] = parse_shape(fields[_SHAPE_INDEX])
    if fields[_LAYOUT_INDEX] is not None:
        fields[_LAYOUT_INDEX] = _read_layout(fields[_LAYOUT_INDEX])
    found = bytes.fromhex(fingerprint) if len(fingerprint) == 2 * FINGERPRINT_BYTES else b""
    return StoredRecord(sequence, graph, found, ManifestRecord._make(fields))


def read_operator_member(row: tuple[Any, ...]) -> OperatorMember:
    """Return a tensor of an operator from the columns of MEMBER_COLUMNS."""
    sequence, path, whole, whole_name, head_bytes, bytes_stored, joined, *about = row
    timestamp_us, op_name, place, dtype, shape, bytes_in = about
    return OperatorMember(
        sequence=sequence,
        path=path,
        whole=parse_row_place(whole, whole_name),
        head_bytes=head_bytes,
        bytes_stored=bytes_stored,
        joined=bool(joined),
        timestamp_us=timestamp_us,
        op_name=op_name,
        tensor=BinTensor(*parse_member(place), dtype, parse_shape(shape), bytes_in),
    )


def parse_row_place(path: str, mapped_from: str = "") -> FilePlace:
    """Return the place that a path stands for."""
    folder, _, name = path.rpartition("/")
    return FilePlace(folder, name, mapped_from)


def read_stored_rows(row: tuple[Any, ...]) -> StoredStatisticRows:
    """Return rows of statistics from the columns of FRAME_COLUMNS."""
    sequence, raw, refused = row
    return StoredStatisticRows(sequence, raw, json.loads(refused))


def make_statistics_row(result: StatisticRowsResult) -> tuple[str | int | bytes, ...]:
    """Return the columns of a frame of statistics."""
    frame_id = result.frame_id
    refused = {reason: list(places) for reason, places in result.refused.items()}
    return (
        frame_id.session_id,
        frame_id.sequence,
        result.rows.iteration,
        result.status.value,
        result.kept,
        json.dumps(refused),
        result.raw,
        result.reason,
    )


def make_end_row(frame_id: FrameId, end: IterationEnd) -> tuple[str | int, ...]:
    """Return the columns of the end of an iteration."""
    return (
        frame_id.session_id,
        frame_id.sequence,
        end.iteration,
        end.expected,
        json.dumps(dict(end.dropped)),
        end.stall_us,
        end.first_position,
        end.last_position,
    )


CHANGED_PLAN_KIND = "ChangedPlan"
"""Word for changed plans; their frames are kept as long as their session."""
_DECLARATION_KINDS: dict[type, str] = {
    CallStacks: "CallStacks",
    ChangedPlan: CHANGED_PLAN_KIND,
    EventColumns: "EventColumns",
    GraphPart: "GraphPart",
    IterationEnd: "IterationEnd",
    KernelArguments: "KernelArguments",
    RankTimeouts: "Timeouts",
    SessionEnd: "SessionEnd",
    StatisticRows: "FigureRows",
}
"""Words for the column `kind`; they stay the same when a class is renamed."""


def make_metadata_row(declared: MetadataFrame) -> tuple[str | int | bytes, ...]:
    """Return the columns of a metadata frame, except for the last one, `applied`."""
    frame_id = declared.frame_id
    kind = _DECLARATION_KINDS[type(declared.declaration)]
    return (frame_id.session_id, frame_id.sequence, kind, declared.raw)


@lru_cache(maxsize=1024)
def _format_shape(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)


@lru_cache(maxsize=1024)
def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape in a column."""
    return tuple(json.loads(text))
