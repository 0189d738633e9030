"""The manifest of one iteration of one session: written last, so its presence means complete.

One JSON file under `rank_N/.dump_metadata/manifest/`; it makes the tree describe itself, with
raw operator names, digests and the balance of the iteration. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from rankdump.contract.errors import DamagedError
from rankdump.contract.status import IterationStatus

MANIFEST_VERSION = 1
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """One tensor of the iteration."""

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


_RECORD_FIELDS = tuple(field.name for field in fields(ManifestRecord))


@dataclass(frozen=True, slots=True)
class Manifest:
    """One iteration of one session."""

    status: IterationStatus
    world_size: int
    device: int
    host: str
    records: tuple[ManifestRecord, ...]

    def to_json(self) -> bytes:
        """Return the file's bytes."""
        head = {
            "version": MANIFEST_VERSION,
            "status": asdict(self.status) | {"dropped": dict(self.status.dropped)},
            "world_size": self.world_size,
            "device": self.device,
            "host": self.host,
        }
        # One record a line: as readable as an indented file, and ten times as fast to make.
        lines = ",\n".join(json.dumps(_fields(record)) for record in self.records)
        return f'{json.dumps(head)[:-1]}, "records": [\n{lines}\n]}}'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read the file's bytes back; DamagedError when they are anything else."""
        try:
            body: dict[str, Any] = json.loads(data)
            if body["version"] != MANIFEST_VERSION:
                raise ValueError(f"version {body['version']}, this reader knows {MANIFEST_VERSION}")
            for name in ("world_size", "device"):
                _check(name, "int", body[name])
            _check("host", "str", body["host"])
            return Manifest(
                status=IterationStatus(**_checked(IterationStatus, body["status"])),
                world_size=body["world_size"],
                device=body["device"],
                host=body["host"],
                records=tuple(map(_record, body["records"])),
            )
        except _UNREADABLE as error:
            raise DamagedError(f"manifest cannot be read: {error}") from None


def _record(body: Any) -> ManifestRecord:
    # Manifests of before there were rows say no time.
    values = _checked(ManifestRecord, {"timestamp_us": 0} | body)
    values["shape"] = tuple(values["shape"])
    return ManifestRecord(**values)


def _checked(kind: type, body: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are; ValueError names one that is of another type.

    Readers sort by them, add them up and join them with text.
    """
    for each in fields(kind):
        _check(each.name, str(each.type), body[each.name])
    return body


def _check(name: str, kind: str, value: object) -> None:
    if not _KINDS[kind](value):
        raise ValueError(f"{name} is {str(value)[:60]!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, cast("list[object]", value)))


def _are_named_counts(value: Any) -> bool:
    return isinstance(value, dict) and _are_counts(list(cast("dict[str, object]", value).values()))


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "str": _is_text,
    "int": _is_count,
    "bool": lambda value: isinstance(value, bool),
    "tuple[int, ...]": _are_counts,
    "Mapping[str, int]": _are_named_counts,
}
"""Whether a value of JSON is one of that type, by the type as a dataclass declares it."""


def _fields(record: ManifestRecord) -> dict[str, object]:
    # dataclasses.asdict copies deeply, which costs more than the rest of the file.
    return {name: getattr(record, name) for name in _RECORD_FIELDS}


def manifest_name(iteration: int, session_id: str) -> str:
    """Return the file's name; a second job in the same tree gets files of its own."""
    return f"iteration_{iteration}.{session_id[:12]}.json"
