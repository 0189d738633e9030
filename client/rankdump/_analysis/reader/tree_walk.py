"""Reading of a tree, from its root or from one file, to tensors with their keys and records. Reads
names, manifests, and the headers of bin files without a record, but no tensors or tables.

Unreadable files are listed in `problems`, and other files are counted. Only the names and manifests
of one rank's iteration are in memory as objects at a time. The garbage collector is paused
meanwhile, because it would traverse all objects whenever their number has grown by a quarter, which
is a seventh of the time for opening a tree.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rankdump._analysis.reader.foreign_dumps import check_foreign_request, read_foreign_tree
from rankdump._analysis.reader.full_names import FullNames
from rankdump._analysis.reader.indexed_manifests import find_indexed_manifests
from rankdump._analysis.reader.manifests import (
    ManifestFileName,
    TreeManifests,
    find_other_sessions,
    list_manifest_files,
    list_rank_folders,
    read_balance,
    read_file_records,
    read_folder_owners,
    read_manifests,
    read_retired_iterations,
    read_tree_sessions,
    restrict_to_attempt,
    restrict_to_job,
)
from rankdump._analysis.reader.msprobe_tree import read_folder_around
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tensor_loader import TORCH_SUFFIX
from rankdump._analysis.reader.tree import Entries, Entry, Table, Tree
from rankdump._analysis.reader.tree_files import (
    FolderIndex,
    LeafFolder,
    TensorFile,
    read_entries,
    read_long_names,
)
from rankdump._codec.file_codec import select_codec
from rankdump._codec.zstd_frames import compute_stored_bytes
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.manifest import Manifest, ManifestRecord, RetiredIteration
from rankdump._core.npy_format import compute_npy_sizes
from rankdump._core.tree_session import SessionPeriods, order_sessions
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
    """Pause the garbage collector in all threads; enable it after the block if it was enabled
    before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class _WalkBatch:
    """Folders that are read together, and the manifests that name their files."""

    manifests: list[ManifestFileName] = field(default_factory=list[ManifestFileName])
    leaves: list[LeafFolder] = field(default_factory=list[LeafFolder])
    is_complete: bool = False
    """Whether the batch has all folders of the manifests' iterations."""


@collector_paused()
def walk(
    root: Path,
    *queries: Query,
    balances_only: bool = False,
    job_id: str = "",
    attempt: int | None = None,
) -> Tree:
    """Return the tree below a root; if the root is not a folder, that is a problem and not an
    error.

    Folders that the queries exclude are not entered. With `balances_only`, iterations with a
    manifest and files are not entered either: only their balances are read. With `job_id`, the
    dumps of other jobs are left out, with `attempt` those of other attempts; CorruptedError when
    the tree has no dump of that job or attempt. A root without these folders may be a dump of
    another tool; CorruptedError when such a dump has no tensors, or does not support the selection.
    """
    places = FolderIndex(root, queries)
    is_file = root.is_file()
    if not is_file:
        places.find_folders()
    if is_file or places.is_empty:
        check_foreign_request(root, balances=balances_only, job_id=job_id, attempt=attempt)
        foreign = read_foreign_tree(root, queries)
        if foreign is not None:
            return foreign
    reading = _TreeReader(places, balances_only, job_id, attempt)
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
        queries=tuple(query.places for query in queries),
        sessions=reading.sessions,
    )
    tree = restrict_to_job(tree, job_id) if job_id and reading.other_sessions else tree
    return tree if attempt is None else restrict_to_attempt(tree, attempt)


