"""A tree to its entries: every tensor file with its key and what the manifests say of it.

Tolerant: what cannot be read is named in `problems`, what is not a tensor is counted, and the
walk goes on. Reads names and manifests, never a tensor or a table.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.manifest import Manifest
from rankdump.reader.entry import Entry, Table, Tree
from rankdump.reader.names import on_disk_names

RANK_FOLDER = re.compile(r"rank_(\d+)")
_ARGUMENTS = re.compile(r"[^.]+\..+\.json")
"""Arguments of an operator: `{op_type}.{scope}.json` (mindspore-dump.md 2.9)."""
_NO_NETS = (layout.ORDER_FOLDER, layout.GRAPH_FOLDER)


@dataclass(slots=True)
class _Found:
    """What has been gathered so far."""

    entries: list[Entry] = field(default_factory=list[Entry])
    manifests: list[Manifest] = field(default_factory=list[Manifest])
    tables: list[Table] = field(default_factory=list[Table])
    foreign: int = 0
    problems: list[str] = field(default_factory=list[str])

    def listing(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return what a folder holds, hidden names left out; a problem when it cannot be read."""
        try:
            with os.scandir(folder) as listed:
                return sorted((e for e in listed if e.name[0] != "."), key=lambda e: e.name)
        except OSError as error:
            self.problems.append(f"{folder}: cannot be read: {error.strerror}")
            return []


def walk(root: Path) -> Tree:
    """Return what stands below a root; a root that is no folder is a problem, not an error."""
    found = _Found()
    ranks: list[int] = []
    for item in found.listing(root):
        number = RANK_FOLDER.fullmatch(item.name)
        if number and _is_folder(item):
            ranks.append(int(number[1]))
            _walk_rank(root, item.name, found)
    entries = _described(found)
    return Tree(
        root=root,
        ranks=tuple(sorted(ranks)),
        entries=tuple(sorted(entries, key=_place_in_time)),
        manifests=tuple(found.manifests),
        tables=tuple(sorted(found.tables, key=_table_place)),
        foreign=found.foreign,
        problems=tuple(found.problems),
    )


def locate(path: Path) -> Entry | None:
    """Return the entry of one file; None when it does not stand in a tree's folders."""
    full = path.absolute()
    if len(full.parts) < 6 or not full.is_file():
        return None
    root, relative = full.parents[4], full.relative_to(full.parents[4])
    names = on_disk_names(full.parent / MAPPING_FILE)
    key = layout.key_of((relative.parent / names.get(full.name, full.name)).as_posix())
    if key is None:
        return None
    found = _Found([Entry(root, relative.as_posix(), key, full.stat().st_size)])
    # A constant is in the manifest of whichever iteration it was first seen in.
    pattern = "*.json" if key.constant else f"iteration_{key.iteration}.*.json"
    for manifest in _manifest_files(root / relative.parts[0] / layout.MANIFEST_FOLDER, pattern):
        _read_manifest(manifest, found)
    return _described(found, whole=False)[0]


def _place_in_time(entry: Entry) -> tuple[int, bool, int, int, str]:
    key = entry.key
    return key.rank, not key.constant, key.iteration, key.timestamp_us, entry.relative


def _table_place(table: Table) -> tuple[int, bool, int, str]:
    return table.rank, not table.constant, table.iteration, table.relative


def _walk_rank(root: Path, rank: str, found: _Found) -> None:
    for manifest in _manifest_files(root / rank / layout.MANIFEST_FOLDER, "*.json"):
        _read_manifest(manifest, found)
    for net in found.listing(root / rank):
        if net.name not in _NO_NETS and _is_folder(net):
            for graph in _folders(net.path, found):
                for last in _folders(graph.path, found, other=layout.CONSTANT_FOLDER):
                    folder = f"{rank}/{net.name}/{graph.name}/{last.name}"
                    _walk_tensors(root, folder, found)


def _folders(folder: str, found: _Found, *, other: str = "") -> Iterator[os.DirEntry[str]]:
    """Yield the folders that are named by a number, and the one other name."""
    for item in found.listing(Path(folder)):
        if _is_folder(item) and (item.name.isdecimal() or item.name == other):
            yield item
        else:
            found.foreign += 1


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _walk_tensors(root: Path, folder: str, found: _Found) -> None:
    try:
        names = on_disk_names(root / folder / MAPPING_FILE)
    except DamagedError as error:
        names = {}
        found.problems.append(str(error))
    for item in found.listing(root / folder):
        if item.name == MAPPING_FILE:
            continue
        try:
            facts = item.stat()
        except OSError:  # gone since it was listed, or a link to nowhere
            facts = None
        if facts is None or not stat.S_ISREG(facts.st_mode):
            found.foreign += 1
            continue
        full_name = names.get(item.name, item.name)
        _take_file(root, folder, item.name, full_name, facts.st_size, found)


def _take_file(
    root: Path, folder: str, name: str, full_name: str, stored_bytes: int, found: _Found
) -> None:
    key = layout.key_of(f"{folder}/{full_name}")
    if key is not None:
        found.entries.append(Entry(root, f"{folder}/{name}", key, stored_bytes))
    elif statistic_csv.TABLE.fullmatch(name):
        rank, net_name, graph, last = folder.split("/")
        constant = last == layout.CONSTANT_FOLDER
        found.tables.append(
            Table(
                root=root,
                relative=f"{folder}/{name}",
                rank=int(rank.removeprefix("rank_")),
                net_name=net_name,
                graph=int(graph),
                iteration=0 if constant else int(last),
                constant=constant,
            )
        )
    elif not _ARGUMENTS.fullmatch(name):
        found.foreign += 1


def _manifest_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _read_manifest(path: Path, found: _Found) -> None:
    try:
        found.manifests.append(Manifest.from_json(path.read_bytes()))
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
    except DamagedError as error:
        found.problems.append(f"{path}: {error}")


def _described(found: _Found, *, whole: bool = True) -> list[Entry]:
    """Give each entry its record; with `whole`, records without a file become problems."""
    # A record without a path is a row of statistic.csv: there is no file to miss.
    records = {record.path: record for m in found.manifests for record in m.records if record.path}
    described = [
        replace(entry, record=records.pop(entry.relative, None)) for entry in found.entries
    ]
    if whole:
        found.problems.extend(f"{path}: named by a manifest, not there" for path in records)
        found.problems.extend(_resized(described))
    return described


def _resized(entries: list[Entry]) -> Iterator[str]:
    """Name the files whose size alone says that they are damaged."""
    for entry in entries:
        # A link to identical bytes takes no room by its manifest.
        due = entry.record.bytes_stored if entry.record else 0
        if due not in (0, entry.stored_bytes):
            yield f"{entry.relative}: {entry.stored_bytes} bytes, its manifest says {due}"
