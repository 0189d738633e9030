"""A tree to its entries: every tensor file with its key and what the manifests say of it.

Tolerant: what cannot be read is named in `problems`, what is not a tensor is counted, and the
walk goes on. Reads names and manifests, never a tensor.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankdump.codec import codec_of
from rankdump.contract.errors import DamagedError
from rankdump.contract.key import TensorKey
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.manifest import Manifest, ManifestRecord
from rankdump.reader.names import on_disk_names

_RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor file."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    key: TensorKey
    """As the file's name says it; `op_name` below is the raw one where it is known."""
    stored_bytes: int
    record: ManifestRecord | None = None
    """What the manifest says; None for a file that no manifest names."""

    @property
    def path(self) -> Path:
        """Where the file stands."""
        return self.root / self.relative

    @property
    def codec(self) -> str:
        """Name of the codec that packed the file."""
        return codec_of(self.relative).name

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest knows it."""
        return self.record.op_name if self.record else self.key.op_name


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything a walk found."""

    root: Path
    ranks: tuple[int, ...]
    """Ranks that have a folder, with or without tensors."""
    entries: tuple[Entry, ...]
    """Sorted by rank, iteration and time."""
    manifests: tuple[Manifest, ...]
    foreign: int = 0
    """Files among the tensors that are none; half-written hidden ones are not counted."""
    problems: tuple[str, ...] = ()
    """What could not be read, or is not there although a manifest names it."""


@dataclass(slots=True)
class _Found:
    """What has been gathered so far."""

    entries: list[Entry] = field(default_factory=list[Entry])
    manifests: list[Manifest] = field(default_factory=list[Manifest])
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
        number = _RANK.fullmatch(item.name)
        if number and item.is_dir():
            ranks.append(int(number[1]))
            _walk_rank(root, item.name, found)
    entries = _described(found)
    return Tree(
        root=root,
        ranks=tuple(sorted(ranks)),
        entries=tuple(sorted(entries, key=_place_in_time)),
        manifests=tuple(found.manifests),
        foreign=found.foreign,
        problems=tuple(found.problems),
    )


def locate(path: Path) -> Entry | None:
    """Return the entry of one file; None when it does not stand in a tree's folders."""
    full = path.absolute()
    if len(full.parts) < 6 or not full.is_file():
        return None
    root, relative = full.parents[4], full.relative_to(full.parents[4])
    names = on_disk_names(full.parent / layout.MAPPING_FILE)
    key = layout.key_of((relative.parent / names.get(full.name, full.name)).as_posix())
    if key is None:
        return None
    found = _Found([Entry(root, relative.as_posix(), key, full.stat().st_size)])
    pattern = f"iteration_{key.iteration}.*.json"
    for manifest in sorted((root / relative.parts[0] / layout.MANIFEST_FOLDER).glob(pattern)):
        _read_manifest(manifest, found)
    return _described(found, whole=False)[0]


def _place_in_time(entry: Entry) -> tuple[int, int, int, str]:
    return entry.key.rank, entry.key.iteration, entry.key.timestamp_us, entry.relative


def _walk_rank(root: Path, rank: str, found: _Found) -> None:
    for manifest in _manifest_files(root / rank / layout.MANIFEST_FOLDER):
        _read_manifest(manifest, found)
    for net in found.listing(root / rank):
        if net.is_dir() and net.name != layout.ORDER_FOLDER:
            for graph in _numbered(net.path, found):
                for iteration in _numbered(graph.path, found):
                    folder = f"{rank}/{net.name}/{graph.name}/{iteration.name}"
                    _walk_iteration(root, folder, found)


def _numbered(folder: str, found: _Found) -> Iterator[os.DirEntry[str]]:
    for item in found.listing(Path(folder)):
        if item.is_dir() and item.name.isdecimal():
            yield item
        else:
            found.foreign += 1


def _walk_iteration(root: Path, folder: str, found: _Found) -> None:
    try:
        names = on_disk_names(root / folder / layout.MAPPING_FILE)
    except DamagedError as error:
        names = {}
        found.problems.append(str(error))
    for item in found.listing(root / folder):
        if item.name == layout.MAPPING_FILE:
            continue
        key = layout.key_of(f"{folder}/{names.get(item.name, item.name)}")
        try:
            facts = item.stat()
        except OSError:  # gone since it was listed, or a link to nowhere
            facts = None
        if key is None or facts is None or not stat.S_ISREG(facts.st_mode):
            found.foreign += 1
            continue
        found.entries.append(Entry(root, f"{folder}/{item.name}", key, facts.st_size))


def _manifest_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))


def _read_manifest(path: Path, found: _Found) -> None:
    try:
        found.manifests.append(Manifest.from_json(path.read_bytes()))
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
    except DamagedError as error:
        found.problems.append(f"{path}: {error}")


def _described(found: _Found, *, whole: bool = True) -> list[Entry]:
    """Give each entry its record; with `whole`, records without a file become problems."""
    records = {record.path: record for m in found.manifests for record in m.records}
    described = [
        Entry(e.root, e.relative, e.key, e.stored_bytes, records.pop(e.relative, None))
        for e in found.entries
    ]
    if whole:
        found.problems.extend(f"{path}: named by a manifest, not there" for path in records)
    return described