class _TreeReader:
    """Reads the entries of a tree in batches, and collects manifests and tables."""

    def __init__(
        self, places: FolderIndex, balances_only: bool, job_id: str, attempt: int | None
    ) -> None:
        self.manifests: list[Manifest] = []
        """Manifests without their records."""
        self.tables: list[Table] = []
        self._places, self._balances_only = places, balances_only
        self._names = FullNames(places.root)
        folders = places.folders
        self.rank_folders = [name for name in folders if RANK_FOLDER_PATTERN.fullmatch(name)]
        """Names of the folders of ranks."""
        self._device = any(folder.device for folder in folders.values())
        self._devices: set[int] = set()
        self._owners = read_folder_owners(places.root) if self._device else {}
        self.other_sessions = find_other_sessions(places.root, job_id, attempt)
        """Sessions of other jobs or attempts, which are left out."""
        self._job_id, self._attempt = job_id, attempt
        wanted = [
            n for n in self.rank_folders if self._device or places.selects_rank(folders[n].rank)
        ]
        named = {name: list_manifest_files(places.root, name, places.problems) for name in wanted}
        self._stepped = any(named.values())
        self.sessions = order_sessions(
            each
            for each in read_tree_sessions(places.root)
            if self._device or places.selects_rank(each.status.rank)
        )
        self._periods = SessionPeriods(each.status for each in self.sessions)
        self._files = {
            name: [file for file in files if file.session not in self.other_sessions]
            for name, files in named.items()
        }
        selected = (
            file
            for name, files in self._files.items()
            for file in files
            if file.iteration is None
            or places.selects_iteration(folders[name].rank, file.iteration)
        )
        self._indexed = find_indexed_manifests(places.root, [] if balances_only else [*selected])

    def list_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a folder; if none has, the numbers of devices."""
        folders = self._places.folders
        ranks = {folder.rank for folder in folders.values() if not folder.device}
        return tuple(sorted(ranks or self._devices))

    def read_retired(self) -> frozenset[RetiredIteration]:
        """Return the retired iterations of the selected ranks."""
        return read_retired_iterations(self._places.root, self._files, self._places.problems)

    def read_batches(self) -> Iterator[list[Entry]]:
        """Yield the tensors of each batch, sorted."""
        if self._device:
            # Only the manifests of all ranks tell which rank wrote to a device folder, so all are
            # read in one batch.
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
            if self.other_sessions and self._attempt is None and not dated[at].manifests:
                continue
            dated[at].is_complete = True
            yield self._read(dated[at], constants)
        yield self._read(others, TreeManifests(), constants)

    def _read(
        self, batch: _WalkBatch, constants: TreeManifests, known: TreeManifests | None = None
    ) -> list[Entry]:
        """Return the tensors of a batch; add its records of constants to `constants`."""
        places, root = self._places, self._places.root
        known = TreeManifests(owners=self._owners) if known is None else known
        only = self._balances_only and batch.is_complete
        heads = len(self.manifests)
        read = read_balance if only else partial(read_file_records, indexed=self._indexed)
        for manifest in read_manifests(batch.manifests, places.problems, read):
            known.add(manifest)
            if manifest.records or manifest.session is not None:
                manifest = replace(manifest, records=(), session=None)
            self.manifests.append(manifest)
        # A dump of statistics has only tables, whose sizes are not in the balances, so its files
        # are listed.
        if any(only and (m.status.bytes_stored or m.status.linked) for m in self.manifests[heads:]):
            return []
        for leaf in batch.leaves:
            places.list_leaf(leaf)
        self.tables += collect_tables(places, known)
        files, places.files = places.files, []
        if self.other_sessions or self._attempt is not None:
            files = [file for file in files if self._is_selected(file, known)]
        unlisted, places.missing_files = places.missing_files, []
        # With manifests, the rows of the mapping are not checked, because a dropped tensor has a
        # row, too.
        if not self._stepped:
            named = f"named by {MAPPING_FILE}, but missing"
            places.problems.extend(f"{path}: {named}" for path in unlisted)
        read_each = partial(read_entries, stepped=self._stepped, names=self._names)
        entries = read_each(root, files, known, places.problems)
        absent_files = places.find_baseline_files(known)
        entries += read_each(root, absent_files, known, places.problems)
        constants.add_constants_of(known)
        places.problems.extend(self._missed(known))
        places.problems.extend(_find_size_mismatches(entries, files))
        if self._device:
            self._devices = {known.rank_of(folder) for folder in places.folders.values()}
        return sorted(entries, key=execution_sort_key)

    def _is_selected(self, file: TensorFile, known: TreeManifests) -> bool:
        """Return whether a file belongs to the job and the attempt, according to its manifest;
        without one, to its time.
        """
        if known.has_path(file.relative) or self._attempt is None:
            return known.has_path(file.relative)
        rank = known.rank_of(file.folder)
        session = self._periods.find_session(rank, file.file_name.timestamp_us)
        if session is None:
            return self._attempt == 0 and not self.other_sessions
        return session.attempt == self._attempt and self._job_id in ("", session.job_id)

    def _missed(self, known: TreeManifests) -> Iterator[str]:
        """Yield a sentence for each missing file in the selected folders that a manifest names."""
        for path in known.unclaimed_paths:
            folder = find_folder(path.rpartition("/")[0])
            named = folder is None or self._places.selects_folder(folder)
            # The file may exist in a folder that this batch does not list.
            if named and not os.path.lexists(self._places.root / path):
                yield f"{path}: named by a manifest, but missing"


def execution_sort_key(entry: Entry) -> tuple[int, bool, int, int, str, str, int]:
    """Return the sort key of execution order."""
    key, path = entry.key, entry.relative
    when, dated = key.timestamp_us, not key.constant
    # The inputs of a call come before its outputs; the path of a single tensor ends with side and
    # slot.
    return key.rank, dated, key.iteration, when, path, key.side, key.slot


def collect_tables(places: FolderIndex, known: TreeManifests | None = None) -> list[Table]:
    """Return the tables in an index, and remove them from it."""
    known = TreeManifests() if known is None else known
    found = [_table_at(places.root, *each, known) for each in places.tables]
    found += [
        Table(places.root, path, folder.rank, "", 0, 0, dated=False, info=True)
        for folder, path in places.info_files
    ]
    places.tables, places.info_files = [], []
    return found


def _table_at(
    root: Path, folder: DumpFolder, relative: str, operator: FileName | None, known: TreeManifests
) -> Table:
    """Return a table of a folder, or of an operator in the folder."""
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


def _table_sort_key(table: Table) -> tuple[int, bool, int, int, str]:
    stamp = table.operator.timestamp_us if table.operator is not None else 0
    return table.rank, not table.constant, table.iteration, stamp, table.relative


def _find_size_mismatches(entries: list[Entry], files: list[TensorFile]) -> Iterator[str]:
    """Yield a sentence for each file whose size differs from the size in its manifest."""
    due: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        # The record of a link to a file with the same bytes has 0 stored bytes.
        due[entry.relative] += entry.record.bytes_stored if entry.record else 0
    different = {f.relative: f for f in files if due[f.relative] not in (0, f.stored_bytes)}
    for entry in entries if different else ():
        file = different.get(entry.relative)
        if file is None or entry.record is None:
            continue
        if not is_packed_later(entry.record, file.relative, file.stored_bytes):
            due_bytes = due[file.relative]
            yield f"{file.relative}: {file.stored_bytes} bytes, but its manifest has {due_bytes}"
            del different[file.relative]


def is_packed_later(record: ManifestRecord, path: str, file_bytes: int) -> bool:
    """Return whether a file has another size than in its manifest because it is packed later.

    An agent under pressure stores a file in a frame that packs nothing; later it replaces first the
    file and then the manifest. `fsck` checks the content of such a file.
    """
    element = ELEMENT_TYPES.get(record.dtype)
    if element is None or not select_codec(path).suffix:
        return False
    stored = compute_stored_bytes(compute_npy_sizes(element.descr, record.shape))
    return stored in (record.bytes_stored, file_bytes)


def locate(path: Path) -> tuple[Entry, ...]:
    """Return the tensors of one file; empty if the file is in no tree.

    The file need not exist if its manifest says that a baseline has it.

    CorruptedError when the file is in a tree and cannot be read.
    """
    full = path.absolute()
    exists = full.is_file()
    if exists and full.name.endswith(TORCH_SUFFIX):
        return tuple(e for e in read_folder_around(full.parent) if e.path == full)
    name = read_long_names(full.parent / MAPPING_FILE).get_full_name(full.name)
    for root, folder in _find_possible_roots(full.parent):
        file_name = parse_name_in_folder(folder, name)
        if file_name is not None and file_name.kind.holds_tensors:
            relative = full.relative_to(root).as_posix()
            size = full.stat().st_size if exists else 0
            file = TensorFile(folder, relative, file_name, size, name)
            problems: list[str] = []
            manifests = _read_manifests_of(root, folder)
            known, stepped = TreeManifests(manifests), bool(manifests)
            if not exists and relative not in known.list_baseline_paths():
                return ()
            names = FullNames(root)
            entries = read_entries(root, [file], known, problems, stepped=stepped, names=names)
            if problems:
                raise CorruptedError(problems[0])
            return tuple(sorted(entries, key=execution_sort_key))
    return ()


def find_root(folder: Path) -> Path | None:
    """Return the root of the tree that a folder probably belongs to; None if it seems to belong to
    none.
    """
    return next(
        (
            root
            for root, below in _find_possible_roots(folder)
            if below.names is not NameScheme.CAPTURED
        ),
        None,
    )


def _find_possible_roots(folder: Path) -> list[tuple[Path, DumpFolder]]:
    """Return the possible roots for a folder: roots with manifests first, then the
    outermost one.
    """
    full = folder.absolute()
    found: list[tuple[Path, DumpFolder]] = []
    for root in reversed(full.parents[:MAX_TREE_DEPTH]):
        below = find_folder(full.relative_to(root).as_posix())
        if below is not None:
            found.append((root, below))
    return sorted(found, key=lambda each: not list_rank_folders(each[0]))


def _read_manifests_of(root: Path, folder: DumpFolder) -> list[Manifest]:
    ranks = list_rank_folders(root) if folder.device else [folder.base]
    # A constant is in the manifest of the iteration in which it was first seen.
    wanted = None if folder.constant else folder.iteration
    # Unreadable manifests are ignored here.
    files = [file for rank in ranks for file in list_manifest_files(root, rank, [])]
    return list(read_manifests((f for f in files if wanted in (None, f.iteration)), []))
