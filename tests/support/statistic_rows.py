"""Rows of the table of statistics of a tree, and those that a walk of the tree gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankdump._analysis.reader.tensor_columns import make_columns_of_tree
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.table_files import list_tensor_files

_COLUMNS = ("rank", "iteration", "name", "side", "slot", "path", "max")
RowCounts = Counter[tuple[str, ...]]


def count_table_rows(root: Path) -> RowCounts:
    """Return how often each row is in the table."""
    return _count(pq.read_table(path, columns=[*_COLUMNS]) for path in list_tensor_files(root))


def count_walked_rows(root: Path) -> RowCounts:
    """Return the rows that the table should have."""
    return _count([make_columns_of_tree(walk(root), []).select([*_COLUMNS])])


def _count(tables: Iterable[pa.Table]) -> RowCounts:
    return Counter(tuple(map(repr, row.values())) for each in tables for row in each.to_pylist())
