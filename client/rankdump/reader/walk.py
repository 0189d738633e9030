"""A root to its entries: every tensor with its key and what the manifests say of it.

Tolerant: what cannot be read is named in `problems`, what is not a tensor is counted, and the
walk goes on. Reads names, manifests, and headers of bin files that no manifest names; never a
tensor or a table. Of one iteration of a rank at a time, its names and manifests are objects.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankdump.contract.layout.file_name import FileName
from rankdump.contract.layout.folders import RANK_FOLDER, Folder, Names, folder_at
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.manifest import Manifest
from rankdump.contract.retired import Retired
from rankdump.reader.collector import collector_paused
from rankdump.reader.columns import Entries
from rankdump.reader.entry import Entry, Table, Tree
from rankdump.reader.files import File, entries_of
from rankdump.reader.jobs import of_job, others
from rankdump.reader.manifests import Manifested, ManifestFile, manifest_files, read_manifests
from rankdump.reader.places import Leaf, Places
from rankdump.reader.query import Query
from rankdump.reader.retired import read_retired


@dataclass(slots=True)
class _Batch:
    """What has to be read together: folders, and the manifests that name what is in them."""

    manifests: list[ManifestFile] = field(default_factory=list[ManifestFile])
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    settled: bool = False
    """Every manifest is about an iteration whose folders these are."""


@collector_paused()
def walk(root: Path, *queries: Query, balances_only: bool = False, job_id: str = "") -> Tree:
    """Return what stands below a root; a root that is no folder is a problem, not an error.

    Ranks, graphs and iterations that a query leaves out are not entered. With `balances_only`
    neither are iterations with files and a manifest: of these only their balances are read. With
    `job_id` neither is what other jobs dumped; DamagedError when there is nothing of that one.
    """
    places = Places(root, queries)
    places.find()
    reading = _Reading(places, balances_only, job_id)
    entries = Entries.of(root, reading.batches())
    gone = {each for each in reading.retired() if places.wants_iteration(each.rank, each.iteration)}
    tree = Tree(
        root=root,
        ranks=reading.ranks(),
        entries=entries,
        manifests=tuple(reading.manifests),
        tables=tuple(sorted(reading.tables, key=_table_place)),
        foreign=places.foreign,
        problems=tuple(places.problems),
        by_device=not reading.names,
        retired=frozenset(gone),
        whole=all(query.places.empty for query in queries),
    )
    return of_job(tree, job_id) if reading.others else tree


class _Reading:
    """Reads batch after batch; gathers what is not an entry."""

    def __init__(self, places: Places, balances_only: bool, job_id: str) -> None:
        self.manifests: list[Manifest] = []
        """Without their records."""
        self.tables: list[Table] = []
        self._places, self._balances_only = places, balances_only
        folders = places.folders
        self.names = [name for name in folders if RANK_FOLDER.fullmatch(name)]
        """Folders of ranks."""
        self._device = any(folder.device for folder in folders.values())
        self._devices: set[int] = set()
        self.others = others(places.root, job_id)
        """Sessions that are left out."""
        wanted = [n for n in self.names if self._device or places.wants_rank(folders[n].rank)]
        named = {name: manifest_files(places.root, name, places.problems) for name in wanted}
        self._stepped = any(named.values())
        self._files = {
            name: [file for file in files if file.session not in self.others]
            for name, files in named.items()
        }

    def ranks(self) -> tuple[int, ...]:
        """Return those that have a folder: ranks, or devices where there are no ranks."""
        folders = self._places.folders
        ranks = {folder.rank for folder in folders.values() if not folder.device}
        return tuple(sorted(ranks or self._devices))

    def retired(self) -> frozenset[Retired]:
        """Return what was removed from the ranks that are asked for."""
        return read_retired(self._places.root, self._files, self._places.problems)

    def batches(self) -> Iterator[list[Entry]]:
        """Yield the tensors of each batch, sorted."""
        if self._device:
            # The manifests of all ranks say which of them wrote to the folder of a device.
            files = [file for files in self._files.values() for file in files]
            yield self._read(_Batch(files, self._places.leaves), Manifested())
            return
        by_base: defaultdict[str, list[Leaf]] = defaultdict(list)
        for leaf in self._places.leaves:
            by_base[leaf.folder.base].append(leaf)
        for name, files in self._files.items():
            leaves = by_base[name]
            if self._places.folders[name].names is Names.API_TABLES:
                yield self._read(_Batch(files, leaves), Manifested())
            else:
                yield from self._iterations(self._places.folders[name].rank, files, leaves)

    def _iterations(
        self, rank: int, files: list[ManifestFile], leaves: list[Leaf]
    ) -> Iterator[list[Entry]]:
        dated: defaultdict[int, _Batch] = defaultdict(_Batch)
        others = _Batch()
        for leaf in leaves:
            at = leaf.folder.iteration
            if at is not None:
                dated[at].leaves.append(leaf)
            elif not (self._balances_only and files):
                others.leaves.append(leaf)
        for file in files:
            if file.iteration is None:
                others.manifests.append(file)
            elif self._places.wants_iteration(rank, file.iteration):
                dated[file.iteration].manifests.append(file)
        constants = Manifested()
        for at in sorted(dated):
            if self.others and not dated[at].manifests:
                continue
            dated[at].settled = True
            yield self._read(dated[at], constants)
        yield self._read(others, Manifested(), constants)

    def _read(
        self, batch: _Batch, constants: Manifested, known: Manifested | None = None
    ) -> list[Entry]:
        """Return the tensors of a batch; what its manifests say of constants goes to others."""
        places, root = self._places, self._places.root
        known = Manifested() if known is None else known
        only = self._balances_only and batch.settled
        heads = len(self.manifests)
        for manifest in read_manifests(batch.manifests, places.problems, balances_only=only):
            known.add(manifest)
            self.manifests.append(replace(manifest, records=(), session=None))
        # Figures alone have a table, whose size no balance says.
        if any(only and (m.status.bytes_stored or m.status.linked) for m in self.manifests[heads:]):
            return []
        for leaf in batch.leaves:
            places.enter(leaf)
        self.tables += tables_of(places, known)
        files, places.files = places.files, []
        if self.others:
            files = [file for file in files if known.names(file.relative)]
        absent, places.absent = places.absent, []
        # Manifests say what should be there: a dropped tensor has its row as well.
        if not self._stepped:
            named = f"named by {MAPPING_FILE}, not there"
            places.problems.extend(f"{path}: {named}" for path in absent)
        entries = entries_of(root, files, known, places.problems, stepped=self._stepped)
        constants.constants_of(known)
        places.problems.extend(self._missed(known))
        places.problems.extend(_resized(entries, files))
        if self._device:
            self._devices = {known.rank_of(folder) for folder in places.folders.values()}
        return sorted(entries, key=place_in_time)

    def _missed(self, known: Manifested) -> Iterator[str]:
        """Yield what manifests name in the folders that are read, and is not there."""
        for path in known.missed:
            folder = folder_at(path.rpartition("/")[0])
            named = folder is None or self._places.wants(folder)
            # Nobody writes a manifest of what stands in another iteration's folder.
            if named and not os.path.lexists(self._places.root / path):
                yield f"{path}: named by a manifest, not there"


def place_in_time(entry: Entry) -> tuple[int, bool, int, int, str, str, int]:
    """Return what sorts tensors as the program ran."""
    key, path = entry.key, entry.relative
    when, dated = key.timestamp_us, not key.constant
    # Of one call, inputs come before outputs; a file of one tensor is named by side and slot.
    return key.rank, dated, key.iteration, when, path, key.side, key.slot


def tables_of(places: Places, known: Manifested | None = None) -> list[Table]:
    """Return the tables that were found, and forget them."""
    known = Manifested() if known is None else known
    found = [_table_of(places.root, *each, known) for each in places.tables]
    found += [_info_of(places.root, *each) for each in places.infos]
    places.tables, places.infos = [], []
    return found


def _table_of(
    root: Path, folder: Folder, relative: str, operator: FileName | None, known: Manifested
) -> Table:
    """Return the table that stands in a folder: its own, or an operator's."""
    number = operator.number if operator is not None else None
    iteration = number if folder.iteration is None else folder.iteration
    return Table(
        root=root,
        relative=relative,
        rank=known.rank_of(folder),
        net_name=folder.net_name,
        graph=folder.graph,
        iteration=iteration or 0,
        constant=folder.constant,
        dated=iteration is not None or folder.constant,
        operator=operator,
    )


def _info_of(root: Path, folder: Folder, relative: str) -> Table:
    return Table(root, relative, folder.rank, "", 0, 0, dated=False, info=True)


def _table_place(table: Table) -> tuple[int, bool, int, int, str]:
    stamp = table.operator.timestamp_us if table.operator is not None else 0
    return table.rank, not table.constant, table.iteration, stamp, table.relative


def _resized(entries: list[Entry], files: list[File]) -> Iterator[str]:
    """Name the files whose size alone says that they are damaged."""
    due: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        # A link to identical bytes takes no room by its manifest.
        due[entry.relative] += entry.record.bytes_stored if entry.record else 0
    for file in files:
        if due[file.relative] not in (0, file.stored_bytes):
            yield (
                f"{file.relative}: {file.stored_bytes} bytes, "
                f"its manifest says {due[file.relative]}"
            )
