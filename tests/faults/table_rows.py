"""Table of statistics at the end of a run: a row for every record of a manifest, none twice."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankdump._analysis.table.table_files import list_table, list_tensor_files
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._analysis.table_index import index_tree
from rankdump._core.manifest import Manifest

RowPlace = tuple[int, int]
"""Rank and iteration."""
_KEY = ["rank", "iteration", "name", "side", "slot", "timestamp_us", "path", "member"]


def find_waiting(states: Iterable[Path], ranks: Mapping[str, int]) -> set[RowPlace]:
    """Return what ledgers say is not in the table; `ranks` are those of the sessions."""
    found: set[RowPlace] = set()
    for path in (path for state in states for path in state.rglob("ledger.sqlite")):
        base = sqlite3.connect(path)
        for session, iteration in base.execute("SELECT session_id, iteration FROM unindexed"):
            found.add((ranks.get(session, -1), iteration))
        base.close()
    return found


def check_table(root: Path, waiting: set[RowPlace]) -> Iterator[str]:
    """Yield what is wrong with the table of a tree, before and after `rankdump index`."""
    yield from _compare(root, waiting, "table of the agent")
    yield from index_tree(root, processes=1).problems
    yield from _compare(root, set(), "table after rankdump index")


def _compare(root: Path, waiting: set[RowPlace], what: str) -> Iterator[str]:
    problems: list[str] = []
    list_table(LocalTree(root), problems)
    yield from problems
    tables = [pq.read_table(path, columns=_KEY) for path in list_tensor_files(root)]
    rows: Counter[RowPlace] = Counter()
    for table in tables:
        rows.update(zip(table["rank"].to_pylist(), table["iteration"].to_pylist(), strict=True))
    if tables:
        whole = pa.concat_tables(tables).unify_dictionaries()
        if len(whole.group_by(_KEY).aggregate([])) != len(whole):
            yield f"{what}: rows are there twice"
    due = _count_records(root)
    for place in sorted({*rows, *due}.difference(waiting)):
        if rows[place] != due[place]:
            yield f"{what}: rank and iteration {place} have {rows[place]} rows of {due[place]}"


def _count_records(root: Path) -> Counter[RowPlace]:
    due: Counter[RowPlace] = Counter()
    for manifest in _iter_manifests(root):
        due[manifest.status.rank, manifest.status.iteration] += len(manifest.records)
    return due


def _iter_manifests(root: Path) -> Iterator[Manifest]:
    for path in root.glob("rank*/.dump_metadata/manifest/iteration_*.json"):
        yield Manifest.from_json(path.read_bytes())
