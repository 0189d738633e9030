"""Files of a tree: the folders with tensors that the queries select, the long names in
`mapping.csv`, and the tensors in each file. Reads names and, for bin files without a manifest,
headers.

Folders of single iterations are found but not entered; the caller enters them one at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.full_names import FullNames
from rankdump._analysis.reader.manifests import StatusAndRecord, TreeManifests
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.statistic_tables import InfoFilePlaces
from rankdump._analysis.reader.tensor_loader import described
from rankdump._analysis.reader.tree import Described, Entry
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout import statistic_tables
from rankdump._layout.api_tree import parse_info_file_name
from rankdump._layout.dump_folders import (
    RANK_FOLDER_PATTERN,
    ROOT_FOLDER,
    DumpFolder,
    NameScheme,
    enter_folder,
    find_absent_names,
    find_folder,
    make_tensor_key,
    parse_name_in_folder,
)
from rankdump._layout.file_name import (
    NUMBER_PATTERN,
    PACKED_SUFFIX,
    FileKind,
    FileName,
    LongFileNames,
)
from rankdump._layout.tree_paths import MAPPING_FILE
from rankdump.errors import CorruptedError

_MEMBER = re.compile(rf"(input|output)\.({NUMBER_PATTERN})")
ARGUMENTS_FILE_NAME = re.compile(r"[^.]+\..+\.json")
"""File with the arguments of an operator, `{op_type}.{scope}.json` (MindSpore 2.3 Dump guide)."""


def read_long_names(mapping: Path) -> LongFileNames:
    """Return the long names in a folder; CorruptedError when the file with them is unreadable."""
    with named_errors(mapping), suppress(FileNotFoundError):
        return LongFileNames.parse(mapping.read_bytes())
    return LongFileNames()


class TensorFile(NamedTuple):
    """One file with one or more tensors."""

    folder: DumpFolder
    relative: str
    """Path below the root."""
    file_name: FileName
    """The parsed name; if the name is shortened, of the full name."""
    stored_bytes: int
    full_name: str = ""
    """The full name if the name is shortened, else the name itself."""

    @property
    def folder_path(self) -> str:
        """Path of the folder below the root."""
        return self.relative.rpartition("/")[0]

    @property
    def operator(self) -> tuple[str, FileName]:
        """Operator of the file; equal for the file with all its tensors and for files with a single
        one.
        """
        name = self.file_name._replace(kind=FileKind.OPERATOR, side=TensorSide.INPUT, slot=0)
        return self.folder_path, name


def read_entries(
    root: Path,
    files: Iterable[TensorFile],
    known: TreeManifests,
    problems: list[str],
    *,
    stepped: bool,
    names: FullNames,
) -> list[Entry]:
    """Return the tensors of files, each once; add a problem for each unreadable file.

    If joining an operator's tensors was interrupted, they may be in the operator's file and in
    files of their own; those in the operator's file are used then. With `stepped`, info files have
    real step numbers.
    """
    entries: list[Entry] = []
    bins: list[TensorFile] = []
    placed = InfoFilePlaces(root, stepped=stepped)
    for file in files:
        if file.folder.names is NameScheme.API:
            entries.append(_api_call_entry(root, file, known, placed))
        elif file.file_name.kind is FileKind.TENSOR:
            entries.append(_tensor_entry(root, file, known, names))
        else:
            bins.append(file)
    seen: set[tuple[tuple[str, FileName], str]] = set()
    for file in sorted(bins, key=lambda file: file.file_name.kind is FileKind.MEMBER):
        with noted_errors(problems):
            operator = file.operator
            for entry in list(_member_entries(root, file, known)):
                once = operator, entry.member
                if once not in seen:
                    seen.add(once)
                    entries.append(entry)
    return entries


def _tensor_entry(root: Path, file: TensorFile, known: TreeManifests, names: FullNames) -> Entry:
    records, name = known.records_of(file.relative), file.file_name
    # A record has a member if the tensors of an operator share a time stamp.
    found = records.get("") or records.get(f"{name.side.value}.{name.slot}")
    key = _key(file, name.side, name.slot, known, found)
    if found:
        return Entry(root, file.relative, key, file.stored_bytes, found[1])
    full_name = names.find(key.rank, key.op_name)
    return Entry(root, file.relative, key, file.stored_bytes, full_name=full_name)


def _api_call_entry(
    root: Path, file: TensorFile, known: TreeManifests, placed: InfoFilePlaces
) -> Entry:
    """Return the tensor of a file without a time stamp, whose place a manifest or the info file
    tells.
    """
    found = known.records_of(file.relative).get("")
    key = _key(file, file.file_name.side, file.file_name.slot, known)
    if found is not None:
        iteration, when = found[0].iteration, found[1].timestamp_us
    else:
        iteration, when = placed.place_of_file(file.folder_path, file.full_name)
    key = key._replace(iteration=iteration, timestamp_us=when)
    return Entry(root, file.relative, key, file.stored_bytes, found[1] if found else None)


def _member_entries(root: Path, file: TensorFile, known: TreeManifests) -> Iterator[Entry]:
    records = known.records_of(file.relative)
    if records:
        for member, found in records.items():
            side, slot = _side_and_slot(file, member)
            key = _key(file, side, slot, known, found)
            taken = found[1].bytes_stored
            yield Entry(root, file.relative, key, taken, found[1], f"{side.value}.{slot}")
        return
    tensors = list(described(root / file.relative))
    shares = _member_sizes(file, [facts for _, _, facts in tensors])
    for (side, slot, facts), share in zip(tensors, shares, strict=True):
        key = _key(file, side, slot, known, None)
        member = f"{side.value}.{slot}"
        yield Entry(root, file.relative, key, share, member=member, described=facts)


def _side_and_slot(file: TensorFile, member: str) -> tuple[TensorSide, int]:
    if file.file_name.kind is FileKind.MEMBER:
        return file.file_name.side, file.file_name.slot
    found = _MEMBER.fullmatch(member)
    if found is None:
        raise CorruptedError(f"{file.relative}: its manifest names {member[:60]!r} as a part of it")
    return TensorSide(found[1]), int(found[2])


def _member_sizes(file: TensorFile, tensors: list[Described]) -> list[int]:
    """Return the part of the file size that each tensor takes; the first part includes
    the header.
    """
    sizes = [facts.data_bytes for facts in tensors]
    packed = file.relative.endswith(PACKED_SUFFIX)
    rest = [0] * len(sizes[1:]) if packed else sizes[1:]
    return [file.stored_bytes - sum(rest), *rest][: len(sizes)]


def _key(
    file: TensorFile,
    side: TensorSide,
    slot: int,
    known: TreeManifests,
    found: StatusAndRecord | None = None,
) -> TensorKey:
    folder, name = file.folder, file.file_name
    if not folder.device:
        return make_tensor_key(folder, name, side, slot)
    if found is None:
        return make_tensor_key(folder, name, side, slot, rank=known.rank_of(folder))
    status = found[0]
    return make_tensor_key(folder, name, side, slot, rank=status.rank, iteration=status.iteration)


class _FolderItem(NamedTuple):
    """A name in a folder, and whether it is a folder or a file; both are False for
    other entries.
    """

    name: str
    folder: bool
    file: bool
    size: int


class LeafFolder(NamedTuple):
    """A folder with tensors and tables and without subfolders; it was not entered yet."""

    folder: DumpFolder
    path: str
    """Relative to the root."""


@dataclass(slots=True)
class FolderIndex:
    """Index of the folders of a tree, and of the files in those that were entered."""

    root: Path
    queries: tuple[Query, ...] = ()
    """Selections; folders that they exclude are not entered."""
    sized: bool = True
    """Whether the sizes of files are read; if not, all sizes are 0."""
    leaves: list[LeafFolder] = field(default_factory=list[LeafFolder])
    files: list[TensorFile] = field(default_factory=list[TensorFile])
    """Tensor files in the folders that were entered; `tables` and `info_files` likewise."""
    tables: list[tuple[DumpFolder, str, FileName | None]] = field(
        default_factory=list[tuple[DumpFolder, str, FileName | None]]
    )
    info_files: list[tuple[DumpFolder, str]] = field(default_factory=list[tuple[DumpFolder, str]])
    """Info files of API dumps, each with the folder of its rank."""
    folders: dict[str, DumpFolder] = field(default_factory=dict[str, DumpFolder])
    """Folders of ranks and devices by path, including ranks that no query selects."""
    missing_files: list[str] = field(default_factory=list[str])
    """Files that a `mapping.csv` names and that do not exist."""
    foreign_files: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def is_empty(self) -> bool:
        """Whether no folder or file was found that may have dumped tensors."""
        return not (self.leaves or self.files or self.tables or self.info_files)

    def find_folders(self) -> None:
        """Find all leaf folders, and enter the other folders with tensors."""
        self._enter(ROOT_FOLDER, "")

    def list_leaf(self, leaf: LeafFolder) -> None:
        """Add the files of a leaf folder."""
        self._enter(leaf.folder, leaf.path)

    def selects_rank(self, rank: int) -> bool:
        """Return whether the queries select tensors of a rank."""
        return all(query.rank in (None, rank) for query in self.queries)

    def selects_folder(self, folder: DumpFolder) -> bool:
        """Return whether the queries select tensors of a folder; true for folders of devices.

        The rank of a device is not known yet.
        """
        if folder.device:
            return True
        dated = folder.iteration is not None or folder.constant
        where = folder.rank, folder.graph, folder.iteration
        return all(query.keeps_place(*where, dated=dated) for query in self.queries)

    def selects_iteration(self, rank: int, iteration: int) -> bool:
        """Return whether the queries select an iteration of a rank."""
        return all(query.keeps_iteration(rank, iteration) for query in self.queries)

    def find_baseline_files(self, known: TreeManifests) -> list[TensorFile]:
        """Return files that do not exist in the tree, because a baseline has their tensors."""
        found: list[TensorFile] = []
        for path in known.list_baseline_paths():
            where, _, name = path.rpartition("/")
            folder = find_folder(where)
            if folder is None or not self.selects_folder(folder):
                continue
            full_name = read_long_names(self.root / where / MAPPING_FILE).get_full_name(name)
            file_name = parse_name_in_folder(folder, full_name)
            if file_name is not None and file_name.kind.holds_tensors:
                found.append(TensorFile(folder, path, file_name, 0, full_name))
        return found

    def _enter(self, folder: DumpFolder, where: str) -> None:
        listed = self._listing(where)
        names = (
            self._long_names(folder, where, listed) if folder.names is not NameScheme.NONE else None
        )
        for item in listed:
            name = item.name
            path = f"{where}/{name}" if where else name
            if item.folder:
                below = enter_folder(folder, name)
                if below is not None:
                    self._add_folder(below, path)
                    continue
            elif names and self._add_file(folder, path, names.get_full_name(name), item):
                continue
            # The root and its folders may contain any other file.
            self.foreign_files += where.count("/") > 0

    def _add_folder(self, folder: DumpFolder, path: str) -> None:
        if folder.enter is None and folder.names in (NameScheme.RANK, NameScheme.API):
            if self.selects_folder(folder):
                self.leaves.append(LeafFolder(folder, path))
            return
        rank = RANK_FOLDER_PATTERN.fullmatch(path)
        # A folder with only a number as its name is that of a device only if a file in it shows
        # that.
        device = folder.device and folder.base == path and folder.names is not NameScheme.CAPTURED
        if device or rank:
            self.folders[path] = folder
        if not rank or self.selects_rank(folder.rank):
            self._enter(folder, path)

    def _add_file(self, folder: DumpFolder, path: str, name: str, item: _FolderItem) -> bool:
        """Add a file of a tensor folder by its full name; return whether the file belongs there."""
        if name == MAPPING_FILE:
            return True
        if not item.file:
            return False
        if folder.names is NameScheme.API_TABLES:
            self.info_files += [(folder, path)] if parse_info_file_name(name) else []
            return True
        file_name = parse_name_in_folder(folder, name)
        if file_name is None:
            table = statistic_tables.STATISTIC_TABLE_NAME.fullmatch(name) is not None
            if table:
                self.tables.append((folder, path, None))
            return table or ARGUMENTS_FILE_NAME.fullmatch(name) is not None
        if folder.names is NameScheme.CAPTURED:
            self.folders[folder.base] = folder
        if file_name.kind is FileKind.TABLE:
            self.tables.append((folder, path, file_name))
        elif file_name.kind.holds_tensors:
            self.files.append(TensorFile(folder, path, file_name, item.size, name))
        return True

    def _listing(self, where: str) -> list[_FolderItem]:
        """Return the entries of a folder, without hidden names; add a problem if it is
        unreadable.
        """
        folder = f"{self.root}/{where}" if where else str(self.root)
        found: list[_FolderItem] = []
        with noted_errors(self.problems), named_errors(folder), _scan_folder(folder) as items:
            found = [self._inspect(item) for item in items if item.name[0] != "."]
        return sorted(found)

    def _inspect(self, item: os.DirEntry[str]) -> _FolderItem:
        try:
            if item.is_file():
                return _FolderItem(item.name, False, True, item.stat().st_size if self.sized else 0)
            return _FolderItem(item.name, item.is_dir(), False, 0)
        # the entry was removed after it was listed, or is a broken or circular link
        except OSError:
            return _FolderItem(item.name, False, False, 0)

    def _long_names(
        self, folder: DumpFolder, where: str, listed: list[_FolderItem]
    ) -> LongFileNames:
        if not any(item.name == MAPPING_FILE for item in listed):
            return LongFileNames()
        with noted_errors(self.problems):
            names = read_long_names(self.root / where / MAPPING_FILE)
            there = {item.name for item in listed}
            self.missing_files += [
                f"{where}/{name}" for name in find_absent_names(folder, names, there)
            ]
            return names
        return LongFileNames()


@contextmanager
def _scan_folder(folder: str) -> Generator[Iterator[os.DirEntry[str]], None, None]:
    """Yield the entries of a folder, which is opened by descriptor to avoid a path lookup for each
    file.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(descriptor) as items:
            yield items
    finally:
        os.close(descriptor)
