"""Manifest of one iteration of one session, and the records of iterations that were removed from a
tree. Pure: no clock, no disk, no network.

A manifest is one JSON file under `rank_N/.dump_metadata/manifest/`. It is written last, so its
presence means that the iteration is complete. It makes the tree self-describing, with original
operator names, digests and the balance of the iteration. Removed iterations are listed in
`rank_N/.dump_metadata/retired.jsonl`, one JSON object per line, which is added before the first
file is removed; a line may occur twice. Fingerprints are in a file with the manifest's name and
another suffix under `rank_N/.dump_metadata/fingerprint/`, which is written before the manifest.
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
# These kinds take about 5 MB of the 100 MB that an idle agent may use.
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
"""Values of fields that are absent in manifests of older versions, or in records that do not need
them.
"""
_RECORDS_MARK = b', "records": [\n'
_ROW_MARK = b'\n{"path": "", '
"""Beginning of a record that names no file."""
_CARD_MARK = b'\n], "card": '
"""Text between the last record and the run card. The card comes after the records because the head
has to be short.
"""
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
    """Record of one tensor of the iteration; a tuple, because tuples are created fast and there are
    thousands.
    """

    path: str
    """Path of the file relative to the root of the tree; empty if only a row of `statistic.csv` was
    written.
    """
    timestamp_us: int
    """Time stamp in the name of the file, or in the row, in microseconds since the epoch."""
    op_type: str
    op_name: str
    """Full scope name as the framework has it, not as file names spell it."""
    argument: str
    dtype: str
    """Element type that the framework used; the file may hold a wider type."""
    shape: tuple[int, ...]
    bytes_in: int
    bytes_stored: int
    digest: str
    """xxh3-128 of the elements as the framework held them, in hexadecimal digits."""
    member: str = ""
    """Side and slot, such as `input.0`, if path or time stamp belong to a whole operator."""
    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None if the iteration is not divided."""
    phase: str = ""
    """`eval` or `no_grad` for a forward pass without training; else empty."""
    layout: TensorLayout | None = None
    """Part of a logical tensor that the tensor is; in the file, an index into the
    head's `layouts`.
    """
    baseline: str = ""
    """Root of an earlier tree with the file of an equal tensor, if `path` names no file; in the
    manifest file, an index into the head's `baselines`.
    """
    same_as: str = ""
    """Path of that equal tensor's file, relative to the root of the earlier tree."""


@dataclass(frozen=True, slots=True)
class ManifestSession:
    """Facts from which an agent that lost its ledger restores the session."""

    pid: int
    framework: str
    device_target: str
    last_sequence: int
    """Sequence number of the frame that ended the iteration; the tree contains all frames before
    it.
    """
    plan: str
    """The session's plan as JSON, as the rank sent it."""


