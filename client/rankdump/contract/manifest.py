"""The manifest of one iteration of one session: written last, so its presence means complete.

One JSON file under `rank_N/.dump_metadata/manifest/`; it makes the tree describe itself, with
raw operator names, digests and the balance of the iteration. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

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
            records = [
                ManifestRecord(**(record | {"shape": tuple(record["shape"])}))
                for record in body["records"]
            ]
            return Manifest(
                status=IterationStatus(**body["status"]),
                world_size=int(body["world_size"]),
                device=int(body["device"]),
                host=str(body["host"]),
                records=tuple(records),
            )
        except _UNREADABLE as error:
            raise DamagedError(f"manifest cannot be read: {error}") from None


def _fields(record: ManifestRecord) -> dict[str, object]:
    # dataclasses.asdict copies deeply, which costs more than the rest of the file.
    return {name: getattr(record, name) for name in _RECORD_FIELDS}


def manifest_name(iteration: int, session_id: str) -> str:
    """Return the file's name; a second job in the same tree gets files of its own."""
    return f"iteration_{iteration}.{session_id[:12]}.json"
