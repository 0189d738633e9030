"""A root to the folders that hold its tensors: by names, and by who asks for what.

A folder of one iteration is found and not entered: whoever reads it does, one at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.api_tree import info_files_of
from rankdump.contract.layout.file_name import FileKind, FileName
from rankdump.contract.layout.folders import RANK_FOLDER, ROOT, Folder, Names, inside
from rankdump.contract.layout.long_names import LongNames
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import absent_in, file_in
from rankdump.reader.files import File
from rankdump.reader.names import long_names
from rankdump.reader.query import Query

_ARGUMENTS = re.compile(r"[^.]+\..+\.json")
"""Arguments of an operator: `{op_type}.{scope}.json` (mindspore-dump.md 2.9)."""


class _Item(NamedTuple):
    """A name in a folder, and what stands there: with neither, another thing, or nothing."""

    name: str
    folder: bool
    file: bool
    size: int


class Leaf(NamedTuple):
    """A folder with nothing but tensors and tables, that has not been entered."""

    folder: Folder
    path: str
    """Below the root."""


@dataclass(slots=True)
class Places:
    """What has been found so far."""

    root: Path
    queries: tuple[Query, ...] = ()
    """What is asked for; folders with none of it are passed over."""
    sized: bool = True
    """Without this no file is looked at, and the sizes of all are 0."""
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    files: list[File] = field(default_factory=list[File])
    """Of folders that were entered, like tables."""
    tables: list[tuple[Folder, str, FileName | None]] = field(
        default_factory=list[tuple[Folder, str, FileName | None]]
    )
    infos: list[tuple[Folder, str]] = field(default_factory=list[tuple[Folder, str]])
    """Info files of dumps of APIs, by the folder of their rank."""
    folders: dict[str, Folder] = field(default_factory=dict[str, Folder])
    """Of ranks and devices, by their paths; also of ranks that nobody asked for."""
    absent: list[str] = field(default_factory=list[str])
    """Files that a `mapping.csv` names and that are not there."""
    foreign: int = 0
    problems: list[str] = field(default_factory=list[str])

    def find(self) -> None:
        """Look for all leaves, and enter what else holds tensors."""
        self._enter(ROOT, "")

    def enter(self, leaf: Leaf) -> None:
        """Take what a leaf holds."""
        self._enter(leaf.folder, leaf.path)

    def wants_rank(self, rank: int) -> bool:
        """Return whether tensors of a rank are asked for."""
        return all(query.rank in (None, rank) for query in self.queries)

    def wants(self, folder: Folder) -> bool:
        """Return whether tensors of a folder are; of a device nobody knows the rank yet."""
        if folder.device:
            return True
        dated = folder.iteration is not None or folder.constant
        where = folder.rank, folder.graph, folder.iteration
        return all(query.keeps_place(*where, dated=dated) for query in self.queries)

    def wants_iteration(self, rank: int, iteration: int) -> bool:
        """Return whether an iteration of a rank is asked for."""
        return self.wants_rank(rank) and all(
            query.iterations is None or iteration in query.iterations for query in self.queries
        )

    def _enter(self, folder: Folder, where: str) -> None:
        listed = self._listing(where)
        names = self._long_names(folder, where, listed) if folder.names is not Names.NONE else None
        for item in listed:
            name = item.name
            path = f"{where}/{name}" if where else name
            if item.folder:
                below = inside(folder, name)
                if below is not None:
                    self._go_on(below, path)
                    continue
            elif names and self._take(folder, path, names.full(name), item):
                continue
            # A root, and what stands right in it, may hold anything.
            self.foreign += where.count("/") > 0

    def _go_on(self, folder: Folder, path: str) -> None:
        if folder.enter is None and folder.names in (Names.RANK, Names.API):
            if self.wants(folder):
                self.leaves.append(Leaf(folder, path))
            return
        rank = RANK_FOLDER.fullmatch(path)
        # A number alone is the folder of a device when a file says so.
        device = folder.device and folder.base == path and folder.names is not Names.CAPTURED
        if device or rank:
            self.folders[path] = folder
        if not rank or self.wants_rank(folder.rank):
            self._enter(folder, path)

    def _take(self, folder: Folder, path: str, name: str, item: _Item) -> bool:
        """Take a file of a folder of tensors by its full name; return whether it belongs there."""
        if name == MAPPING_FILE:
            return True
        if not item.file:
            return False
        if folder.names is Names.API_TABLES:
            self.infos += [(folder, path)] if info_files_of(name) else []
            return True
        says = file_in(folder, name)
        if says is None:
            table = statistic_csv.TABLE.fullmatch(name) is not None
            if table:
                self.tables.append((folder, path, None))
            return table or _ARGUMENTS.fullmatch(name) is not None
        if folder.names is Names.CAPTURED:
            self.folders[folder.base] = folder
        if says.kind is FileKind.TABLE:
            self.tables.append((folder, path, says))
        elif says.kind.holds_tensors:
            self.files.append(File(folder, path, says, item.size, name))
        return True

    def _listing(self, where: str) -> list[_Item]:
        """Return what a folder holds, hidden names left out; a problem when it cannot be read."""
        folder = self.root / where
        try:
            with _listed(folder) as items:
                found = [self._looked_at(item) for item in items if item.name[0] != "."]
        except OSError as error:
            self.problems.append(f"{folder}: cannot be read: {error.strerror}")
            return []
        return sorted(found)

    def _looked_at(self, item: os.DirEntry[str]) -> _Item:
        try:
            if item.is_file():
                return _Item(item.name, False, True, item.stat().st_size if self.sized else 0)
            return _Item(item.name, item.is_dir(), False, 0)
        except OSError:  # gone since it was listed, a link to nowhere or to itself
            return _Item(item.name, False, False, 0)

    def _long_names(self, folder: Folder, where: str, listed: list[_Item]) -> LongNames:
        if not any(item.name == MAPPING_FILE for item in listed):
            return LongNames()
        try:
            names = long_names(self.root / where / MAPPING_FILE)
            there = {item.name for item in listed}
            self.absent += [f"{where}/{name}" for name in absent_in(folder, names, there)]
            return names
        except DamagedError as error:
            self.problems.append(str(error))
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
