"""Manifests whose content the table of a tree has: they were whole when it was read, and have not
changed. A table is behind its tree while a job runs, and may have rows of removed iterations, so
each manifest is compared with its size and time in the list of sources. Imports pyarrow on use.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rankdump._analysis.reader.manifests import list_manifest_files, list_rank_folders
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN, find_folder
from rankdump.errors import CorruptedError

if TYPE_CHECKING:
    from rankdump._analysis.table.table_files import TableFile

_MIN_MANIFESTS = 256
"""From so many on the table saves more time than loading pyarrow takes."""


def find_indexed_manifests(root: Path, paths: Sequence[Path]) -> frozenset[str]:
    """Return those of the manifests that the table of a tree has as they are now.

    Empty for a tree without a table, without pyarrow, and for few manifests.
    """
    if len(paths) < _MIN_MANIFESTS:
        return frozenset()
    sources = {
        f"{root}/{source.path}": (source.size, source.modified_ns)
        for file in _read_table_files(root)
        for source in file.sources
    }
    return frozenset(
        name for name in map(str, paths) if name in sources and _look_at(name) == sources[name]
    )


@dataclass(frozen=True, slots=True)
class IndexedPlaces:
    """Files of a table of which every row is as the tree has it, and whose rows they have."""

    files: tuple[TableFile, ...] = ()
    manifests: dict[tuple[int, int], Path] = field(default_factory=dict[tuple[int, int], Path])
    """The only manifest of each rank and iteration that they have."""


def find_indexed_places(root: Path) -> IndexedPlaces:
    """Return what the table of a tree can answer in place of the manifests.

    A file is left out when one of its sources was changed or removed, or is not the only manifest
    of its rank and iteration: its rows do not name their session.
    """
    listed = [
        (folder.rank, file)
        for name in list_rank_folders(root)
        if RANK_FOLDER_PATTERN.fullmatch(name) and (folder := find_folder(name)) is not None
        for file in list_manifest_files(root, name, [])
    ]
    tables = _read_table_files(root) if len(listed) >= _MIN_MANIFESTS else []
    count = Counter((rank, file.iteration) for rank, file in listed)
    places = {
        str(file.path): (rank, file.iteration)
        for rank, file in listed
        if file.iteration is not None and count[rank, file.iteration] == 1
    }
    files: list[TableFile] = []
    manifests: dict[tuple[int, int], Path] = {}
    for table in tables:
        own = {f"{root}/{each.path}": (each.size, each.modified_ns) for each in table.sources}
        if all(path in places and _look_at(path) == facts for path, facts in own.items()):
            files.append(table)
            # None is counted again where another file has it as well.
            manifests |= {places.pop(path): Path(path) for path in own}
    return IndexedPlaces(tuple(files), manifests)


def _read_table_files(root: Path) -> list[TableFile]:
    """Return the files of the table with their sources, without damaged ones."""
    if not (root / STATE_FOLDER / "table").is_dir():
        return []
    try:
        from rankdump._analysis.table import table_files
    except ModuleNotFoundError:
        return []
    found: list[TableFile] = []
    for path in table_files.list_tensor_files(root):
        with suppress(CorruptedError):
            found.append(table_files.TableFile.at(path, table_files.read_sources(path)))
    return found


def _look_at(path: str) -> tuple[int, int] | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
