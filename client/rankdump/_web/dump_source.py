"""What pages read of one tree: rows of its table, and values of readers that are kept until the
tree changes. One instance for each tree, for all threads of a server.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rankdump import reader
from rankdump._analysis.reader.manifests import list_rank_folders
from rankdump._analysis.reader.table_views import find_views
from rankdump._analysis.table.table_files import TABLE_FOLDER, list_tensor_files
from rankdump._analysis.table.table_query import (
    ITERATIONS,
    TENSORS,
    OpenTable,
    QueryLimits,
    TableViews,
)
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._core.freeze_record import BLACK_BOX_FOLDER
from rankdump._layout.tree_paths import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.errors import CorruptedError, QueryError

if TYPE_CHECKING:
    import pyarrow as pa

_T = TypeVar("_T")
_MAX_KEPT = 128
"""Values that are kept for a tree; each is at most a page's."""
PAGE_LIMITS = QueryLimits(timeout_s=20.0, memory_bytes=96 << 20, threads=2)
"""For statements of pages, not of people."""
_TreeStamp = tuple[int, ...]


class DumpSource:
    """A tree, as pages see it."""

    def __init__(self, root: Path) -> None:
        """CorruptedError when the folder is not a dump."""
        self.root = root
        self.dump = reader.open(root)
        self._lock = threading.Lock()
        self._stamp: _TreeStamp = ()
        self._table: OpenTable | None = None
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get_rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """Return the rows of a SELECT over `tensors` and `iterations`.

        Rows are kept until the tree changes. Raises what `run_query` does, and CorruptedError for a
        damaged table.
        """
        return self.keep((sql, *values), lambda: self.read_table(sql, values).to_pylist())

    def read_table(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        """Return the rows of a SELECT as a table, for many rows; raises what `get_rows` does."""
        try:
            return self._open_table().run(sql, values)
        except QueryError:
            # The agent may have replaced files of the table since they were listed.
            self.close()
            return self._open_table().run(sql, values)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what `make` returned for a key, as long as the tree has not changed since."""
        self._forget_changed()
        with self._lock:
            stamp = self._stamp
            if key in self._kept:
                self._kept.move_to_end(key)
                return cast("_T", self._kept[key])
        made = make()
        with self._lock:
            if stamp == self._stamp:
                self._kept[key] = made
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return made

    def keep_latest(self, name: str, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the same as `keep`, but hold no more than one value of a name: a large one."""
        held = self.keep(("latest", name), _make_holder)
        if key in held:
            return held[key]
        made = make()
        held.clear()
        held[key] = made
        return made

    @property
    def has_table(self) -> bool:
        """Whether the tree has a table, which answers in place of its files."""
        return self.keep("has table", lambda: bool(list_tensor_files(self.root)))

    def close(self) -> None:
        """Close the table."""
        with self._lock:
            table, self._table = self._table, None
        if table is not None:
            table.close()

    def _open_table(self) -> OpenTable:
        with self._lock:
            if self._table is None:
                self._table = OpenTable(self._find_views(), PAGE_LIMITS)
            return self._table

    def _find_views(self) -> TableViews:
        views = find_views(
            self.root,
            get_tree=cache(lambda: reader.walk(self.root)),
            make_table=lambda: reader.open(self.root).table(),
            is_filtered=False,
        )
        made = {name: make for name, make in views.made.items() if name in (TENSORS, ITERATIONS)}
        return TableViews(views.files, made)

    def _forget_changed(self) -> None:
        stamp = read_tree_stamp(self.root)
        with self._lock:
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._kept.clear()
            self.dump = reader.open(self.root)
            table, self._table = self._table, None
        if table is not None:
            table.close()


def _make_holder() -> dict[Hashable, Any]:
    return {}


def read_tree_stamp(root: Path) -> _TreeStamp:
    """Return numbers that change when a tree has another iteration, order, freeze or table.

    CorruptedError when the tree is gone.
    """
    if not root.is_dir():
        raise CorruptedError(f"{root}: the folder is not there any more")
    ranks = (f"{name}/{MANIFEST_FOLDER}" for name in list_rank_folders(root))
    named = (TABLE_FOLDER, GLOBAL_ORDER_FOLDER, METADATA_FOLDER, BLACK_BOX_FOLDER)
    return tuple(_read_time_ns(root / name) for name in (".", *named, *ranks))


def _read_time_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
