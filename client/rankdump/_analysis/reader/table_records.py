"""Records in the manifests of a tree that belong to the rows of its tables of statistics. The
records of a few manifests are in memory as objects; of all other records of a rank, only their time
stamps are, as a column.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.full_names import FullNames
from rankdump._analysis.reader.manifests import (
    ManifestFileName,
    StatusAndRecord,
    list_manifest_files,
    list_rank_manifests,
    read_manifests,
)
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Figures, Table, Tree
from rankdump._core.manifest import Manifest, ManifestRecord, is_intact
from rankdump._core.status import IterationStatus
from rankdump._layout import api_tree
from rankdump._layout.api_tree import parse_place
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN
from rankdump._layout.statistic_tables import StatisticCsvRow
from rankdump.errors import CorruptedError

MAX_STAMP_US = (1 << 63) - 1
"""Larger time stamps of other programs count as this one, because a column cannot hold them."""
_MAX_HELD = 4
"""Number of manifests whose records are kept, because rows follow each other by iteration, also
with two attempts.
"""
_STAMP = re.compile(rb'"timestamp_us":\s*([0-9]+)')


class TableRecords:
    """Finds the records that rows belong to, and says which iterations are requested."""

    def __init__(self, tree: Tree, queries: Sequence[Query] = ()) -> None:
        """If the tree is restricted to a job and an attempt, only their records are found.

        Rows outside of the ranks and iterations in `queries`, and in the queries that the tree was
        read with, are not requested.
        """
        self._tree, self.job_id = tree, tree.job_id
        self._queries = (*tree.queries, *queries)
        self._key: tuple[str, int, int | None] | None = None
        self._held = _RankRecords(self, [])
        self._full_names = FullNames(tree.root)

    def is_selected(self, row: Figures, table: Table) -> bool:
        """Return whether a row belongs to the selected job and attempt."""
        attempt = self._tree.attempt
        if self.job_id or (table.info and attempt is not None):
            return row.record is not None
        key = row.key
        return (
            attempt is None
            or self._tree.periods.find_attempt(key.rank, key.timestamp_us) == attempt
        )

    def selects(self, status: IterationStatus) -> bool:
        """Return whether an iteration belongs to the selected job and attempt."""
        is_of_job = self.job_id in ("", status.job_id)
        return is_of_job and self._tree.attempt in (None, status.attempt)

    def is_asked(self, table: Table, iteration: int) -> bool:
        """Return whether rows of an iteration are requested from a table with several
        iterations.
        """
        return all(each.keeps_place(table.rank, table.graph, iteration) for each in self._queries)

    def find_of_row(self, table: Table, row: StatisticCsvRow) -> tuple[ManifestRecord | None, str]:
        """Return the record of a row's tensor, which is found by its time stamp, unique within its
        rank. If there is none, return None and the full name of the operator, if that is known.
        """
        found = self._load(table).find_record(row.timestamp_us, f"{row.side.value}.{row.slot}")
        return found, "" if found else self._full_names.find(table.rank, row.op_name)

    def find_iterations(self, table: Table, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the iteration of the record with each time stamp; for a time stamp without a
        record, the table's iteration.
        """
        return self._load(table).find_iterations(stamps, absent=table.iteration)

    def find_iteration(self, table: Table) -> int:
        """Return the iteration of a table with only one: that of its folder, or of the time stamp
        in its name.
        """
        if table.dated or table.operator is None:
            return table.iteration
        stamps = _clip_stamps([table.operator.timestamp_us])
        return int(self.find_iterations(table, stamps)[0])

    def has_manifests(self, table: Table) -> bool:
        """Return whether the rank of a table has manifests."""
        return bool(self._load(table).files)

    def records_by_name(self, table: Table, iteration: int) -> dict[str, list[StatusAndRecord]]:
        """Return the records of an iteration by name, for an info file, which has no time stamps.

        Records with the same name are in the order of time.
        """
        found: dict[str, list[StatusAndRecord]] = {}
        files = self._load(table).files
        named = (file for file in files if file.iteration in (None, iteration))
        for manifest in read_manifests(named, []):
            if manifest.status.iteration == iteration:
                _add_call_records(found, manifest)
        for every in found.values():
            every.sort(key=lambda each: each[1].timestamp_us)
        return found

    def _load(self, table: Table) -> _RankRecords:
        base = table.relative.partition("/")[0]
        is_ranked = RANK_FOLDER_PATTERN.fullmatch(base) is not None
        at = table.iteration if is_ranked and table.dated and not table.constant else None
        key = base if is_ranked else "", table.rank, at
        if key != self._key:
            root = self._tree.root
            files = (
                list_manifest_files(root, base, [])
                if is_ranked
                else list_rank_manifests(root, table.rank)
            )
            wanted = [file for file in files if at is None or file.iteration in (None, at)]
            self._key, self._held = key, _RankRecords(self, wanted)
        return self._held


