"""Rows of the tensor table from manifests of rankdump, as columns. A record never becomes an
object, unless its fields have to be derived from the full grammar of file names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from rankdump._analysis.table.table_schema import ITERATION_SCHEMA
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._core.json_values import read_json
from rankdump._core.manifest import Manifest, is_intact, is_sealed
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import TensorLayout
from rankdump._layout.dump_folders import find_folder, parse_name_in_folder
from rankdump._layout.file_name import LongFileNames
from rankdump._layout.tree_paths import CONSTANT_FOLDER, MAPPING_FILE
from rankdump.errors import CorruptedError

UNKNOWN_SIDE = -1
SIDES = (TensorSide.INPUT.value, TensorSide.OUTPUT.value)
_RECORD_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("timestamp_us", pa.int64()),
        ("op_type", pa.string()),
        ("op_name", pa.string()),
        ("argument", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("bytes_in", pa.int64()),
        ("bytes_stored", pa.int64()),
        ("digest", pa.string()),
        ("member", pa.string()),
        ("microbatch", pa.int32()),
        ("phase", pa.string()),
        ("layout", pa.int32()),
        ("baseline", pa.int32()),
        ("same_as", pa.string()),
    ]
)
_SIDE_OF_PATH = (
    r"^.*\.(?P<side>input|output)\.(?P<slot>[0-9]{1,9})\.[^./]+(?:\.[^./]+)?\.npy(?:\.zst)?$"
)
_SIDE_OF_MEMBER = r"^(?P<side>input|output)\.(?P<slot>[0-9]{1,9})$"
_LINE_END = b",\n"
_BLOCK_BYTES = 1 << 18
"""Size in bytes of a block that fits into a core's cache; blocks of megabytes take a
sixth longer.
"""
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(slots=True)
class ManifestColumns:
    """Records of several manifests, as columns."""

    manifests: list[Manifest] = field(default_factory=list[Manifest])
    """The manifests, without their records."""
    records: pa.Table = field(default_factory=_RECORD_SCHEMA.empty_table)
    """Records as in the manifests, except that `layout` is a text and `same_as` a whole path, and
    with the columns `slot` and `side`: 0 for an input, 1 for an output, UNKNOWN_SIDE if only a
    table of statistics tells.
    """
    manifest_of: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Index into `manifests` for each record."""
    paths: list[str] = field(default_factory=list[str])
    """Paths of the manifests, relative to the root."""
    unread_paths: set[str] = field(default_factory=set[str])
    """Paths of the manifests that could not be read."""
    disk_errors: list[OSError] = field(default_factory=list[OSError])
    """Errors of manifests that may become readable later."""


@dataclass(frozen=True, slots=True)
class _ManifestFile:
    """A manifest that was read: its head, and its records as lines of JSON."""

    path: str
    manifest: Manifest
    layouts: tuple[str, ...]
    baselines: tuple[str, ...]
    lines: bytes

    @property
    def count(self) -> int:
        """Number of the records."""
        return self.lines.count(b"\n") + 1 if self.lines else 0


def read_manifest_columns(
    access: TreeAccess, paths: Sequence[str], problems: list[str]
) -> ManifestColumns:
    """Return the records of manifests; add a problem for each manifest that cannot be read."""
    files, disk_errors = list[_ManifestFile](), list[OSError]()
    for path in paths:
        try:
            files.append(_read_file(access, path))
        except FileNotFoundError:
            continue  # the manifest was removed after it was listed
        except CorruptedError as error:
            problems.append(f"{access.root / path}: {error}")
        except OSError as error:
            disk_errors.append(error)
            problems.append(f"{access.root / path}: cannot be read: {error.strerror}")
    if not files:
        return ManifestColumns(unread_paths=set(paths), disk_errors=disk_errors)
    records, files = _parse_records(files, problems)
    counts = np.array([each.count for each in files], np.int64)
    manifest_of = np.repeat(np.arange(len(files)), counts)
    layouts = _take_texts(records.column("layout"), [each.layouts for each in files], manifest_of)
    records = records.set_column(records.schema.get_field_index("layout"), "layout", layouts)
    records = _join_baseline_paths(records, files, manifest_of)
    records = _add_sides(access, records)
    read = [each.path for each in files]
    manifests = [each.manifest for each in files]
    return ManifestColumns(
        manifests, records, manifest_of, read, {*paths}.difference(read), disk_errors
    )


