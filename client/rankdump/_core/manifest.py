"""Manifest of one iteration of one session, and the record of iterations that were removed from a
tree. Pure: no clock, no disk, no network.

A manifest is one JSON file under `rank_N/.dump_metadata/manifest/`. It is written last, so its
presence means that the iteration is complete; it makes the tree describe itself, with raw
operator names, digests and the balance of the iteration. Removed iterations are lines of
`rank_N/.dump_metadata/retired.jsonl`, one object a line, added before the first file is removed;
a line may stand there twice.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast, get_type_hints

from rankdump._core.status import IterationStatus
from rankdump.errors import CorruptedError

MANIFEST_VERSION = 1
# Some 5 MB, of the 100 that an idle agent may take.
_MAX_REMEMBERED_KINDS = 1 << 14
_quote_text = json.encoder.encode_basestring_ascii
_DEFAULT_FIELDS = {"timestamp_us": 0, "member": ""}
"""What manifests of before there were rows do not say."""
_RECORDS_MARK = b', "records": [\n'
_CHECKSUM_PATTERN = re.compile(rb', "crc32": ([0-9]{1,10})\}\Z')
_UNREADABLE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
)


class ManifestRecord(NamedTuple):
    """One tensor of the iteration. There are thousands: no value is made faster."""

    path: str
    """Relative to the root of the tree; empty when only a row of `statistic.csv` was written."""
    timestamp_us: int
    """The time in the file's name, or in the row."""
    op_type: str
    op_name: str
    """Full scope name, raw."""
    argument: str
    dtype: str
    """Element type as the framework held it; the file may hold a wider one."""
    shape: tuple[int, ...]
    bytes_in: int
    bytes_stored: int
    digest: str
    """xxh3-128 of the elements as the framework held them, hexadecimal."""
    member: str = ""
    """Side and slot, `input.0`, where the path or the time is that of a whole operator."""


@dataclass(frozen=True, slots=True)
class ManifestSession:
    """What else an agent has to know to take its session up again without its ledger."""

    pid: int
    framework: str
    device_target: str
    last_sequence: int
    """Number of the frame that ended the iteration; the tree has all before it."""
    plan: str
    """The session's plan, as the rank sent it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One iteration of one session."""

    status: IterationStatus
    world_size: int
    device: int
    host: str
    records: tuple[ManifestRecord, ...]
    session: ManifestSession | None = None
    """None where it was no agent that wrote it, or one that did not say it yet."""

    def to_json(self) -> bytes:
        """Return the file's bytes."""
        head = {
            "version": MANIFEST_VERSION,
            "status": asdict(self.status) | {"dropped": dict(self.status.dropped)},
            "world_size": self.world_size,
            "device": self.device,
            "host": self.host,
            **({"session": asdict(self.session)} if self.session else {}),
        }
        # One record a line: as readable as an indented file, and ten times as fast to make.
        lines = ",\n".join(map(_format_record, self.records))
        body = f'{json.dumps(head)[:-1]}, "records": [\n{lines}\n]'.encode()
        return body + f', "crc32": {zlib.crc32(body)}}}'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read the file's bytes back; DamagedError when they are anything else."""
        try:
            return _parse_manifest(json.loads(data))
        except _UNREADABLE_ERRORS as error:
            raise CorruptedError(f"manifest cannot be read: {error}") from None

    @staticmethod
    def parse_head(line: bytes) -> Manifest | None:
        """Return what the first line of a file says, which is all but its records.

        None when the line does not end where they begin: `to_json` did not write it.
        """
        if not line.endswith(_RECORDS_MARK):
            return None
        return Manifest.from_json(line.removesuffix(b"\n") + b"]}")


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    if body["version"] != MANIFEST_VERSION:
        raise ValueError(f"version {body['version']}, but this reader supports {MANIFEST_VERSION}")
    for name in ("world_size", "device"):
        _check_field(name, int, body[name])
    _check_field("host", str, body["host"])
    return Manifest(
        status=_parse_status(body["status"]),
        world_size=body["world_size"],
        device=body["device"],
        host=body["host"],
        records=_parse_records(body["records"]),
        session=_parse_session(body.get("session")),
    )


def is_intact(data: bytes) -> bool:
    """Return whether a manifest's bytes are those that were written, as far as it says so.

    Those of before there was a checksum are taken as they are.
    """
    seal = _CHECKSUM_PATTERN.search(data)
    return seal is None or zlib.crc32(data[: seal.start()]) == int(seal[1])


def _parse_session(body: Any) -> ManifestSession | None:
    return None if body is None else ManifestSession(**_check_fields(ManifestSession, body))


def _parse_status(body: Any) -> IterationStatus:
    # Those of before the coordinator read them say neither stall nor positions.
    unsaid = {"stall_us": 0, "first_position": 0, "last_position": 0}
    return IterationStatus(**_check_fields(IterationStatus, unsaid | body))


