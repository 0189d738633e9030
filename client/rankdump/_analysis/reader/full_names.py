"""Full scope names of tensors that no manifest names, because their iteration is still being
written, or their rank was killed. The names come from the newest manifest of the rank and from its
graphs.

Files and tables replace separators in a name by `_`, so several names may have the same spelling;
such a spelling has no full name. Trees of MindSpore itself keep the spelling of their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rankdump._analysis.reader.manifests import (
    list_rank_manifests,
    read_manifests,
    read_tree_sessions,
)
from rankdump._analysis.reader.source_lines import parse_ir_operators
from rankdump._core.record import sanitize_name
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._layout.statistic_tables import clean_table_field
from rankdump._layout.tree_paths import GRAPH_FOLDER, make_rank_folder

_GRAPH_PARAMETER = re.compile(r"%para[0-9]+_(\S+): <")


class FullNames:
    """Full names by rank and spelling; those of a rank are read when the first one is needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._of_ranks: dict[int, Mapping[str, str]] = {}

    def find(self, rank: int, spelling: str) -> str:
        """Return the full name of an operator or parameter, given its spelling in files; empty if
        it is unknown.
        """
        if rank not in self._of_ranks:
            self._of_ranks[rank] = index_full_names(_read_names(self._root, rank))
        return self._of_ranks[rank].get(spelling, "")


def index_full_names(names: Iterable[str]) -> dict[str, str]:
    """Return full names by their spelling in files and tables, without spellings that several names
    share.

    >>> index_full_names(["Default/a.b", "fc.weight", "fc/weight"])
    {'Default_a_b': 'Default/a.b'}
    """
    found: dict[str, str] = {}
    for name in names:
        filed = sanitize_name(name)
        for spelling in {filed, clean_table_field(filed)}:
            if found.setdefault(spelling, name) != name:
                found[spelling] = ""
    return {spelling: name for spelling, name in found.items() if name}


def _read_names(root: Path, rank: int) -> Iterator[str]:
    """Yield the names of a rank's operators and parameters, and of their gradients."""
    files = list_rank_manifests(root, rank)
    if not files and not any(each.status.rank == rank for each in read_tree_sessions(root)):
        return
    # Manifests are tried from the newest one on, until one can be read.
    newest = next(read_manifests(reversed(files), []), None)
    yield from (record.op_name for record in (newest.records if newest is not None else ()))
    for path in sorted((root / make_rank_folder(rank) / GRAPH_FOLDER).glob("*.ir")):
        with suppress(OSError):
            yield from _parse_graph_names(path.read_text("utf-8", "replace").split("\n"))


def _parse_graph_names(lines: list[str]) -> Iterator[str]:
    for line in lines:
        found = _GRAPH_PARAMETER.match(line)
        if found:
            yield found[1]
            yield GRADIENTS_PREFIX + found[1]
    yield from (operator.op_name for operator in parse_ir_operators(lines))
