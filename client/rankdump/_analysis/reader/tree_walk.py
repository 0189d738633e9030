"""Walk from the root of a tree, or from one file, to tensors with their keys and what manifests say
of them. Reads names, manifests, and the headers of bin files that no manifest names; never a
tensor or a table.

What cannot be read is named in `problems`, what is not a tensor is counted, and the walk goes
on. Only the names and manifests of one iteration of one rank are objects at a time. The garbage
collector is paused meanwhile: whenever the number of objects has grown by a quarter it would
look at all of them again, a seventh of the time that opening a tree takes.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankdump._analysis.reader.manifests import (
    ManifestFileName,
    TreeManifests,
    find_other_sessions,
    list_manifest_files,
    list_rank_folders,
    read_manifests,
    read_retired_iterations,
    restrict_to_job,
)
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Entries, Entry, Table, Tree
from rankdump._analysis.reader.tree_files import (
    FolderIndex,
    LeafFolder,
    TensorFile,
    read_entries,
    read_long_names,
)
from rankdump._core.manifest import Manifest, RetiredIteration
from rankdump._layout.dump_folders import (
    MAX_TREE_DEPTH,
    RANK_FOLDER_PATTERN,
    DumpFolder,
    NameScheme,
    find_folder,
    parse_name_in_folder,
)
from rankdump._layout.file_name import FileName
from rankdump._layout.tree_paths import MAPPING_FILE
from rankdump.errors import CorruptedError


@contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Pause it, in all threads; it goes on afterwards if it went before."""
    went = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if went:
            gc.enable()


@dataclass(slots=True)
class _WalkBatch:
    """Folders that are read together, and the manifests that name their files."""

    manifests: list[ManifestFileName] = field(default_factory=list[ManifestFileName])
    leaves: list[LeafFolder] = field(default_factory=list[LeafFolder])
    is_complete: bool = False
    """Every manifest is about an iteration whose folders these are."""


@collector_paused()
def walk(root: Path, *queries: Query, balances_only: bool = False, job_id: str = "") -> Tree:
    """Return what stands below a root; a root that is no folder is a problem, not an error.

    Ranks, graphs and iterations that a query leaves out are not entered. With `balances_only`
    neither are iterations with files and a manifest: of these only their balances are read. With
    `job_id` neither is what other jobs dumped; CorruptedError when there is nothing of that one.
    """
    places = FolderIndex(root, queries)
    places.find_folders()
    reading = _TreeReader(places, balances_only, job_id)
    entries = Entries.of(root, reading.read_batches())
    gone = {
        each
        for each in reading.read_retired()
        if places.selects_iteration(each.rank, each.iteration)
    }
    tree = Tree(
        root=root,
        ranks=reading.list_ranks(),
        entries=entries,
        manifests=tuple(reading.manifests),
        tables=tuple(sorted(reading.tables, key=_table_sort_key)),
        foreign=places.foreign_files,
        problems=tuple(places.problems),
        by_device=not reading.rank_folders,
        retired=frozenset(gone),
        whole=all(query.places.empty for query in queries),
    )
    return restrict_to_job(tree, job_id) if reading.other_sessions else tree