def _read_file(access: TreeAccess, path: str) -> _ManifestFile:
    folder, _, name = path.rpartition("/")
    data = access.read(folder, name)
    if not is_intact(data):
        raise CorruptedError("manifest cannot be read: its checksum is wrong")
    if is_sealed(data):
        with suppress(ValueError):
            return _split_file(path, data)
    # Another program or an early version formatted the manifest, or its end is lost.
    return _split_file(path, _format_again(data))


def _split_file(path: str, data: bytes) -> _ManifestFile:
    """Return the parts of a manifest in the format of `Manifest.to_json`; ValueError for another
    format.
    """
    first, found, rest = data.partition(b"\n")
    manifest = Manifest.parse_head(first + found)
    end = rest.rfind(b"\n]")
    if manifest is None or end < 0:
        raise ValueError("the records of the manifest are not lines")
    layouts: tuple[str, ...] = ()
    if b'"layouts": ' in first:
        listed = json.loads(first + b"]}")["layouts"]
        layouts = tuple(str(read_json(TensorLayout, each, minimum=0)) for each in listed)
    baselines: tuple[str, ...] = ()
    if b'"baselines": ' in first:
        baselines = tuple(map(str, json.loads(first + b"]}")["baselines"]))
    return _ManifestFile(path, manifest, layouts, baselines, rest[:end])


def _format_again(data: bytes) -> bytes:
    manifest = Manifest.from_json(data)
    records = tuple(
        record._replace(**{name: _make_text(getattr(record, name)) for name in _NAMES})
        for record in manifest.records
    )
    return replace(manifest, records=records, card=None).to_json()


_NAMES = ("path", "op_type", "op_name", "argument")


def _make_text(text: str) -> str:
    """Return a text that can be encoded as UTF-8, because names of files may have any bytes."""
    return text.encode("utf-8", "replace").decode()


def _parse_records(
    files: list[_ManifestFile], problems: list[str]
) -> tuple[pa.Table, list[_ManifestFile]]:
    """Return the records of all files, and the files that could be read."""
    try:
        return _parse_lines(files), files
    except pa.ArrowException:
        pass
    # Arrow rejected at least one of the files, so each is read by itself.
    tables: list[pa.Table] = []
    kept: list[_ManifestFile] = []
    for each in files:
        status = each.manifest.status
        try:
            try:
                tables.append(_parse_lines([each]))
            except pa.ArrowException:
                each = _repair(each)
                tables.append(_parse_lines([each]))
            kept.append(each)
        except (pa.ArrowException, CorruptedError) as error:
            where = f"the manifest of rank {status.rank}, iteration {status.iteration}"
            problems.append(f"{where}: {error}")
    if not tables:
        return _RECORD_SCHEMA.empty_table(), []
    return pa.concat_tables(tables), kept


def _repair(file: _ManifestFile) -> _ManifestFile:
    """Return a file with texts that Arrow can read; CorruptedError if a line is no record."""
    try:
        records = [json.loads(line.removesuffix(b",")) for line in file.lines.split(b"\n")]
        lines = [
            json.dumps({k: _make_text(v) if isinstance(v, str) else v for k, v in each.items()})
            for each in records
        ]
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptedError(f"a record cannot be read: {error}") from None
    return replace(file, lines=",\n".join(lines).encode())


