"""Manifest of one iteration of one session, and the record of iterations that were removed from a
tree. Pure: no clock, no disk, no network.

A manifest is one JSON file under `rank_N/.dump_metadata/manifest/`. It is written last, so its
presence means that the iteration is complete; it makes the tree describe itself, with raw
operator names, digests and the balance of the iteration. Removed iterations are lines of
`rank_N/.dump_metadata/retired.jsonl`, one object a line, added before the first file is removed;
a line may occur twice. Fingerprints are in a file of the same name, but for the suffix, under
`rank_N/.dump_metadata/fingerprint/`, which is written before the manifest.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple, get_type_hints

from rankdump._core.json_values import make_plain, read_json
from rankdump._core.status import IterationStatus
from rankdump._core.tensor_layout import TensorLayout
from rankdump.errors import CorruptedError

MANIFEST_VERSION = 1
# Some 5 MB, of the 100 that an idle agent may take.
_MAX_REMEMBERED_KINDS = 1 << 14
_quote_text = json.encoder.encode_basestring_ascii
_DEFAULT_FIELDS: Mapping[str, Any] = {
    "timestamp_us": 0,
    "member": "",
    "microbatch": None,
    "phase": "",
    "layout": None,
    "baseline": "",
    "same_as": "",
}
"""Fields that are absent in manifests of older versions, or where a record has none."""
_RECORDS_MARK = b', "records": [\n'
_ROW_MARK = b'\n{"path": "", '
"""How a record begins that names no file."""
_CARD_MARK = b'\n], "card": '
"""What is between the last record and a card, which is behind them: a head has to be short."""
_CHECKSUM_PATTERN = re.compile(rb', "crc32": ([0-9]{1,10})\}\Z')
_MAX_SEAL_BYTES = 64
_UNREADABLE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
)


class ManifestRecord(NamedTuple):
    """One tensor of the iteration; a tuple, because there are thousands and it is fast to make."""

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
    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None when it is not divided."""
    phase: str = ""
    """`eval` or `no_grad` for a forward pass that trains nothing; else empty."""
    layout: TensorLayout | None = None
    """Which part of a logical tensor it is; in the file the place among the head's `layouts`."""
    baseline: str = ""
    """Root of the earlier tree with the file of an equal tensor, where `path` names no file; in the
    file the place among the head's `baselines`."""
    same_as: str = ""
    """Path of that file, relative to that root."""


@dataclass(frozen=True, slots=True)
class ManifestSession:
    """Facts from which an agent restores the session without its ledger."""

    pid: int
    framework: str
    device_target: str
    last_sequence: int
    """Number of the frame that ended the iteration; the tree has all frames before it."""
    plan: str
    """The session's plan, as the rank sent it."""


class FingerprintSeal(NamedTuple):
    """What shows that the file of fingerprints is the one that was written."""

    bytes: int
    digest: str
    """xxh3-128 of the file, hexadecimal."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One iteration of one session."""

    status: IterationStatus
    world_size: int
    device: int
    host: str
    records: tuple[ManifestRecord, ...]
    session: ManifestSession | None = None
    """None in manifests of older agents, or of other programs."""
    fingerprints: FingerprintSeal | None = None
    """None where no record has a fingerprint."""
    card: object = None
    """The run card as a value of JSON, which may be damaged; None without one."""

    def to_json(self) -> bytes:
        """Return the file's bytes."""
        head: dict[str, Any] = {
            "version": MANIFEST_VERSION,
            "status": _make_plain_status(self.status),
            "world_size": self.world_size,
            "device": self.device,
            "host": self.host,
            **({"session": self.session} if self.session else {}),
            **({"fingerprints": self.fingerprints._asdict()} if self.fingerprints else {}),
        }
        layouts = {each.layout: 0 for each in self.records if each.layout is not None}
        if layouts:
            head["layouts"] = [*layouts]
            layouts = {layout: number for number, layout in enumerate(layouts)}
        baselines = {each.baseline: 0 for each in self.records if each.baseline}
        if baselines:
            head["baselines"] = [*baselines]
            baselines = {baseline: number for number, baseline in enumerate(baselines)}
        # One record a line: as readable as an indented file, and ten times as fast to make.
        lines = ",\n".join(_format_record(each, layouts, baselines) for each in self.records)
        body = f'{json.dumps(head, default=make_plain)[:-1]}, "records": [\n{lines}\n]'.encode()
        if self.card is not None:
            body += _CARD_MARK[2:] + json.dumps(self.card).encode()
        return body + f', "crc32": {zlib.crc32(body)}}}'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read a file's bytes; CorruptedError when they are not a manifest."""
        try:
            return _parse_manifest(json.loads(data))
        except _UNREADABLE_ERRORS as error:
            raise CorruptedError(f"manifest cannot be read: {error}") from None

    @staticmethod
    def parse_head(line: bytes) -> Manifest | None:
        """Return a manifest without its records from the first line of its file.

        None when the records do not begin after the line: `to_json` did not write it.
        """
        if not line.endswith(_RECORDS_MARK):
            return None
        return Manifest.from_json(line.removesuffix(b"\n") + b"]}")


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    if body["version"] != MANIFEST_VERSION:
        raise ValueError(f"version {body['version']}, but this reader supports {MANIFEST_VERSION}")
    for name, kind in (("world_size", int), ("device", int), ("host", str)):
        _check_column(name, kind, [body[name]])
    # Manifests of the first versions have neither stall nor positions, and those of a first
    # attempt do not number it.
    unsaid: dict[str, Any] = {
        "stall_us": 0,
        "first_position": 0,
        "last_position": 0,
        "attempt": 0,
        "degraded_by": {},
        "same_as_baseline": 0,
    }
    session, seal = body.get("session"), body.get("fingerprints")
    return Manifest(
        status=read_json(IterationStatus, unsaid | body["status"], minimum=0),
        world_size=body["world_size"],
        device=body["device"],
        host=body["host"],
        records=_parse_records(
            body["records"],
            [read_json(TensorLayout, each, minimum=0) for each in body.get("layouts", ())],
            _check_column("baselines", str, body.get("baselines", [])),
        ),
        session=None if session is None else read_json(ManifestSession, session, minimum=0),
        fingerprints=None if seal is None else _parse_seal(seal),
        card=body.get("card"),
    )


