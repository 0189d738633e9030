"""What the iterations of a tree took, by its manifests and by the sizes of its files."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.forecast import DiskRoom, Observed, Taken, largest, total
from rankdump.contract.layout.api_tree import info_files_of
from rankdump.contract.layout.folders import folder_at
from rankdump.contract.layout.mindspore_sync import (
    GRAPH_FOLDER,
    MANIFEST_FOLDER,
    METADATA_FOLDER,
    ORDER_FOLDER,
)
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.manifest import Manifest, manifest_name
from rankdump.reader.entry import Table
from rankdump.reader.walk import walk

_FOLDER_BYTES = 4096


@dataclass(slots=True)
class _Weighing:
    """Files and folders, each counted once however often it is named."""

    root: Path
    block_bytes: int
    files: int = 0
    stored: int = 0
    disk: int = 0
    inodes: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    folders: set[str] = field(default_factory=set[str])

    def add(self, path: str) -> None:
        """Count a file with the folder it stands in; one that is gone takes nothing."""
        try:
            facts = os.lstat(self.root / path)
        except OSError:
            return
        inode = facts.st_dev, facts.st_ino
        self.folders.add(path.rpartition("/")[0])
        if stat.S_ISREG(facts.st_mode) and inode not in self.inodes:
            self.inodes.add(inode)
            self.files += 1
            self.stored += facts.st_size
            self.disk += -(-facts.st_size // self.block_bytes) * self.block_bytes

    def taken(self, *, folders: int, tensors: int, bytes_in: int) -> Taken:
        """Return what was counted."""
        room = self.disk + folders * _FOLDER_BYTES
        return Taken(tensors, self.files, folders, bytes_in, self.stored, room)


def observe(root: Path) -> Observed:
    """Return what one iteration of a tree takes, over all ranks that are in it.

    DamagedError where no iteration of it is complete.
    """
    tree = walk(root)
    by_iteration: defaultdict[int, dict[int, Manifest]] = defaultdict(dict)
    for manifest in tree.manifests:
        by_iteration[manifest.status.iteration][manifest.status.rank] = manifest
    ranks = max(map(len, by_iteration.values()), default=0)
    whole = [of for of in by_iteration.values() if len(of) == ranks and _kept(of)]
    if not whole:
        raise DamagedError(f"{root}: no iteration with tensors is complete")
    block_bytes = os.statvfs(root).f_frsize
    tables: defaultdict[int, list[str]] = defaultdict(list)
    for table in tree.tables:
        if table.dated and not table.constant:
            tables[table.iteration].append(table.relative)
    seen: set[tuple[int, int]] = set()
    each: list[Taken] = []
    for of in sorted(whole, key=lambda of: next(iter(of.values())).status.iteration):
        weighing = _Weighing(root, block_bytes, inodes=seen)
        each.append(_iteration(weighing, of, tables))
    grown = _Weighing(root, block_bytes, inodes=seen)
    for path in _growing(tree.tables):
        grown.add(path)
    share = Taken(
        bytes_stored=grown.stored // len(by_iteration), disk_bytes=grown.stored // len(by_iteration)
    )
    once = _once(_Weighing(root, block_bytes, inodes=seen), tree.manifests)
    once = total((once, Taken(files=grown.files)))
    return Observed(len(whole), ranks, total((largest(each), share)), once)


def disk_room(root: Path, keep_free_ratio: float) -> DiskRoom:
    """Return how much room there is where a tree stands, or will stand."""
    place = root.absolute()
    while not place.exists():
        place = place.parent
    facts = os.statvfs(place)
    return DiskRoom(
        free_bytes=facts.f_bavail * facts.f_frsize,
        total_bytes=facts.f_blocks * facts.f_frsize,
        free_inodes=facts.f_favail,
        total_inodes=facts.f_files,
        keep_free_ratio=keep_free_ratio,
    )


def _growing(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the files to which every iteration adds: undated tables, and stacks of calls."""
    for table in tables:
        if not table.dated and not table.constant:
            yield table.relative
            files = info_files_of(table.relative.rpartition("/")[2])
            if files is not None:
                yield f"{table.folder}/{files.stacks}"


def _kept(of: dict[int, Manifest]) -> bool:
    return any(manifest.records for manifest in of.values())


def _iteration(weighing: _Weighing, of: dict[int, Manifest], tables: dict[int, list[str]]) -> Taken:
    own: set[str] = set()
    iteration = next(iter(of.values())).status.iteration
    records = [r for manifest in of.values() for r in manifest.records if not _constant(r.path)]
    for record in records:
        if record.path:
            weighing.add(record.path)
    for table in tables.get(iteration, ()):
        weighing.add(table)
    for folder in sorted(weighing.folders):
        known = folder_at(folder)
        if known is not None and known.iteration is not None:
            own.add(folder)
            weighing.add(f"{folder}/{MAPPING_FILE}")
    for path in _manifest_paths(of.values()):
        weighing.add(path)
    bytes_in = sum(record.bytes_in for record in records)
    taken = weighing.taken(folders=len(own), tensors=len(records), bytes_in=bytes_in)
    return total((taken, *map(_times, of.values())))


def _times(manifest: Manifest) -> Taken:
    stamps = [r.timestamp_us for r in manifest.records if not _constant(r.path)]
    wall = max(stamps) - min(stamps) if stamps else 0
    return Taken(stall_us=manifest.status.stall_us, wall_us=wall)


def _once(weighing: _Weighing, manifests: Iterable[Manifest]) -> Taken:
    tensors = bytes_in = 0
    ranks: set[str] = set()
    for manifest in manifests:
        for record in manifest.records:
            ranks.add(record.path.partition("/")[0])
            if _constant(record.path):
                weighing.add(record.path)
                tensors += 1
                bytes_in += record.bytes_in
    for rank in ranks:
        for folder in (METADATA_FOLDER, ORDER_FOLDER, GRAPH_FOLDER):
            for path in _files(weighing.root, f"{rank}/{folder}"):
                weighing.add(path)
    folders = len(weighing.folders)
    return weighing.taken(folders=folders, tensors=tensors, bytes_in=bytes_in)


def _files(root: Path, folder: str) -> Iterator[str]:
    place = root / folder
    if place.is_dir() and not place.is_symlink():
        yield from (f"{folder}/{each.name}" for each in place.iterdir())


def _constant(path: str) -> bool:
    folder = folder_at(path.rpartition("/")[0]) if path else None
    return folder is not None and folder.constant


def _manifest_paths(manifests: Iterable[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        status = manifest.status
        name = manifest_name(status.iteration, status.session_id)
        for rank in (f"rank_{status.rank}", f"rank{status.rank}"):
            yield f"{rank}/{MANIFEST_FOLDER}/{name}"
