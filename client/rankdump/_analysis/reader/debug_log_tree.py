"""Logs of torch's DebugMode as a tree of statistics, in which each file is one iteration of one
rank.

Rank and iteration are taken from names such as `step3/rank_1.json`; if a name has none, they are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.foreign_files import find_marked_files
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Entries, Table, Tree
from rankdump._layout.debug_log import is_debug_log, parse_debug_log
from rankdump._layout.foreign_calls import CallPlace, ForeignCall, find_call_place
from rankdump.errors import CorruptedError

DEBUG_MODE = "torch DebugMode"


def is_debug_log_tree(root: Path) -> bool:
    """Return whether a path is a log of DebugMode, or a folder with one."""
    return next(find_marked_files(root, is_debug_log), None) is not None


def find_debug_logs(root: Path) -> list[tuple[Path, CallPlace]]:
    """Return the logs with rank and iteration; CorruptedError if two logs have the same ones."""
    found: dict[CallPlace, Path] = {}
    base = root.parent if root.is_file() else root
    for path in find_marked_files(root, is_debug_log):
        place = find_call_place(path.relative_to(base).as_posix())
        other = found.setdefault(place, path)
        if other != path:
            raise CorruptedError(
                f"{other} and {path} are both of rank {place.rank}, iteration {place.iteration}: "
                "name one of the files, or rename them like step3/rank_1.json"
            )
    return [(path, place) for place, path in sorted(found.items())]


def read_debug_log_tree(root: Path, queries: Sequence[Query]) -> Tree:
    """Return the tree of the logs, restricted to the places that the queries select."""
    logs = find_debug_logs(root)
    tables = [
        Table(path.parent, path.name, place.rank, "", 0, place.iteration, form=DEBUG_MODE)
        for path, place in logs
        if all(query.keeps_place(place.rank, 0, place.iteration) for query in queries)
    ]
    return Tree(
        root=root,
        ranks=tuple(sorted({place.rank for _, place in logs})),
        entries=Entries.of(root, ()),
        manifests=(),
        tables=tuple(tables),
        queries=tuple(queries),
        tool=DEBUG_MODE,
    )


def read_debug_log_calls(table: Table) -> list[ForeignCall]:
    """Return the calls in a log; CorruptedError names the file."""
    with named_errors(table.path):
        return parse_debug_log(table.path.read_bytes())
