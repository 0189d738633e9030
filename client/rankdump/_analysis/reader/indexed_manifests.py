"""Manifests whose content is in the table of a tree: they could be read when the table was written,
and have not changed since. A table is behind its tree while a job runs, and may have rows of
removed iterations, so each manifest is compared with its size and time in the table's list of
sources. pyarrow is imported on use.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankdump._analysis.reader.manifests import ManifestFileName, list_tree_manifests
from rankdump._core.tree_root import STATE_FOLDER

if TYPE_CHECKING:
    from rankdump._analysis.table.table_files import TableFile

_MIN_MANIFESTS = 256
"""Number of manifests from which on the table saves more time than loading pyarrow takes."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """Pair of table files whose rows all match the present tree."""

    tensors: Path
    iterations: Path
    manifests: dict[tuple[int, int], Path]
    """Manifests whose rows the files have, by rank and iteration; no other manifest has the same
    place.
    """


def find_indexed_manifests(root: Path, manifests: Sequence[ManifestFileName]) -> frozenset[str]:
    """Return the paths of the manifests whose present content is in the table of a tree.

    Empty for a tree without a table, without pyarrow, and if there are only few manifests.
    """
    if len(manifests) < _MIN_MANIFESTS:
        return frozenset()
    prefix = make_path_prefix(root)
    sources = {
        prefix + source.path: (source.size, source.modified_ns)
        for file in _list_table_files(root, manifests)
        for source in file.sources
    }
    paths = [str(each.path) for each in manifests]
    return frozenset(path for path in paths if path in sources and _look_at(path) == sources[path])


def find_indexed_files(root: Path) -> list[IndexedFile]:
    """Return the files of a table that may be read in place of the manifests.

    A file is left out if one of its sources was changed or removed, or is not the only manifest
    with its rank and iteration, because rows do not name their session.
    """
    if not (root / STATE_FOLDER / "table").is_dir():
        return []
    listed = [*list_tree_manifests(root)]
    count = Counter((each.rank, each.iteration) for each in listed)
    places = {
        str(path): (rank, iteration)
        for path, iteration, _, rank in listed
        if iteration is not None and rank is not None and count[rank, iteration] == 1
    }
    found: list[IndexedFile] = []
    prefix = make_path_prefix(root)
    for file in _list_table_files(root, listed) if len(listed) >= _MIN_MANIFESTS else ():
        own = {prefix + each.path: (each.size, each.modified_ns) for each in file.sources}
        if all(path in places and _look_at(path) == facts for path, facts in own.items()):
            tensors, iterations = (root / path for path in file.paths)
            # Removed from `places`, so that a second file with the same manifest is left out.
            manifests = {places.pop(path): Path(path) for path in own}
            found.append(IndexedFile(tensors, iterations, manifests))
    return found


def make_path_prefix(root: Path) -> str:
    """Return the beginning of all paths below a root as texts; empty for the current folder."""
    return str(root / "_")[:-1]


def _list_table_files(root: Path, manifests: Iterable[ManifestFileName]) -> list[TableFile]:
    """Return the files of a table that may have rows of these manifests, without damaged files."""
    if not (root / STATE_FOLDER / "table").is_dir():
        return []
    try:
        from rankdump._analysis.table import table_files
        from rankdump._analysis.table.tree_access import LocalTree
    except ImportError:  # also of a pyarrow that does not fit NumPy
        return []
    ranks = [each.rank for each in manifests if each.rank is not None] or [0]
    iterations = [each.iteration for each in manifests if each.iteration is not None] or [0]
    extent = table_files.TableExtent(
        *(table_files.NumberRange(min(of), max(of)) for of in (iterations, ranks))
    )
    try:
        return table_files.list_table(LocalTree(root), [], extents=[extent]).files
    except OSError:
        return []


def _look_at(path: str) -> tuple[int, int] | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
