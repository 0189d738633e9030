"""What pages read of one tree: rows of its table, and values of readers that are kept until the
tree changes. One instance for each tree, for all threads of a server.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from rankdump import reader
from rankdump._analysis.reader.manifests import (
    list_rank_folders,
    read_first_statuses,
    read_tree_sessions,
)
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

    from rankdump._analysis.reader.dump import Dump

_T = TypeVar("_T")
_MAX_KEPT = 128
"""Values that are kept for a tree; each is at most a page's."""
PAGE_LIMITS = QueryLimits(timeout_s=20.0, memory_bytes=96 << 20, threads=2)
"""For statements of pages, not of people."""
_TreeStamp = tuple[int, ...]


class JobAttempt(NamedTuple):
    """A job, or one attempt of it."""

    job: str = ""
    """Empty for all jobs."""
    attempt: int | None = None
    """None for all attempts."""


EVERYTHING = JobAttempt()


class _TreeState:
    """What is open and known of a tree, for all its parts."""

    def __init__(self, root: Path) -> None:
        self.dump = reader.open(root)
        self.lock = threading.Lock()
        self.stamp: _TreeStamp = ()
        self.table: OpenTable | None = None
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()


class DumpSource:
    """A tree, or one job or attempt of it, as pages see it."""

    def __init__(self, root: Path) -> None:
        """CorruptedError when the folder is not a dump."""
        self.root = root
        self.part = EVERYTHING
        self._state = _TreeState(root)

    def select(self, part: JobAttempt) -> DumpSource:
        """Return the same tree with the tensors and iterations of a job or attempt alone."""
        selected = copy(self)
        selected.part = part
        return selected

    @property
    def dump(self) -> Dump:
        """The whole tree, as the reader sees it."""
        return self._state.dump

    @property
    def attempts(self) -> tuple[JobAttempt, ...]:
        """The attempts of all jobs in the tree, by job and number; none of another tool's dump."""
        return self.select(EVERYTHING).keep("attempts", self._find_attempts)

    def _find_attempts(self) -> tuple[JobAttempt, ...]:
        if self.has_table:
            columns = "CAST(job AS VARCHAR) AS job, attempt"
            rows = self.get_rows(f"SELECT DISTINCT {columns} FROM iterations ORDER BY job, attempt")
            return tuple(JobAttempt(row["job"] or "", row["attempt"]) for row in rows)
        known = [*read_first_statuses(self.root).values()]
        known += [each.status for each in read_tree_sessions(self.root)]
        return tuple(sorted({JobAttempt(each.job_id, each.attempt) for each in known}))

    def get_rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """Return the rows of a SELECT over `tensors` and `iterations`.

        Rows are kept until the tree changes. Raises what `run_query` does, and CorruptedError for a
        damaged table.
        """
        return self.keep((sql, *values), lambda: self.read_table(sql, values).to_pylist())

    def read_table(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        """Return the rows of a SELECT as a table, for many rows; raises what `get_rows` does."""
        sql, values = _restrict_statement(sql, values, self.part)
        try:
            return self._open_table().run(sql, values)
        except QueryError:
            # The agent may have replaced files of the table since they were listed.
            self.close()
            return self._open_table().run(sql, values)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what `make` returned for a key, as long as the tree has not changed since."""
        self._forget_changed()
        state, key = self._state, (self.part, key)
        with state.lock:
            stamp = state.stamp
            if key in state.kept:
                state.kept.move_to_end(key)
                return cast("_T", state.kept[key])
        made = make()
        with state.lock:
            if stamp == state.stamp:
                state.kept[key] = made
                while len(state.kept) > _MAX_KEPT:
                    state.kept.popitem(last=False)
        return made

    def keep_latest(self, name: str, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the same as `keep`, but hold no more than one value of a name: a large one."""
        held = self.select(EVERYTHING).keep(("latest", name), dict[Hashable, Any])
        key = self.part, key
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
        state = self._state
        with state.lock:
            table, state.table = state.table, None
        if table is not None:
            table.close()

    def _open_table(self) -> OpenTable:
        state = self._state
        with state.lock:
            if state.table is None:
                state.table = OpenTable(find_page_views(self.root), PAGE_LIMITS)
            return state.table

    def _forget_changed(self) -> None:
        state, stamp = self._state, read_tree_stamp(self.root)
        with state.lock:
            if stamp == state.stamp:
                return
            state.stamp = stamp
            state.kept.clear()
            state.dump = reader.open(self.root)
            table, state.table = state.table, None
        if table is not None:
            table.close()


def find_tree_number(sources: Iterable[DumpSource], root: Path) -> int | None:
    """Return the number of a tree among the sources; None for one that is not served."""
    wanted = root.resolve()
    numbers = (at for at, source in enumerate(sources) if source.root.resolve() == wanted)
    return next(numbers, None)


def find_page_views(root: Path) -> TableViews:
    """Return the views `tensors` and `iterations` of a tree."""
    views = find_views(
        root,
        get_tree=cache(lambda: reader.walk(root)),
        make_table=lambda: reader.open(root).table(),
        is_filtered=False,
    )
    made = {name: make for name, make in views.made.items() if name in (TENSORS, ITERATIONS)}
    return TableViews(views.files, made)


def _restrict_statement(
    sql: str, values: Sequence[object], part: JobAttempt
) -> tuple[str, Sequence[object]]:
    """Return a SELECT over the rows of a job or attempt alone."""
    named = {"CAST(job AS VARCHAR)": part.job or None, "attempt": part.attempt}
    chosen = {name: value for name, value in named.items() if value is not None}
    if not chosen:
        return sql, values
    condition = " AND ".join(f"{name} = ?" for name in chosen)
    views = ", ".join(
        f"{name} AS (SELECT * FROM main.{name} WHERE {condition})" for name in (TENSORS, ITERATIONS)
    )
    return f"WITH {views} {sql}", (*chosen.values(), *chosen.values(), *values)


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