def _add_call_records(found: dict[str, list[StatusAndRecord]], manifest: Manifest) -> None:
    for record in manifest.records:
        place = parse_place(record.argument)
        if place is not None:
            name = api_tree.spell_api_tensor_name(record.op_name, place)
            found.setdefault(name, []).append((manifest.status, record))


class _ManifestTimes(NamedTuple):
    """Time stamps of the records of several manifests, sorted."""

    files: list[ManifestFileName]
    iterations: npt.NDArray[np.int64]
    """Iteration of each manifest."""
    stamps: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    """Index of the manifest that has each time stamp."""


class _RankRecords:
    """Records of one rank."""

    def __init__(self, owner: TableRecords, files: list[ManifestFileName]) -> None:
        self.files = files
        self._owner = owner
        self._held: OrderedDict[int, dict[tuple[int, str], ManifestRecord]] = OrderedDict()

    def find_record(self, stamp_us: int, member: str) -> ManifestRecord | None:
        """Return the record with a time stamp; without a member, every tensor has its own time
        stamp.
        """
        times = self._times
        number = 0
        if len(times.files) > 1:
            known = min(stamp_us, MAX_STAMP_US)
            at = int(np.searchsorted(times.stamps, known, side="right")) - 1
            number = int(times.numbers[at]) if at >= 0 and times.stamps[at] == known else -1
        if number < 0 or not times.files:
            return None
        records = self._read_records(number)
        return records.get((stamp_us, member)) or records.get((stamp_us, ""))

    def find_iterations(
        self, stamps: npt.NDArray[np.int64], *, absent: int
    ) -> npt.NDArray[np.int64]:
        """Return the iteration of the last manifest that has each time stamp."""
        times = self._times
        if not len(times.stamps):
            return np.full(len(stamps), absent, np.int64)
        at = np.maximum(np.searchsorted(times.stamps, stamps, side="right") - 1, 0)
        found = times.iterations[times.numbers[at]]
        return np.where(times.stamps[at] == stamps, found, absent)

    @cached_property
    def _times(self) -> _ManifestTimes:
        return _read_times(self._owner, self.files)

    def _read_records(self, number: int) -> dict[tuple[int, str], ManifestRecord]:
        found = self._held.get(number)
        if found is None:
            file = self._times.files[number]
            found = {
                (record.timestamp_us, record.member): record
                for manifest in read_manifests([file], [])
                for record in manifest.records
            }
            self._held[number] = found
            if len(self._held) > _MAX_HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return found


def _read_times(owner: TableRecords, files: list[ManifestFileName]) -> _ManifestTimes:
    """Read the time stamps of manifests, without those of other jobs and attempts."""
    kept: list[ManifestFileName] = []
    iterations: list[int] = []
    stamps: list[npt.NDArray[np.int64]] = []
    for file in files:
        try:
            status, own = _read_stamps(file.path.read_bytes())
        except (OSError, CorruptedError):
            continue  # reported when the tree is read
        if owner.selects(status):
            kept.append(file)
            iterations.append(status.iteration)
            stamps.append(own)
    numbers = np.repeat(np.arange(len(kept)), [len(each) for each in stamps])
    joined = np.concatenate([*stamps, np.zeros(0, np.int64)])
    order = np.argsort(joined, kind="stable")
    return _ManifestTimes(kept, np.array(iterations, np.int64), joined[order], numbers[order])


def _read_stamps(data: bytes) -> tuple[IterationStatus, npt.NDArray[np.int64]]:
    """Return the status and the time stamps of the records; CorruptedError for a
    damaged manifest.
    """
    head = Manifest.parse_head(data[: data.find(b"\n") + 1])
    if head is None:
        manifest = Manifest.from_json(data)
        return manifest.status, _clip_stamps([each.timestamp_us for each in manifest.records])
    if not is_intact(data):
        raise CorruptedError("its checksum is wrong")
    return head.status, _clip_stamps(list(map(int, _STAMP.findall(data))))


def _clip_stamps(stamps: list[int]) -> npt.NDArray[np.int64]:
    try:
        return np.array(stamps, np.int64)
    except OverflowError:
        return np.array([min(stamp, MAX_STAMP_US) for stamp in stamps], np.int64)