def _parse_lines(files: Sequence[_ManifestFile]) -> pa.Table:
    lines = b"\n".join(each.lines.replace(b"}" + _LINE_END, b"}\n") for each in files if each.lines)
    if not lines:
        return _RECORD_SCHEMA.empty_table()
    try:
        table = _read_json_lines(lines + b"\n", _BLOCK_BYTES)
    except pa.ArrowInvalid:
        # A line must fit into the block that is read at a time.
        block_bytes = min(max(1 << 20, len(lines) // 4), _MAX_BLOCK_BYTES)
        table = _read_json_lines(lines + b"\n", block_bytes)
    if len(table) != sum(each.count for each in files):
        raise pa.ArrowInvalid("a record is not on a line of its own")
    return table.select(_RECORD_SCHEMA.names).cast(_RECORD_SCHEMA)


def _read_json_lines(lines: bytes, block_bytes: int) -> pa.Table:
    return arrow_json.read_json(
        pa.BufferReader(lines),
        arrow_json.ReadOptions(use_threads=False, block_size=block_bytes),
        arrow_json.ParseOptions(
            explicit_schema=_RECORD_SCHEMA,
            unexpected_field_behavior="error",
            newlines_in_values=False,
        ),
    )


def _take_texts(
    numbers: pa.ChunkedArray, lists: Sequence[Sequence[str]], manifest_of: npt.NDArray[np.int64]
) -> Any:
    """Return the texts with these numbers in the lists of their manifests; NULL for a number
    without a text.
    """
    texts = [text for own in lists for text in own]
    if not texts:
        return pa.nulls(len(numbers), pa.string())
    starts = np.cumsum([0, *map(len, lists)])[:-1]
    known = pc.add(numbers.cast(pa.int64()), pa.array(starts[manifest_of]))
    is_known = pc.and_(pc.greater_equal(known, 0), pc.less(known, len(texts)))
    return pc.take(pa.array(texts, pa.string()), pc.if_else(is_known, known, None))


def _join_baseline_paths(
    records: pa.Table, files: Sequence[_ManifestFile], manifest_of: npt.NDArray[np.int64]
) -> pa.Table:
    """Put the root of the baseline in front of the paths of tensors that are the same there."""
    lists = [[f"{text}/" for text in each.baselines] for each in files]
    if not any(lists):
        return records
    roots = _take_texts(records.column("baseline"), lists, manifest_of)
    paths = pc.binary_join_element_wise(roots, records.column("same_as"), "")
    return records.set_column(records.schema.get_field_index("same_as"), "same_as", paths)


def _add_sides(access: TreeAccess, records: pa.Table) -> pa.Table:
    """Add the columns `side` and `slot`."""
    sides = np.full(len(records), UNKNOWN_SIDE, np.int64)
    slots = np.zeros(len(records), np.int64)
    members = records.column("member").fill_null("")
    paths = records.column("path")
    for texts, pattern in ((paths, _SIDE_OF_PATH), (members, _SIDE_OF_MEMBER)):
        found = pc.extract_regex(texts, pattern)
        known = pc.is_valid(found).to_numpy()
        if known.any():
            sides[known] = _number_sides(pc.struct_field(found, "side"))[known]
            text = pc.struct_field(found, "slot").filter(pa.array(known))
            slots[known] = text.cast(pa.int64()).to_numpy()
    named = pc.not_equal(paths, "").to_numpy()
    for row in np.flatnonzero((sides == UNKNOWN_SIDE) & named).tolist():
        sides[row], slots[row] = _parse_path(access, paths[row].as_py())
    return records.append_column("side", pa.array(sides)).append_column("slot", pa.array(slots))


def _number_sides(texts: Any) -> npt.NDArray[np.int64]:
    """Return 0 for the text of an input, 1 for the text of an output."""
    return pc.index_in(texts, pa.array(SIDES)).fill_null(0).to_numpy().astype(np.int64)


def _parse_path(access: TreeAccess, path: str) -> tuple[int, int]:
    """Return side and slot by the whole grammar of file names, which includes shortened names."""
    parent, _, name = path.rpartition("/")
    folder = find_folder(parent)
    if folder is not None:
        file = parse_name_in_folder(folder, _get_long_name(access, parent, name))
        if file is not None:
            return SIDES.index(file.side.value), file.slot
    return UNKNOWN_SIDE, 0


def _get_long_name(access: TreeAccess, folder: str, name: str) -> str:
    try:
        return _read_long_names(access, folder).get_full_name(name)
    except (OSError, CorruptedError):
        return name


@lru_cache(maxsize=8)
def _read_long_names(access: TreeAccess, folder: str) -> LongFileNames:
    try:
        return LongFileNames.parse(access.read(folder, MAPPING_FILE))
    except FileNotFoundError:
        return LongFileNames()


def find_constants(records: pa.Table) -> pa.ChunkedArray:
    """Return which records are of constants, which belong to no iteration."""
    # Only the last folder counts, because a model may have the same name.
    return pc.match_substring_regex(records.column("path"), f"/{CONSTANT_FOLDER}/[^/]*$")


def make_iteration_table(manifests: Sequence[Manifest]) -> pa.Table:
    """Return the rows of the iteration table for these manifests."""
    rows = [
        {
            "job": status.job_id,
            "attempt": status.attempt,
            "session": status.session_id,
            "rank": status.rank,
            "iteration": status.iteration,
            "expected": status.expected,
            "stored": status.stored,
            "linked": status.linked,
            "degraded": status.degraded,
            "dropped": sum(status.dropped.values()),
            "dropped_by": list(status.dropped.items()),
            "degraded_by": list(status.degraded_by.items()),
            "bytes": status.bytes_in,
            "stored_bytes": status.bytes_stored,
            "stall_us": status.stall_us,
            "same_as_baseline": status.same_as_baseline,
            "host": manifest.host,
        }
        for manifest in manifests
        for status in [manifest.status]
    ]
    return pa.Table.from_pylist(rows, ITERATION_SCHEMA)