def _parse_seal(body: dict[str, Any]) -> FingerprintSeal:
    return FingerprintSeal(
        *_check_column("bytes", int, [body["bytes"]]),
        *_check_column("digest", str, [body["digest"]]),
    )


def _make_plain_status(status: IterationStatus) -> dict[str, Any]:
    plain = make_plain(status)
    # Versions that do not know them read the manifests that do not need them.
    for name in ("attempt", "degraded_by", "same_as_baseline"):
        if not plain[name]:
            del plain[name]
    return plain


def is_intact(data: bytes) -> bool:
    """Return whether the checksum of a manifest's bytes is right.

    A manifest without one, of an early version, counts as intact.
    """
    seal = _find_seal(data)
    return seal is None or zlib.crc32(memoryview(data)[: seal.start()]) == int(seal[1])


def is_sealed(data: bytes) -> bool:
    """Return whether a manifest's bytes end with a checksum; those of an early version, and those
    whose end is lost, do not.
    """
    return _find_seal(data) is not None


def _find_seal(data: bytes) -> re.Match[bytes] | None:
    # Not from the start: a search of all bytes takes longer than their checksum.
    return _CHECKSUM_PATTERN.search(data, max(0, len(data) - _MAX_SEAL_BYTES))


def find_card(end: bytes) -> bytes | None:
    """Return the run card in the last bytes of a manifest, as JSON; empty without one.

    None where the bytes do not reach back to it.
    """
    seal = _find_seal(end)
    if seal is None or end.endswith(_CARD_MARK[:2], 0, seal.start()):
        return b""
    start = end.rfind(_CARD_MARK)
    return None if start < 0 else end[start + len(_CARD_MARK) : seal.start()]


def names_no_file(data: bytes) -> bool:
    """Return whether the bytes of a manifest are intact and none of its records names a file.

    False where the checksum is absent, or another program formatted the records: they have to be
    read to know it.
    """
    if _find_seal(data) is None or not is_intact(data):
        return False
    return data.count(_ROW_MARK) == data.count(b"\n") - 1


def _parse_records(
    bodies: list[Any], layouts: Sequence[TensorLayout], baselines: Sequence[str]
) -> tuple[ManifestRecord, ...]:
    """Return the records, checked column by column; ValueError names a field of another type.

    A check of each field of each record would be a fifth of what opening a tree takes.
    """
    if bodies == []:
        return ()
    present = set(chain.from_iterable(bodies))
    columns: dict[str, list[Any]] = {}
    for name, kind in _get_record_types().items():
        if name in _DEFAULT_FIELDS and name not in present:
            columns[name] = [_DEFAULT_FIELDS[name]] * len(bodies)
        else:
            kind = int | None if name == "baseline" else kind
            columns[name] = _check_column(name, kind, _read_column(bodies, name))
    extra = present.difference(columns)
    if extra:
        raise ValueError(f"a record has the unknown field {min(extra)[:60]!r}")
    columns["shape"] = list(map(tuple, columns["shape"]))
    if "layout" in present:
        columns["layout"] = [_get_at("layout", at, layouts, None) for at in columns["layout"]]
    if "baseline" in present:
        columns["baseline"] = [_get_at("baseline", at, baselines, "") for at in columns["baseline"]]
    return tuple(map(ManifestRecord._make, zip(*columns.values(), strict=True)))


def _read_column(bodies: list[Any], name: str) -> list[Any]:
    if name in _DEFAULT_FIELDS:
        default = None if name == "baseline" else _DEFAULT_FIELDS[name]
        return [body.get(name, default) for body in bodies]
    return [body[name] for body in bodies]


