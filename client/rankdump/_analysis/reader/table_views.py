"""Views for SQL over a dump: the files of its table if it has one, else tables made from its
tensors; the published order; and problems of the tree. Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankdump._analysis.reader.coordinator_files import PublishedOrder, read_order
from rankdump._analysis.reader.manifest_columns import make_iteration_table
from rankdump._analysis.reader.tree import Tree
from rankdump._analysis.reader.tree_status import findings
from rankdump._analysis.table.table_files import list_table
from rankdump._analysis.table.table_query import ITERATIONS, TENSORS, TableViews
from rankdump._analysis.table.tree_access import LocalTree
from rankdump.errors import CorruptedError

_TEXT, _NUMBER, _NUMBERS = pa.string(), pa.int64(), pa.list_(pa.int64())
EVENT_SCHEMA = pa.schema(
    [
        ("position", _NUMBER),
        ("attempt", _NUMBER),
        ("iteration", _NUMBER),
        ("graph", _NUMBER),
        ("kind", _TEXT),
        ("name", _TEXT),
        ("ranks", _NUMBERS),
        ("group_name", _TEXT),
        ("sequence", _NUMBER),
        ("start_us", _NUMBER),
        ("end_us", _NUMBER),
        ("missing", _NUMBERS),
        ("element_count", _NUMBER),
        ("dtype", _TEXT),
        ("peer", _NUMBER),
    ]
)
FINDING_SCHEMA = pa.schema(
    [
        ("kind", _TEXT),
        ("attempt", _NUMBER),
        ("iteration", _NUMBER),
        ("ranks", _NUMBERS),
        ("name", _TEXT),
        ("text", _TEXT),
    ]
)


def find_views(
    root: Path,
    *,
    get_tree: Callable[[], Tree],
    make_table: Callable[[], pa.Table],
    is_filtered: bool,
) -> TableViews:
    """Return the views of a dump; CorruptedError for a table file that is not from rankdump.

    `get_tree` and `make_table` return the tree and a table of its tensors; they are called only for
    statements that need them.
    """
    made: dict[str, Callable[[], pa.Table]] = {
        "events": lambda: _make_events(root),
        "findings": lambda: _make_findings(root, get_tree()),
    }
    problems: list[str] = []
    files = [] if is_filtered else list_table(LocalTree(root), problems).files
    if problems:
        raise CorruptedError(problems[0])
    if not files:
        made[TENSORS] = make_table
        made[ITERATIONS] = lambda: make_iteration_table(get_tree().manifests)
        return TableViews({}, made)
    pairs = [[root / path for path in file.paths] for file in files]
    return TableViews(dict(zip((TENSORS, ITERATIONS), zip(*pairs, strict=True), strict=True)), made)


def _read_order(root: Path) -> PublishedOrder | None:
    try:
        return read_order(root)
    except CorruptedError:
        return None


def _make_events(root: Path) -> pa.Table:
    """Return the merged execution order as a table; no rows for a tree without one."""
    order = _read_order(root)
    fields = [name if name != "group_name" else "group" for name in EVENT_SCHEMA.names]
    columns: dict[str, list[Any]] = {name: [] for name in EVENT_SCHEMA.names}
    for entry in order.entries() if order is not None else ():
        for name, column in zip(fields, columns.values(), strict=True):
            value = getattr(entry, name)
            column.append(value.name if name == "kind" else value)
    return pa.Table.from_pydict(columns, EVENT_SCHEMA)


def _make_findings(root: Path, tree: Tree) -> pa.Table:
    """Return the findings of the merge, and the missing or damaged parts of the tree,
    as a table.
    """
    order = _read_order(root)
    rows: list[dict[str, Any]] = [
        {name: getattr(each, name) for name in FINDING_SCHEMA.names} | {"kind": each.kind.value}
        for each in (order.findings if order is not None else ())
    ]
    rows += [{"kind": "tree", "text": sentence} for sentence in findings(tree)]
    return pa.Table.from_pylist(rows, FINDING_SCHEMA)
