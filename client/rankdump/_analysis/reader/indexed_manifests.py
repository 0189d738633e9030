"""Manifests whose content the table of a tree has: they were whole when it was read, and have not
changed. A table is behind its tree while a job runs, and may have rows of removed iterations, so
each manifest is compared with its size and time in the list of sources. Imports pyarrow on use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rankdump._core.tree_root import STATE_FOLDER
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
        for file in read_table_files(root)
        for source in file.sources
    }
    return frozenset(
        name for name in map(str, paths) if name in sources and _look_at(name) == sources[name]
    )


def read_table_files(root: Path) -> list[TableFile]:
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


def select_current_files(root: Path, files: Iterable[TableFile]) -> list[TableFile]:
    """Return the files of which no source was changed or removed."""
    return [
        file
        for file in files
        if all(
            _look_at(f"{root}/{each.path}") == (each.size, each.modified_ns)
            for each in file.sources
        )
    ]


def _look_at(path: str) -> tuple[int, int] | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