class _TreeReader:
    """Reads batch after batch; gathers what is not an entry."""

    def __init__(self, places: FolderIndex, balances_only: bool, job_id: str) -> None:
        self.manifests: list[Manifest] = []
        """Without their records."""
        self.tables: list[Table] = []
        self._places, self._balances_only = places, balances_only
        folders = places.folders
        self.rank_folders = [name for name in folders if RANK_FOLDER_PATTERN.fullmatch(name)]
        """Folders of ranks."""
        self._device = any(folder.device for folder in folders.values())
        self._devices: set[int] = set()
        self.other_sessions = find_other_sessions(places.root, job_id)
        """Sessions that are left out."""
        wanted = [
            n for n in self.rank_folders if self._device or places.selects_rank(folders[n].rank)
        ]
        named = {name: list_manifest_files(places.root, name, places.problems) for name in wanted}
        self._stepped = any(named.values())
        self._files = {
            name: [file for file in files if file.session not in self.other_sessions]
            for name, files in named.items()
        }

    def list_ranks(self) -> tuple[int, ...]:
        """Return those that have a folder: ranks, or devices where there are no ranks."""
        folders = self._places.folders
        ranks = {folder.rank for folder in folders.values() if not folder.device}
        return tuple(sorted(ranks or self._devices))

    def read_retired(self) -> frozenset[RetiredIteration]:
        """Return what was removed from the ranks that are asked for."""
        return read_retired_iterations(self._places.root, self._files, self._places.problems)

    def read_batches(self) -> Iterator[list[Entry]]:
        """Yield the tensors of each batch, sorted."""
        if self._device:
            # The manifests of all ranks say which of them wrote to the folder of a device.
            files = [file for files in self._files.values() for file in files]
            yield self._read(_WalkBatch(files, self._places.leaves), TreeManifests())
            return
        by_base: defaultdict[str, list[LeafFolder]] = defaultdict(list)
        for leaf in self._places.leaves:
            by_base[leaf.folder.base].append(leaf)
        for name, files in self._files.items():
            leaves = by_base[name]
            if self._places.folders[name].names is NameScheme.API_TABLES:
                yield self._read(_WalkBatch(files, leaves), TreeManifests())
            else:
                yield from self._iterations(self._places.folders[name].rank, files, leaves)

    def _iterations(
        self, rank: int, files: list[ManifestFileName], leaves: list[LeafFolder]
    ) -> Iterator[list[Entry]]:
        dated: defaultdict[int, _WalkBatch] = defaultdict(_WalkBatch)
        others = _WalkBatch()
        for leaf in leaves:
            at = leaf.folder.iteration
            if at is not None:
                dated[at].leaves.append(leaf)
            elif not (self._balances_only and files):
                others.leaves.append(leaf)
        for file in files:
            if file.iteration is None:
                others.manifests.append(file)
            elif self._places.selects_iteration(rank, file.iteration):
                dated[file.iteration].manifests.append(file)
        constants = TreeManifests()
        for at in sorted(dated):
            if self.other_sessions and not dated[at].manifests:
                continue
            dated[at].is_complete = True
            yield self._read(dated[at], constants)
        yield self._read(others, TreeManifests(), constants)

    def _read(
        self, batch: _WalkBatch, constants: TreeManifests, known: TreeManifests | None = None
    ) -> list[Entry]:
        """Return the tensors of a batch; what its manifests say of constants goes to others."""
        places, root = self._places, self._places.root
        known = TreeManifests() if known is None else known
        only = self._balances_only and batch.is_complete
        heads = len(self.manifests)
        for manifest in read_manifests(batch.manifests, places.problems, balances_only=only):
            known.add(manifest)
            self.manifests.append(replace(manifest, records=(), session=None))
        # Statistics alone have a table, whose size no balance states.
        if any(only and (m.status.bytes_stored or m.status.linked) for m in self.manifests[heads:]):
            return []
        for leaf in batch.leaves:
            places.list_leaf(leaf)
        self.tables += collect_tables(places, known)
        files, places.files = places.files, []
        if self.other_sessions:
            files = [file for file in files if known.has_path(file.relative)]
        absent, places.missing_files = places.missing_files, []
        # Manifests say what should be there: a dropped tensor has its row as well.
        if not self._stepped:
            named = f"named by {MAPPING_FILE}, but missing"
            places.problems.extend(f"{path}: {named}" for path in absent)
        entries = read_entries(root, files, known, places.problems, stepped=self._stepped)
        constants.add_constants_of(known)
        places.problems.extend(self._missed(known))
        places.problems.extend(_find_size_mismatches(entries, files))
        if self._device:
            self._devices = {known.rank_of(folder) for folder in places.folders.values()}
        return sorted(entries, key=execution_sort_key)

    def _missed(self, known: TreeManifests) -> Iterator[str]:
        """Yield what manifests name in the folders that are read, and is not there."""
        for path in known.unclaimed_paths:
            folder = find_folder(path.rpartition("/")[0])
            named = folder is None or self._places.selects_folder(folder)
            # Nobody writes a manifest of what stands in another iteration's folder.
            if named and not os.path.lexists(self._places.root / path):
                yield f"{path}: named by a manifest, but missing"


