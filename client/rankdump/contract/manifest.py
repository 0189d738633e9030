"""The manifest of one iteration of one session: written last, so its presence means complete.

One JSON file under `rank_N/.dump_metadata/manifest/`; it makes the tree describe itself, with
raw operator names, digests and the balance of the iteration. Pure.
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

from rankdump.contract.errors import DamagedError
from rankdump.contract.status import IterationStatus

MANIFEST_VERSION = 1
# Some 5 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 14
_text = json.encoder.encode_basestring_ascii
_UNSAID = {"timestamp_us": 0, "member": ""}
"""What manifests of before there were rows do not say."""
_RECORDS = b', "records": [\n'
_SEAL = re.compile(rb', "crc32": ([0-9]{1,10})\}\Z')
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


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
        lines = ",\n".join(map(_line, self.records))
        body = f'{json.dumps(head)[:-1]}, "records": [\n{lines}\n]'.encode()
        return body + f', "crc32": {zlib.crc32(body)}}}'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read the file's bytes back; DamagedError when they are anything else."""
        try:
            return _manifest(json.loads(data))
        except _UNREADABLE as error:
            raise DamagedError(f"manifest cannot be read: {error}") from None

    @staticmethod
    def head(line: bytes) -> Manifest | None:
        """Return what the first line of a file says, which is all but its records.

        None when the line does not end where they begin: `to_json` did not write it.
        """
        if not line.endswith(_RECORDS):
            return None
        return Manifest.from_json(line.removesuffix(b"\n") + b"]}")


def _manifest(body: dict[str, Any]) -> Manifest:
    if body["version"] != MANIFEST_VERSION:
        raise ValueError(f"version {body['version']}, this reader knows {MANIFEST_VERSION}")
    for name in ("world_size", "device"):
        _check(name, int, body[name])
    _check("host", str, body["host"])
    return Manifest(
        status=_status(body["status"]),
        world_size=body["world_size"],
        device=body["device"],
        host=body["host"],
        records=_records(body["records"]),
        session=_session(body.get("session")),
    )


def intact(data: bytes) -> bool:
    """Return whether a manifest's bytes are those that were written, as far as it says so.

    Those of before there was a checksum are taken as they are.
    """
    seal = _SEAL.search(data)
    return seal is None or zlib.crc32(data[: seal.start()]) == int(seal[1])


def _session(body: Any) -> ManifestSession | None:
    return None if body is None else ManifestSession(**_checked(ManifestSession, body))


def _status(body: Any) -> IterationStatus:
    # Those of before the coordinator read them say neither stall nor positions.
    unsaid = {"stall_us": 0, "first_position": 0, "last_position": 0}
    return IterationStatus(**_checked(IterationStatus, unsaid | body))


def _records(bodies: list[Any]) -> tuple[ManifestRecord, ...]:
    """Return the records, checked column by column; ValueError names a field of another type.

    A check of each field of each record would be a fifth of what opening a tree takes.
    """
    columns: dict[str, list[Any]] = {}
    for name, kind in _field_kinds(ManifestRecord).items():
        column = columns[name] = _column(bodies, name)
        if not _ALL_OF[kind](column):
            raise _wrong(name, next(value for value in column if not _KINDS[kind](value)))
    extra = set(chain.from_iterable(bodies)).difference(columns)
    if extra:
        raise ValueError(f"a record has {min(extra)[:60]!r}, which no record has")
    columns["shape"] = list(map(tuple, columns["shape"]))
    return tuple(map(ManifestRecord._make, zip(*columns.values(), strict=True)))


def _column(bodies: list[Any], name: str) -> list[Any]:
    if name in _UNSAID:
        return [body.get(name, _UNSAID[name]) for body in bodies]
    return [body[name] for body in bodies]


def _checked(kind: type, body: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are; ValueError names one that is of another type.

    Readers sort by them, add them up and join them with text.
    """
    for name, needed in _field_kinds(kind).items():
        _check(name, needed, body[name])
    return body


@lru_cache(maxsize=8)
def _field_kinds(kind: type) -> Mapping[str, Any]:
    """Return the type of each field, by name."""
    return get_type_hints(kind)


def _check(name: str, kind: Any, value: object) -> None:
    if not _KINDS[kind](value):
        raise _wrong(name, value)


def _wrong(name: str, value: object) -> ValueError:
    return ValueError(f"{name} is {str(value)[:60]!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, cast("list[object]", value)))


def _are_named_counts(value: Any) -> bool:
    return isinstance(value, dict) and _are_counts(list(cast("dict[str, object]", value).values()))


_KINDS: Mapping[Any, Callable[[object], bool]] = {
    str: _is_text,
    int: _is_count,
    bool: lambda value: isinstance(value, bool),
    tuple[int, ...]: _are_counts,
    Mapping[str, int]: _are_named_counts,
}
"""Whether a value of JSON is one of a type that a field is declared to be."""


def _all_counts(column: list[Any]) -> bool:
    return set(map(type, column)) <= {int} and min(column, default=0) >= 0


_ALL_OF: Mapping[Any, Callable[[list[Any]], bool]] = {
    str: lambda column: set(map(type, column)) <= {str},
    int: _all_counts,
    tuple[int, ...]: lambda column: (
        set(map(type, column)) <= {list} and _all_counts(list(chain.from_iterable(column)))
    ),
}
"""The same of many values at once."""


def _line(record: ManifestRecord) -> str:
    # As `json.dumps` writes it. Only what differs from one iteration to the next is made anew:
    # a step has thousands of records.
    kind = _kind(record.op_type, record.op_name, record.argument, record.dtype, record.shape)
    member = f', "member": {_text(record.member)}' if record.member else ""
    return (
        f'{{"path": {_text(record.path)}, "timestamp_us": {record.timestamp_us}, {kind}, '
        f'"bytes_in": {record.bytes_in}, "bytes_stored": {record.bytes_stored}, '
        f'"digest": {_text(record.digest)}{member}}}'
    )


@lru_cache(maxsize=_REMEMBERED)
def _kind(op_type: str, op_name: str, argument: str, dtype: str, shape: tuple[int, ...]) -> str:
    fields = {"op_type": op_type, "op_name": op_name, "argument": argument, "dtype": dtype}
    return json.dumps(fields | {"shape": shape})[1:-1]


def manifest_name(iteration: int, session_id: str) -> str:
    """Return the file's name; a second job in the same tree gets files of its own."""
    return f"iteration_{iteration}.{session_id[:12]}.json"