def _get_at(what: str, number: int | None, listed: Sequence[object], without: object) -> object:
    """Return the element that a record refers to, or what stands for none."""
    if number is not None and number >= len(listed):
        raise ValueError(f"a record has {what} {number}, and the manifest has {len(listed)}")
    return without if number is None else listed[number]


@cache
def _get_record_types() -> Mapping[str, Any]:
    return get_type_hints(ManifestRecord)


def _check_column(name: str, kind: Any, column: list[Any]) -> list[Any]:
    """Return values of a field; ValueError names one that is of another type."""
    is_valid, allowed = _COLUMN_CHECKS[kind]
    if not is_valid(column):
        value = next(value for value in column if not is_valid([value]))
        raise ValueError(f"{name} is {str(value)[:60]!r}, not {allowed}")
    return column


def _is_count_column(column: list[Any]) -> bool:
    return set(map(type, column)) <= {int} and min(column, default=0) >= 0


def _is_optional_count_column(column: list[Any]) -> bool:
    return _is_count_column([value for value in column if value is not None])


def _is_shape_column(column: list[Any]) -> bool:
    return set(map(type, column)) <= {list} and _is_count_column([*chain.from_iterable(column)])


_COLUMN_CHECKS: Mapping[Any, tuple[Callable[[list[Any]], bool], str]] = {
    str: (lambda column: set(map(type, column)) <= {str}, "a string"),
    int: (_is_count_column, "a count"),
    int | None: (_is_optional_count_column, "a count"),
    TensorLayout | None: (_is_optional_count_column, "the place of a layout"),
    tuple[int, ...]: (_is_shape_column, "a list of counts"),
}
"""For a type that a field is declared to be, whether values of JSON are of it, and what it is."""


def _format_record(
    record: ManifestRecord, layouts: Mapping[TensorLayout, int], baselines: Mapping[str, int]
) -> str:
    # As `json.dumps` writes it. Only what differs from one iteration to the next is made anew:
    # a step has thousands of records.
    path, timestamp_us, op_type, op_name, argument, dtype, shape = record[:7]
    bytes_in, bytes_stored, digest, member, microbatch, phase, layout, baseline, same_as = record[
        7:
    ]
    kind = _format_record_kind(op_type, op_name, argument, dtype, shape)
    text = (
        f'{{"path": {_quote_text(path)}, "timestamp_us": {timestamp_us}, {kind}, '
        f'"bytes_in": {bytes_in}, "bytes_stored": {bytes_stored}, "digest": {_quote_text(digest)}'
    )
    if member:
        text += f', "member": {_quote_text(member)}'
    if microbatch is not None:
        text += f', "microbatch": {microbatch}'
    if phase:
        text += f', "phase": {_quote_text(phase)}'
    if layout is not None:
        text += f', "layout": {layouts[layout]}'
    if baseline:
        text += f', "baseline": {baselines[baseline]}'
    if same_as:
        text += f', "same_as": {_quote_text(same_as)}'
    return text + "}"


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _format_record_kind(
    op_type: str, op_name: str, argument: str, dtype: str, shape: tuple[int, ...]
) -> str:
    fields = {"op_type": op_type, "op_name": op_name, "argument": argument, "dtype": dtype}
    return json.dumps(fields | {"shape": shape})[1:-1]


_MANIFEST_SUFFIX = ".json"
_NAME_PATTERN = re.compile(r"iteration_([0-9]{1,20})\..*\.json", re.S)


def make_manifest_name(iteration: int, session_id: str) -> str:
    """Return the file's name; a second job in the same tree gets files of its own."""
    return f"iteration_{iteration}.{session_id[:12]}{_MANIFEST_SUFFIX}"


def parse_manifest_name(name: str) -> int | None:
    """Return the iteration in the name of a manifest; None for another file."""
    found = _NAME_PATTERN.fullmatch(name)
    return None if found is None else int(found[1])


def make_fingerprint_name(manifest_name: str) -> str:
    """Return the name of the file with the fingerprints of a manifest's records."""
    return f"{manifest_name.removesuffix(_MANIFEST_SUFFIX)}.npy"


RETIRED_FILE = "retired.jsonl"


@dataclass(frozen=True, slots=True)
class RetiredIteration:
    """A rank's part of an iteration that was removed because of its age, or to free space."""

    job_id: str
    session_id: str
    rank: int
    iteration: int
    at_us: int
    """Start of the removal, since the epoch."""
    why: str
    """`age` or `size`."""

    def to_line(self) -> str:
        """Return its line, without a line end."""
        return json.dumps(make_plain(self))

    @staticmethod
    def from_line(line: str) -> RetiredIteration:
        """Read a line; CorruptedError when it is not valid."""
        try:
            return read_json(RetiredIteration, json.loads(line), unknown=True, minimum=0)
        except (ValueError, RecursionError) as error:
            raise CorruptedError(f"a line of {RETIRED_FILE} cannot be read: {error}") from None