def _parse_records(bodies: list[Any]) -> tuple[ManifestRecord, ...]:
    """Return the records, checked column by column; ValueError names a field of another type.

    A check of each field of each record would be a fifth of what opening a tree takes.
    """
    columns: dict[str, list[Any]] = {}
    for name, kind in _get_field_types(ManifestRecord).items():
        column = columns[name] = _read_column(bodies, name)
        if not _COLUMN_CHECKS[kind](column):
            raise _make_field_error(
                name, next(value for value in column if not _FIELD_CHECKS[kind](value))
            )
    extra = set(chain.from_iterable(bodies)).difference(columns)
    if extra:
        raise ValueError(f"a record has the unknown field {min(extra)[:60]!r}")
    columns["shape"] = list(map(tuple, columns["shape"]))
    return tuple(map(ManifestRecord._make, zip(*columns.values(), strict=True)))


def _read_column(bodies: list[Any], name: str) -> list[Any]:
    if name in _DEFAULT_FIELDS:
        return [body.get(name, _DEFAULT_FIELDS[name]) for body in bodies]
    return [body[name] for body in bodies]


def _check_fields(kind: type, body: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are; ValueError names one that is of another type.

    Readers sort by them, add them up and join them with text.
    """
    for name, needed in _get_field_types(kind).items():
        _check_field(name, needed, body[name])
    return body


@lru_cache(maxsize=8)
def _get_field_types(kind: type) -> Mapping[str, Any]:
    """Return the type of each field, by name."""
    return get_type_hints(kind)


def _check_field(name: str, kind: Any, value: object) -> None:
    if not _FIELD_CHECKS[kind](value):
        raise _make_field_error(name, value)


def _make_field_error(name: str, value: object) -> ValueError:
    return ValueError(f"{name} is {str(value)[:60]!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, cast("list[object]", value)))


def _is_count_mapping(value: Any) -> bool:
    return isinstance(value, dict) and _is_count_list(
        list(cast("dict[str, object]", value).values())
    )


_FIELD_CHECKS: Mapping[Any, Callable[[object], bool]] = {
    str: _is_text,
    int: _is_count,
    bool: lambda value: isinstance(value, bool),
    tuple[int, ...]: _is_count_list,
    Mapping[str, int]: _is_count_mapping,
}
"""Whether a value of JSON is one of a type that a field is declared to be."""


def _is_count_column(column: list[Any]) -> bool:
    return set(map(type, column)) <= {int} and min(column, default=0) >= 0


_COLUMN_CHECKS: Mapping[Any, Callable[[list[Any]], bool]] = {
    str: lambda column: set(map(type, column)) <= {str},
    int: _is_count_column,
    tuple[int, ...]: lambda column: (
        set(map(type, column)) <= {list} and _is_count_column(list(chain.from_iterable(column)))
    ),
}
"""The same of many values at once."""


def _format_record(record: ManifestRecord) -> str:
    # As `json.dumps` writes it. Only what differs from one iteration to the next is made anew:
    # a step has thousands of records.
    kind = _format_record_kind(
        record.op_type, record.op_name, record.argument, record.dtype, record.shape
    )
    member = f', "member": {_quote_text(record.member)}' if record.member else ""
    return (
        f'{{"path": {_quote_text(record.path)}, "timestamp_us": {record.timestamp_us}, {kind}, '
        f'"bytes_in": {record.bytes_in}, "bytes_stored": {record.bytes_stored}, '
        f'"digest": {_quote_text(record.digest)}{member}}}'
    )


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _format_record_kind(
    op_type: str, op_name: str, argument: str, dtype: str, shape: tuple[int, ...]
) -> str:
    fields = {"op_type": op_type, "op_name": op_name, "argument": argument, "dtype": dtype}
    return json.dumps(fields | {"shape": shape})[1:-1]


def make_manifest_name(iteration: int, session_id: str) -> str:
    """Return the file's name; a second job in the same tree gets files of its own."""
    return f"iteration_{iteration}.{session_id[:12]}.json"


RETIRED_FILE = "retired.jsonl"


@dataclass(frozen=True, slots=True)
class RetiredIteration:
    """A rank's part of an iteration that was removed because of its age, or for room."""

    job_id: str
    session_id: str
    rank: int
    iteration: int
    at_us: int
    """When that began, since the epoch."""
    why: str
    """`age` or `size`."""

    def to_line(self) -> str:
        """Return its line, without an end."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> RetiredIteration:
        """Read a line back; DamagedError when it is anything else."""
        try:
            body: dict[str, Any] = json.loads(line)
            texts = [body[name] for name in ("job_id", "session_id", "why")]
            numbers = [body[name] for name in ("rank", "iteration", "at_us")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a name is not a string")
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError("a field is not a number")
            return RetiredIteration(texts[0], texts[1], *numbers, why=texts[2])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptedError(f"a line of {RETIRED_FILE} cannot be read: {error}") from None
