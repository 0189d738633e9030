"""Manifests of ingested files by rank and iteration, as if a rankdump job had written the tree.

Operator names are taken from file names, with the full names that `mapping.csv` has for shortened
ones, and from the headers of bin files. Iterations with a manifest of a rankdump job get none.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from rankdump._core.cann_types import normalize_element_name
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.record import TensorKey
from rankdump._core.status import IterationStatus
from rankdump._layout import statistic_tables
from rankdump._layout import tree_paths as layout
from rankdump._layout.dump_folders import parse_tensor_path
from rankdump._layout.file_name import (
    PACKED_SUFFIX,
    FileKind,
    FileName,
    LongFileNames,
    parse_file_name,
)
from rankdump._layout.statistic_tables import StatisticCsvRow
from rankdump._layout.tree_paths import MAPPING_FILE
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import format_member
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.ingest.dump_file import DumpFileKind, FileTensor, IngestedFile, classify_file
from rankdumpd.ingest.folder import IngestFolder
from rankdumpd.ingest.state import IngestState, RankIteration


def locate_iteration(path: str) -> RankIteration | None:
    """Return the rank and iteration that a file's folder belongs to; None if it belongs to none."""
    folder, _, name = path.rpartition("/")
    # Files of other kinds in the folder do not describe tensors.
    tables = name == MAPPING_FILE or statistic_tables.STATISTIC_TABLE_NAME.fullmatch(name)
    tensors = classify_file(name) in (DumpFileKind.NPY, DumpFileKind.BIN)
    return _locate_folder(folder) if tables or tensors or _parse_operator(name) else None


def _parse_operator(name: str) -> FileName | None:
    """Return the operator of one of CANN's statistic tables; None for the name of another file."""
    file = parse_file_name(name)
    return file if file is not None and file.kind is FileKind.TABLE else None


@lru_cache(maxsize=1024)
def _locate_folder(folder: str) -> RankIteration | None:
    key = parse_tensor_path(f"{folder}/Any.any.0.0.0.output.0.ND.npy")
    return (key.rank, key.iteration) if key else None