def execution_sort_key(entry: Entry) -> tuple[int, bool, int, int, str, str, int]:
    """Return what sorts tensors as the program ran."""
    key, path = entry.key, entry.relative
    when, dated = key.timestamp_us, not key.constant
    # Of one call, inputs come before outputs; a file of one tensor is named by side and slot.
    return key.rank, dated, key.iteration, when, path, key.side, key.slot


def collect_tables(places: FolderIndex, known: TreeManifests | None = None) -> list[Table]:
    """Return the tables that were found, and forget them."""
    known = TreeManifests() if known is None else known
    found = [_table_at(places.root, *each, known) for each in places.tables]
    found += [_info_table_at(places.root, *each) for each in places.info_files]
    places.tables, places.info_files = [], []
    return found


def _table_at(
    root: Path, folder: DumpFolder, relative: str, operator: FileName | None, known: TreeManifests
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


def _info_table_at(root: Path, folder: DumpFolder, relative: str) -> Table:
    return Table(root, relative, folder.rank, "", 0, 0, dated=False, info=True)


def _table_sort_key(table: Table) -> tuple[int, bool, int, int, str]:
    stamp = table.operator.timestamp_us if table.operator is not None else 0
    return table.rank, not table.constant, table.iteration, stamp, table.relative


def _find_size_mismatches(entries: list[Entry], files: list[TensorFile]) -> Iterator[str]:
    """Name the files whose size alone says that they are damaged."""
    due: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        # A link to identical bytes takes no room by its manifest.
        due[entry.relative] += entry.record.bytes_stored if entry.record else 0
    for file in files:
        if due[file.relative] not in (0, file.stored_bytes):
            yield (
                f"{file.relative}: {file.stored_bytes} bytes, "
                f"but its manifest has {due[file.relative]}"
            )


def locate(path: Path) -> tuple[Entry, ...]:
    """Return the tensors of one file; none when it does not stand in a tree's folders.

    CorruptedError when it does, and cannot be read.
    """
    full = path.absolute()
    if not full.is_file():
        return ()
    name = read_long_names(full.parent / MAPPING_FILE).get_full_name(full.name)
    for root, folder in _find_possible_roots(full.parent):
        says = parse_name_in_folder(folder, name)
        if says is not None and says.kind.holds_tensors:
            relative = full.relative_to(root).as_posix()
            file = TensorFile(folder, relative, says, full.stat().st_size, name)
            problems: list[str] = []
            manifests = _read_manifests_of(root, folder)
            known, stepped = TreeManifests(manifests), bool(manifests)
            entries = read_entries(root, [file], known, problems, stepped=stepped)
            if problems:
                raise CorruptedError(problems[0])
            return tuple(sorted(entries, key=execution_sort_key))
    return ()


def find_root(folder: Path) -> Path | None:
    """Return the root that a folder of a tree is likely to belong to; None for any other folder."""
    return next(
        (
            root
            for root, below in _find_possible_roots(folder)
            if below.names is not NameScheme.CAPTURED
        ),
        None,
    )


def _find_possible_roots(folder: Path) -> list[tuple[Path, DumpFolder]]:
    """Return what may be the root: those with manifests first, then the outermost."""
    full = folder.absolute()
    found: list[tuple[Path, DumpFolder]] = []
    for root in reversed(full.parents[:MAX_TREE_DEPTH]):
        below = find_folder(full.relative_to(root).as_posix())
        if below is not None:
            found.append((root, below))
    return sorted(found, key=lambda each: not list_rank_folders(each[0]))


def _read_manifests_of(root: Path, folder: DumpFolder) -> list[Manifest]:
    ranks = list_rank_folders(root) if folder.device else [folder.base]
    # A constant is in the manifest of whichever iteration it was first seen in.
    every = None if folder.constant else folder.iteration
    # What of them cannot be read says nothing of this file.
    files = [file for rank in ranks for file in list_manifest_files(root, rank, [])]
    return list(read_manifests((f for f in files if every in (None, f.iteration)), []))
