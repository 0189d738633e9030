"""One file to its tensors, wherever in a tree it stands."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import DEEPEST, Folder, Names, folder_at
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import file_in
from rankdump.contract.manifest import Manifest
from rankdump.reader.entry import Entry
from rankdump.reader.files import File, entries_of
from rankdump.reader.manifests import (
    Manifested,
    manifest_files,
    ranks_with_manifests,
    read_manifests,
)
from rankdump.reader.names import long_names
from rankdump.reader.walk import place_in_time


def locate(path: Path) -> tuple[Entry, ...]:
    """Return the tensors of one file; none when it does not stand in a tree's folders.

    DamagedError when it does, and cannot be read.
    """
    full = path.absolute()
    if not full.is_file():
        return ()
    name = long_names(full.parent / MAPPING_FILE).full(full.name)
    for root, folder in _roots(full.parent):
        says = file_in(folder, name)
        if says is not None and says.kind.holds_tensors:
            relative = full.relative_to(root).as_posix()
            file = File(folder, relative, says, full.stat().st_size, name)
            problems: list[str] = []
            manifests = _manifests(root, folder)
            known, stepped = Manifested(manifests), bool(manifests)
            entries = entries_of(root, [file], known, problems, stepped=stepped)
            if problems:
                raise DamagedError(problems[0])
            return tuple(sorted(entries, key=place_in_time))
    return ()


def root_of(folder: Path) -> Path | None:
    """Return the root that a folder of a tree is likely to belong to; None for any other folder."""
    return next((root for root, below in _roots(folder) if below.names is not Names.CAPTURED), None)


def _roots(folder: Path) -> list[tuple[Path, Folder]]:
    """Return what may be the root: those with manifests first, then the outermost."""
    full = folder.absolute()
    found: list[tuple[Path, Folder]] = []
    for root in reversed(full.parents[:DEEPEST]):
        below = folder_at(full.relative_to(root).as_posix())
        if below is not None:
            found.append((root, below))
    return sorted(found, key=lambda each: not ranks_with_manifests(each[0]))


def _manifests(root: Path, folder: Folder) -> list[Manifest]:
    ranks = ranks_with_manifests(root) if folder.device else [folder.base]
    # A constant is in the manifest of whichever iteration it was first seen in.
    every = None if folder.constant else folder.iteration
    # What of them cannot be read says nothing of this file.
    files = [file for rank in ranks for file in manifest_files(root, rank, [])]
    return list(read_manifests((f for f in files if every in (None, f.iteration)), []))