class ManifestIndex:
    """Writes the manifests of one tree for its ingested files."""

    def __init__(
        self, state: IngestState, tree: DumpTree, *, source: IngestFolder, target: IngestFolder
    ) -> None:
        """`target` is the root folder of the tree."""
        self._state, self._tree = state, tree
        self._source, self._target = source, target
        self._session = state.get_session_id()
        self._latest: dict[int, int] = {}

    def note_iteration(self, place: RankIteration) -> list[RankIteration]:
        """Note that an iteration has files; return the earlier iterations of its rank, which are
        over now.
        """
        rank, iteration = place
        latest = self._latest.get(rank)
        if latest is None or iteration <= latest:
            self._latest.setdefault(rank, iteration)
            return []
        self._latest[rank] = iteration
        return [(rank, i) for r, i in self._state.list_unindexed() if r == rank and i < iteration]

    def write_manifests(self) -> None:
        """Write the manifest of every iteration with tensors that are in no manifest."""
        for place in self._state.list_unindexed():
            self.write_manifest(place)

    def write_manifest(self, place: RankIteration) -> None:
        """Write the manifest of an iteration, unless it has one that the ingest did not write."""
        rank, iteration = place
        folder = f"{layout.make_rank_folder(rank)}/{layout.MANIFEST_FOLDER}"
        name = make_manifest_name(iteration, self._session)
        if not self._has_another(folder, iteration, name):
            files = self._state.list_iteration_files(place)
            linked = {file.target for file in files if file.linked}
            records = sorted(self._records(files), key=lambda r: (r.timestamp_us, r.path, r.member))
            data = self._manifest(place, tuple(records), linked).to_json()
            self._tree.put(folder, name, (data,), mark=f"ingest-{name}")
        self._state.mark_indexed(place)

    def _has_another(self, folder: str, iteration: int, own: str) -> bool:
        names = self._source.names(folder) | self._target.names(folder)
        return any(name.startswith(f"iteration_{iteration}.") for name in names - {own})

    def _manifest(
        self, place: RankIteration, records: tuple[ManifestRecord, ...], linked: set[str]
    ) -> Manifest:
        links = sum(record.path in linked for record in records)
        rank, iteration = place
        status = IterationStatus(
            job_id=f"ingest-{self._session[:8]}",
            session_id=self._session,
            rank=rank,
            iteration=iteration,
            complete=True,
            expected=len(records),
            stored=len(records) - links,
            linked=links,
            bytes_in=sum(record.bytes_in for record in records),
            bytes_stored=sum(record.bytes_stored for record in records),
        )
        # Files do not tell the number of ranks: a host has only the files of its own ranks or
        # devices.
        return Manifest(status, 0, rank, socket.gethostname(), records)

    def _records(self, files: list[IngestedFile]) -> Iterator[ManifestRecord]:
        names = {
            folder: LongFileNames(self._tree.lines(folder, MAPPING_FILE))
            for folder in dict.fromkeys(map(_get_folder, files))
        }
        stamps: set[int] = set()
        tables: list[IngestedFile] = []
        for file in files:
            name = names[_get_folder(file)].get_full_name(_get_name(file))
            for number, member in enumerate(file.members):
                key = _build_member_key(file, name, member)
                if key:
                    stamps.add(key.timestamp_us)
                    # The bytes of a file are counted once, with its first tensor.
                    yield _build_record(file, key, member, stored=not (number or file.linked))
            if statistic_tables.STATISTIC_TABLE_NAME.fullmatch(_get_name(file)):
                tables.append(file)
            elif operator := _parse_operator(name):
                yield from self._operator_rows(file, operator)
        for table in tables:
            yield from self._rows(table, stamps)

    def _operator_rows(self, table: IngestedFile, operator: FileName) -> Iterator[ManifestRecord]:
        """Yield the rows of a table that CANN writes for one operator in place of a file."""
        with suppress(CorruptedError):  # readers of the table report the damage
            for row in statistic_tables.parse_operator_table(
                self._read_text(table), operator, file=table.path
            ):
                dtype = normalize_element_name(row.dtype)
                yield _build_row_record(row, dtype, format_member(row.side, row.slot))

    def _rows(self, table: IngestedFile, stamps: set[int]) -> Iterator[ManifestRecord]:
        """Yield the rows of a table whose tensors have no file, as with `saved_data: statistic`."""
        with suppress(CorruptedError):  # readers of the table report the damage
            for row in statistic_tables.parse_statistic_table(
                self._read_text(table), file=table.path
            ):
                if row.timestamp_us not in stamps:
                    yield _build_row_record(row, row.dtype)

    def _read_text(self, table: IngestedFile) -> str:
        return "\n".join(self._tree.lines(_get_folder(table), _get_name(table)))


def _build_row_record(row: StatisticCsvRow, dtype: str, member: str = "") -> ManifestRecord:
    return ManifestRecord(
        path="",
        timestamp_us=row.timestamp_us,
        op_type=row.op_type,
        op_name=row.op_name,
        argument="",
        dtype=dtype,
        shape=row.shape,
        bytes_in=row.data_bytes,
        bytes_stored=0,
        digest="",
        member=member,
    )


def _build_record(
    file: IngestedFile, key: TensorKey, member: FileTensor, *, stored: bool
) -> ManifestRecord:
    # MindSpore 2.4 and later put the element type into the file name; of an element type that was
    # widened when it was saved, only the name tells the original type.
    held = ELEMENT_TYPES.get(key.element.lower())
    widened = held if held and held.is_widened and member.dtype == "float32" else None
    return ManifestRecord(
        path=file.target,
        timestamp_us=key.timestamp_us,
        op_type=key.op_type,
        op_name=member.op_name or key.op_name,
        argument="",
        dtype=widened.name if widened else member.dtype,
        shape=member.shape,
        bytes_in=math.prod(member.shape) * widened.item_bytes if widened else member.bytes_in,
        bytes_stored=file.stored.size_bytes if stored else 0,
        digest=member.digest,
        member=member.name,
    )


def _build_member_key(file: IngestedFile, name: str, member: FileTensor) -> TensorKey | None:
    name = name.removesuffix(PACKED_SUFFIX)
    if member.name:  # the name that a file with this tensor alone would have
        name = f"{name}.{member.name}.ND.npy"
    return parse_tensor_path(f"{_get_folder(file)}/{name}")


def _get_folder(file: IngestedFile) -> str:
    return file.path.rpartition("/")[0]


def _get_name(file: IngestedFile) -> str:
    return file.path.rpartition("/")[2]
