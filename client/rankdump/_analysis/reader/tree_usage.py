"""Disk space, files and time that the iterations of a tree take, computed from its manifests and
from the sizes of other files, and the free space of a disk. It is the input of a forecast; no
tensors are read. Rows of the tree's table are used in place of manifests that have not changed
since.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rankdump._analysis.reader.fingerprints import find_fingerprint_path
from rankdump._analysis.reader.indexed_manifests import find_indexed_files
from rankdump._analysis.reader.manifests import list_manifest_files, read_manifests
from rankdump._analysis.reader.tree import Table
from rankdump._analysis.reader.tree_files import FolderIndex
from rankdump._analysis.reader.tree_walk import collect_tables
from rankdump._core.forecast import (
    DiskCapacity,
    DumpSize,
    ObservedDump,
    find_largest_size,
    sum_sizes,
)
from rankdump._core.manifest import Manifest, ManifestRecord
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.api_tree import parse_info_file_name
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN, find_folder
from rankdump._layout.tree_paths import EXECUTION_ORDER_FOLDER, GRAPH_FOLDER, METADATA_FOLDER
from rankdump.errors import CorruptedError

if TYPE_CHECKING:
    from rankdump._analysis.reader.indexed_rows import PlaceSizes

_FOLDER_BYTES = 4096
_MAX_CACHED_FOLDERS = 1 << 10
_NO_ITERATION = "no iteration with tensors is complete"


@dataclass(slots=True)
class _SizeCounter:
    """Sizes and folders of the files in a part of a tree, and time stamps of the tensors."""

    root: Path
    block_bytes: int
    sizes: defaultdict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Size of each file; 0 for a link to another file."""
    folders: set[str] = field(default_factory=set[str])
    tensors: int = 0
    bytes_in: int = 0
    stamps: list[int] = field(default_factory=list[int])

    def add_tensor(self, record: ManifestRecord) -> None:
        """Count a tensor, given its record."""
        self.tensors += 1
        self.bytes_in += record.bytes_in
        self.stamps.append(record.timestamp_us)
        if record.path and not record.same_as:
            self._add_size(record.path, record.bytes_stored)

    def add_rows(self, rows: PlaceSizes) -> None:
        """Count the tensors of a place, given their rows in the table."""
        self.tensors += len(rows.stamps_us)
        self.bytes_in += rows.bytes_in
        if len(rows.stamps_us):
            self.stamps += [int(rows.stamps_us.min()), int(rows.stamps_us.max())]
        for path, size in zip(rows.paths, rows.stored_bytes, strict=True):
            self._add_size(path, size)

    def _add_size(self, path: str, size: int) -> None:
        # The sizes of the tensors in one file add up to the size of the file.
        self.sizes[path] += size
        self.folders.add(path.rpartition("/")[0])

    def add_file(self, path: str) -> None:
        """Count a file without a record; for a folder, only its parent; nothing for a file that was
        removed.
        """
        with suppress(OSError):
            facts = os.lstat(self.root / path)
            self.folders.add(path.rpartition("/")[0])
            if stat.S_ISREG(facts.st_mode):
                self.sizes[path] = facts.st_size

    def summarize(self, *, folders: int = 0, stall_us: int = 0) -> DumpSize:
        """Return the totals; `folders` is the number of folders."""
        sizes = [size for size in self.sizes.values() if size]
        blocks = sum(-(-size // self.block_bytes) for size in sizes)
        return DumpSize(
            tensors=self.tensors,
            files=len(sizes),
            folders=folders,
            bytes_in=self.bytes_in,
            bytes_stored=sum(sizes),
            disk_bytes=blocks * self.block_bytes + folders * _FOLDER_BYTES,
            stall_us=stall_us,
            wall_us=max(self.stamps, default=0) - min(self.stamps, default=0),
        )


class _UsageObserver:
    """Sums over the manifests and files of a tree, which are added one by one."""

    def __init__(self, root: Path) -> None:
        self._root, self._block_bytes = root, os.statvfs(root).f_frsize
        self._ranks: defaultdict[int, dict[int, DumpSize]] = defaultdict(dict)
        """Size of each iteration, by rank and iteration."""
        self._tables = defaultdict[int, _SizeCounter](self._new_counter)
        self._folders: defaultdict[int, set[str]] = defaultdict(set)
        self._once, self._grown = self._new_counter(), self._new_counter()

    def add_manifest(self, manifest: Manifest, path: Path) -> None:
        """Count the records of a manifest, and the manifest's file."""
        status, own = manifest.status, self._new_counter()
        for record in manifest.records:
            folder = _find_folder(record.path.rpartition("/")[0])
            is_constant = folder is not None and folder.constant
            (self._once if is_constant else own).add_tensor(record)
        self._add_iteration(status.rank, status.iteration, own, path, status.stall_us)

    def add_indexed_rows(self, root: Path) -> set[Path]:
        """Count the rows in the table of a tree, and the files of the manifests they come from;
        return these manifests.
        """
        files = find_indexed_files(root)
        if not files:
            return set()
        # Imported on use, because it loads pyarrow, which may be missing if there is no table.
        from rankdump._analysis.reader.indexed_rows import read_place_sizes

        counted: set[Path] = set()
        for file in files:
            # The manifests of a table file that cannot be read are read themselves.
            with suppress(CorruptedError):
                for rows in read_place_sizes(file):
                    self._add_rows(rows, file.manifests)
                counted.update(file.manifests.values())
        return counted

    def _add_rows(self, rows: PlaceSizes, manifests: Mapping[tuple[int, int], Path]) -> None:
        if rows.iteration is None:
            self._once.add_rows(rows)
            return
        own = self._new_counter()
        own.add_rows(rows)
        manifest = manifests[rows.rank, rows.iteration]
        self._add_iteration(rows.rank, rows.iteration, own, manifest, rows.stall_us)

    def _add_iteration(
        self, rank: int, iteration: int, own: _SizeCounter, manifest: Path, stall_us: int
    ) -> None:
        self._add_folders(iteration, own)
        own.add_file(path := manifest.relative_to(self._root).as_posix())
        own.add_file(find_fingerprint_path(path))
        self._ranks[iteration][rank] = own.summarize(stall_us=stall_us)

    def add_table(self, table: Table) -> None:
        """Count a table, which belongs to one iteration or grows in each of them."""
        if table.dated and not table.constant:
            self._tables[table.iteration].add_file(table.relative)
        elif not table.constant:
            self._grown.add_file(table.relative)
            files = parse_info_file_name(table.relative.rpartition("/")[2])
            if files is not None:
                self._grown.add_file(f"{table.folder}/{files.stack_file}")

    def add_folder(self, path: str, iteration: int) -> None:
        """Count the tables in the folder of an iteration, including the table of long names."""
        for file in (self._root / path).iterdir():
            if file.suffix == ".csv":
                self._tables[iteration].add_file(f"{path}/{file.name}")

    def add_metadata(self, ranks: Iterable[str]) -> None:
        """Count the metadata files of ranks, without the manifests."""
        for rank in ranks:
            for folder in (METADATA_FOLDER, EXECUTION_ORDER_FOLDER, GRAPH_FOLDER):
                for path in _list_files(self._root, f"{rank}/{folder}"):
                    self._once.add_file(path)

    def add_index_files(self) -> None:
        """Count the files of the table of statistics, which grows with each iteration."""
        for path in _list_files(self._root, f"{STATE_FOLDER}/table"):
            self._grown.add_file(path)

    def summarize(self) -> ObservedDump:
        """Return the totals; CorruptedError if no iteration with tensors is complete."""
        ranks = max(map(len, self._ranks.values()), default=0)
        whole = [
            sum_sizes((*of.values(), self._beside(iteration)))
            for iteration, of in self._ranks.items()
            if len(of) == ranks and any(taken.tensors for taken in of.values())
        ]
        if not whole:
            raise CorruptedError(f"{self._root}: {_NO_ITERATION}")
        grown = self._grown.summarize()
        share = grown.bytes_stored // len(self._ranks)
        each = sum_sizes((find_largest_size(whole), DumpSize(bytes_stored=share, disk_bytes=share)))
        once = self._once.summarize(folders=len(self._once.folders))
        return ObservedDump(len(whole), ranks, each, sum_sizes((once, DumpSize(files=grown.files))))

    def _beside(self, iteration: int) -> DumpSize:
        """Return the size of the tables and folders of an iteration, besides its tensors."""
        tables = self._tables[iteration]
        self._add_folders(iteration, tables)
        return tables.summarize(folders=len(self._folders[iteration]))

    def _add_folders(self, iteration: int, counter: _SizeCounter) -> None:
        found = ((path, _find_folder(path)) for path in counter.folders)
        self._folders[iteration] |= {
            path for path, folder in found if folder is not None and folder.iteration is not None
        }

    def _new_counter(self) -> _SizeCounter:
        return _SizeCounter(self._root, self._block_bytes)


def observe(root: Path) -> ObservedDump:
    """Return the size of one iteration of a tree over all its ranks.

    Files with a record are not accessed; manifests that cannot be read are left out and named.
    CorruptedError if no iteration is complete.
    """
    places = FolderIndex(root, sized=False)
    places.find_folders()
    ranks = [name for name in places.folders if RANK_FOLDER_PATTERN.fullmatch(name)]
    if not ranks:
        raise CorruptedError(f"{root}: {_NO_ITERATION}")
    seen = _UsageObserver(root)
    counted = seen.add_indexed_rows(root)
    for rank in ranks:
        for file in list_manifest_files(root, rank, places.problems):
            if file.path in counted:
                continue
            for manifest in read_manifests([file], places.problems):
                seen.add_manifest(manifest, file.path)
    for leaf in places.leaves:
        if leaf.folder.iteration is not None:
            seen.add_folder(leaf.path, leaf.folder.iteration)
    for table in collect_tables(places):
        seen.add_table(table)
    seen.add_metadata(ranks)
    seen.add_index_files()
    try:
        return replace(seen.summarize(), problems=tuple(places.problems))
    except CorruptedError as error:
        raise CorruptedError("; ".join((str(error), *places.problems[:1]))) from None


def disk_room(root: Path, keep_free_ratio: float) -> DiskCapacity:
    """Return the free space and inodes of the disk of a tree; the tree itself need not
    exist yet.
    """
    place = root.absolute()
    while not place.exists():
        place = place.parent
    facts = os.statvfs(place)
    return DiskCapacity(
        free_bytes=facts.f_bavail * facts.f_frsize,
        total_bytes=facts.f_blocks * facts.f_frsize,
        free_inodes=facts.f_favail,
        total_inodes=facts.f_files,
        keep_free_ratio=keep_free_ratio,
    )


def _list_files(root: Path, folder: str) -> Iterator[str]:
    place = root / folder
    if place.is_dir() and not place.is_symlink():
        yield from (f"{folder}/{each.name}" for each in place.iterdir())


_find_folder = lru_cache(maxsize=_MAX_CACHED_FOLDERS)(find_folder)