class FingerprintSeal(NamedTuple):
    """Checksum that shows that the file of fingerprints is the one that was written with the
    manifest.
    """

    bytes: int
    digest: str
    """xxh3-128 of the file of fingerprints, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one iteration of one session."""

    status: IterationStatus
    world_size: int
    device: int
    host: str
    records: tuple[ManifestRecord, ...]
    session: ManifestSession | None = None
    """Facts about the session; None in manifests of older agents or of other programs."""
    fingerprints: FingerprintSeal | None = None
    """Checksum of the file of fingerprints; None if no record has a fingerprint."""
    card: object = None
    """The run card as a JSON value, which may be damaged; None if there is none."""

    def to_json(self) -> bytes:
        """Return the manifest as the bytes of its file."""
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
        # Each record is one line: as readable as an indented file, and made in a tenth of the time.
        lines = ",\n".join(_format_record(each, layouts, baselines) for each in self.records)
        body = f'{json.dumps(head, default=make_plain)[:-1]}, "records": [\n{lines}\n]'.encode()
        if self.card is not None:
            body += _CARD_MARK[2:] + json.dumps(self.card).encode()
        return body + f', "crc32": {zlib.crc32(body)}}}'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Parse the bytes of a file; CorruptedError if they are not a manifest."""
        try:
            return _parse_manifest(json.loads(data))
        except _UNREADABLE_ERRORS as error:
            raise CorruptedError(f"manifest cannot be read: {error}") from None

    @staticmethod
    def parse_head(line: bytes) -> Manifest | None:
        """Return the manifest without its records, from the first line of its file.

        None if the records do not begin after this line, because the file was not written by
        `to_json`.
        """
        if not line.endswith(_RECORDS_MARK):
            return None
        return Manifest.from_json(line.removesuffix(b"\n") + b"]}")


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    if body["version"] != MANIFEST_VERSION:
        raise ValueError(f"version {body['version']}, but this reader supports {MANIFEST_VERSION}")
    for name, kind in (("world_size", int), ("device", int), ("host", str)):
        _check_column(name, kind, [body[name]])
    # Manifests of the first versions have neither stall nor positions, and a first attempt is not
    # numbered.
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
    # These fields are left out if they are empty, so that versions that do not know them can read
    # the manifest.
    for name in ("attempt", "degraded_by", "same_as_baseline"):
        if not plain[name]:
            del plain[name]
    return plain


def is_intact(data: bytes) -> bool:
    """Return whether the checksum at the end of a manifest is right.

    A manifest of an early version, which has no checksum, counts as intact.
    """
    seal = _find_seal(data)
    return seal is None or zlib.crc32(memoryview(data)[: seal.start()]) == int(seal[1])


def is_sealed(data: bytes) -> bool:
    """Return whether the bytes of a manifest end with a checksum; manifests of an early version do
    not, nor does a file whose end is lost.
    """
    return _find_seal(data) is not None


def _find_seal(data: bytes) -> re.Match[bytes] | None:
    # Only the end is searched: searching all bytes would take longer than computing their checksum.
    return _CHECKSUM_PATTERN.search(data, max(0, len(data) - _MAX_SEAL_BYTES))


def find_card(end: bytes) -> bytes | None:
    """Return the JSON of the run card, given the last bytes of a manifest; empty if there is no
    card.

    None if the given bytes do not contain the begin of the card.
    """
    seal = _find_seal(end)
    if seal is None or end.endswith(_CARD_MARK[:2], 0, seal.start()):
        return b""
    start = end.rfind(_CARD_MARK)
    return None if start < 0 else end[start + len(_CARD_MARK) : seal.start()]


def names_no_file(data: bytes) -> bool:
    """Return whether a manifest is intact and none of its records names a file.

    False if the checksum is absent or if another program formatted the records, because only
    parsing the records would tell.
    """
    if _find_seal(data) is None or not is_intact(data):
        return False
    return data.count(_ROW_MARK) == data.count(b"\n") - 1


def _parse_records(
    bodies: list[Any], layouts: Sequence[TensorLayout], baselines: Sequence[str]
) -> tuple[ManifestRecord, ...]:
    """Return the records, whose fields are checked column by column; ValueError names a field with
    a value of the wrong type.

    Checking each field of each record would take a fifth of the time of opening a tree.
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
    """Return the element of a list in the head that a record refers to by index, or `without` for
    None.
    """
    if number is not None and number >= len(listed):
        raise ValueError(f"a record has {what} {number}, and the manifest has {len(listed)}")
    return without if number is None else listed[number]


@cache
def _get_record_types() -> Mapping[str, Any]:
    return get_type_hints(ManifestRecord)


def _check_column(name: str, kind: Any, column: list[Any]) -> list[Any]:
    """Return the values of a field; ValueError names one of the wrong type."""
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
"""For each declared type of a field: a check that all JSON values of a column have it, and its name
in messages.
"""


def _format_record(
    record: ManifestRecord, layouts: Mapping[TensorLayout, int], baselines: Mapping[str, int]
) -> str:
    # The result equals that of `json.dumps`. Only what changes from one iteration to the next is
    # formatted again, because a step has thousands of records.
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
    """Return the name of a manifest file; the session id separates the files of two jobs in one
    tree.
    """
    return f"iteration_{iteration}.{session_id[:12]}{_MANIFEST_SUFFIX}"


def parse_manifest_name(name: str) -> int | None:
    """Return the iteration in the name of a manifest; None for any other file."""
    found = _NAME_PATTERN.fullmatch(name)
    return None if found is None else int(found[1])


def make_fingerprint_name(manifest_name: str) -> str:
    """Return the name of the file with the fingerprints of a manifest's records."""
    return f"{manifest_name.removesuffix(_MANIFEST_SUFFIX)}.npy"


RETIRED_FILE = "retired.jsonl"


@dataclass(frozen=True, slots=True)
class RetiredIteration:
    """Record of one rank's part of an iteration that was removed because of its age or to free
    space.
    """

    job_id: str
    session_id: str
    rank: int
    iteration: int
    at_us: int
    """Start of the removal in microseconds since the epoch."""
    why: str
    """Reason of the removal: `age` or `size`."""

    def to_line(self) -> str:
        """Return the record as a line, without the line end."""
        return json.dumps(make_plain(self))

    @staticmethod
    def from_line(line: str) -> RetiredIteration:
        """Parse a line; CorruptedError if it is not valid."""
        try:
            return read_json(RetiredIteration, json.loads(line), unknown=True, minimum=0)
        except (ValueError, RecursionError) as error:
            raise CorruptedError(f"a line of {RETIRED_FILE} cannot be read: {error}") from None
