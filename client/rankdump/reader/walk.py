"""A root to its entries: every tensor with its key and what the manifests say of it.

Tolerant: what cannot be read is named in `problems`, what is not a tensor is counted, and the
walk goes on. Reads names, manifests, and headers of bin files that no manifest names; never a
tensor or a table.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.api_tree import info_files_of
from rankdump.contract.layout.file_name import FileKind, FileName
from rankdump.contract.layout.folders import RANK_FOLDER, ROOT, Folder, Names, inside
from rankdump.contract.layout.long_names import LongNames
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import file_in
from rankdump.reader.collector import collector_paused
from rankdump.reader.entry import Entry, Table, Tree
from rankdump.reader.files import File, entries_of
from rankdump.reader.manifests import Manifested, read_manifests
from rankdump.reader.names import long_names
from rankdump.reader.retired import read_retired

_ARGUMENTS = re.compile(r"[^.]+\..+\.json")
"""Arguments of an operator: `{op_type}.{scope}.json` (mindspore-dump.md 2.9)."""


_Item: TypeAlias = "tuple[str, os.stat_result | None]"
"""A name in a folder, and what stands there; None when that cannot be told."""


@dataclass(slots=True)
class _Found:
    """What has been gathered so far."""

    root: Path
    files: list[File] = field(default_factory=list[File])
    tables: list[tuple[Folder, str, FileName | None]] = field(
        default_factory=list[tuple[Folder, str, FileName | None]]
    )
    infos: list[tuple[Folder, str]] = field(default_factory=list[tuple[Folder, str]])
    """Info files of dumps of APIs, by the folder of their rank."""
    folders: dict[str, Folder] = field(default_factory=dict[str, Folder])
    """Of ranks and devices, by their paths."""
    foreign: int = 0
    problems: list[str] = field(default_factory=list[str])

    def listing(self, where: str) -> list[_Item]:
        """Return what a folder holds, hidden names left out; a problem when it cannot be read."""
        folder = self.root / where
        try:
            with _listed(folder) as items:
                found = [_looked_at(item) for item in items if item.name[0] != "."]
        except OSError as error:
            self.problems.append(f"{folder}: cannot be read: {error.strerror}")
            return []
        return sorted(found, key=itemgetter(0))


@collector_paused()
def walk(root: Path) -> Tree:
    """Return what stands below a root; a root that is no folder is a problem, not an error."""
    found = _Found(root)
    _enter(found, ROOT, "")
    ranks = [name for name in found.folders if RANK_FOLDER.fullmatch(name)]
    manifests = read_manifests(root, ranks, found.problems)
    retired = read_retired(root, ranks, found.problems)
    known = Manifested(manifests)
    entries = entries_of(root, found.files, known, found.problems)
    found.problems.extend(f"{path}: named by a manifest, not there" for path in known.missed)
    found.problems.extend(_resized(entries, found.files))
    tables = [table_of(root, *each, known) for each in found.tables]
    tables += [_info_of(root, *each) for each in found.infos]
    return Tree(
        root=root,
        ranks=_ranks(found, known),
        entries=tuple(sorted(entries, key=place_in_time)),
        manifests=tuple(manifests),
        tables=tuple(sorted(tables, key=_table_place)),
        foreign=found.foreign,
        problems=tuple(found.problems),
        by_device=not ranks,
        retired=retired,
    )


def place_in_time(entry: Entry) -> tuple[int, bool, int, int, str, str, int]:
    """Return what sorts tensors as the program ran."""
    key, path = entry.key, entry.relative
    when, dated = key.timestamp_us, not key.constant
    # Of one call, inputs come before outputs; a file of one tensor is named by side and slot.
    return key.rank, dated, key.iteration, when, path, key.side, key.slot


def table_of(
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


def _ranks(found: _Found, known: Manifested) -> tuple[int, ...]:
    """Return those that have a folder: ranks, or devices where there are no ranks."""
    ranks = {f.rank for f in found.folders.values() if not f.device}
    return tuple(sorted(ranks or {known.rank_of(f) for f in found.folders.values()}))


def _enter(found: _Found, folder: Folder, where: str) -> None:
    """Take what a folder holds, and what is below it."""
    listed = found.listing(where)
    names = _long_names(found, where, listed) if folder.names is not Names.NONE else None
    for name, facts in listed:
        path = f"{where}/{name}" if where else name
        if facts and stat.S_ISDIR(facts.st_mode):
            below = inside(folder, name)
            if below is not None:
                _note(found, below, path)
                _enter(found, below, path)
                continue
        elif facts and names and _take(found, folder, path, names.full(name), facts):
            continue
        # A root, and what stands right in it, may hold anything.
        found.foreign += where.count("/") > 0


def _note(found: _Found, folder: Folder, path: str) -> None:
    """Remember the folder of a rank or a device; a number alone is one when a file says so."""
    device = folder.device and folder.base == path and folder.names is not Names.CAPTURED
    if device or RANK_FOLDER.fullmatch(path):
        found.folders[path] = folder


def _take(found: _Found, folder: Folder, path: str, name: str, facts: os.stat_result) -> bool:
    """Take a file of a folder of tensors by its full name; return whether it belongs there."""
    if name == MAPPING_FILE:
        return True
    if not stat.S_ISREG(facts.st_mode):
        return False
    if folder.names is Names.API_TABLES:
        found.infos += [(folder, path)] if info_files_of(name) else []
        return True
    says = file_in(folder, name)
    if says is None:
        table = statistic_csv.TABLE.fullmatch(name) is not None
        if table:
            found.tables.append((folder, path, None))
        return table or _ARGUMENTS.fullmatch(name) is not None
    if folder.names is Names.CAPTURED:
        found.folders[folder.base] = folder
    if says.kind is FileKind.TABLE:
        found.tables.append((folder, path, says))
    elif says.kind.holds_tensors:
        found.files.append(File(folder, path, says, facts.st_size, name))
    return True


def _long_names(found: _Found, where: str, listed: list[_Item]) -> LongNames:
    if not any(name == MAPPING_FILE for name, _ in listed):
        return LongNames()
    try:
        return long_names(found.root / where / MAPPING_FILE)
    except DamagedError as error:
        found.problems.append(str(error))
        return LongNames()


@contextmanager
def _listed(folder: Path) -> Generator[Iterator[os.DirEntry[str]], None, None]:
    """Give what a folder holds; by its descriptor, so that no path is looked up for each file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(descriptor) as items:
            yield items
    finally:
        os.close(descriptor)


def _looked_at(item: os.DirEntry[str]) -> _Item:
    try:
        return item.name, item.stat()
    except OSError:  # gone since it was listed, a link to nowhere or to itself
        return item.name, None


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
