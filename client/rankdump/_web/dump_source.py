"""Data of one tree for the pages: rows of its table, and results of readers, which are kept until
the tree changes. There is one instance for each tree, which all threads of a server share.

Trees may be added to the list of a server while it runs. Their order never changes, because pages
name a tree by its number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

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
from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._core.freeze_record import BLACK_BOX_FOLDER
from rankdump._core.scope_names import format_scope_name
from rankdump._layout.tree_paths import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.errors import CorruptedError, QueryError, RankdumpError

if TYPE_CHECKING:
    import pyarrow as pa

    from rankdump._analysis.reader.dump import Dump

_T = TypeVar("_T")
_MAX_KEPT = 128
"""Largest number of results that are kept for a tree; each is at most the content of a page."""
PAGE_LIMITS = QueryLimits(timeout_s=20.0, memory_bytes=96 << 20, threads=2)
"""Limits for the statements of pages; statements of people have others."""
_TreeStamp = tuple[int, ...]


class JobAttempt(NamedTuple):
    """A job, or one attempt of a job."""

    job: str = ""
    """Id of the job; empty for all jobs."""
    attempt: int | None = None
    """Number of the attempt; None for all attempts."""


EVERYTHING = JobAttempt()


class _TreeState:
    """Open files and kept results of a tree, which its jobs and attempts share."""

    def __init__(self, root: Path) -> None:
        self.dump = reader.open(root)
        self.lock = threading.Lock()
        self.stamp: _TreeStamp = ()
        self.table: OpenTable | None = None
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()


class DumpSource:
    """A tree, or one job or attempt in it, as the pages access it."""

    def __init__(self, root: Path) -> None:
        """CorruptedError when the folder is not a dump."""
        self.root = root
        self.part = EVERYTHING
        self._state = _TreeState(root)

    def select(self, part: JobAttempt) -> DumpSource:
        """Return the same tree, restricted to the tensors and iterations of a job or attempt."""
        selected = copy(self)
        selected.part = part
        return selected

    @property
    def dump(self) -> Dump:
        """The whole tree as a `Dump`."""
        return self._state.dump

    @property
    def attempts(self) -> tuple[JobAttempt, ...]:
        """The attempts of all jobs in the tree, sorted by job and number; none for another tool's
        dump.
        """
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

        The result is kept until the tree changes. Raises the same errors as `run_query`, and
        CorruptedError for a damaged table.
        """
        return self.keep((sql, *values), lambda: self.read_table(sql, values).to_pylist())

    def read_table(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        """Return the rows of a SELECT as a table, for many rows; raises the same errors as
        `get_rows`.
        """
        sql, values = _restrict_statement(sql, values, self.part)
        try:
            return self._open_table().run(sql, values)
        except QueryError:
            # The agent may have replaced files of the table since they were listed, so the table is
            # opened again.
            self.close()
            return self._open_table().run(sql, values)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the result of `make` for a key; it is kept until the tree changes."""
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
        """Return the same as `keep`, but keep only the latest result with this name, because it is
        large.
        """
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
        """Whether the tree has a table, which is read in place of its files."""
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
    """Return the number of a tree among the sources; None for a tree that is not served."""
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
    """Return a SELECT that is restricted to the rows of a job or attempt, with its values."""
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
    """Return numbers that change whenever the tree gets another iteration, order, freeze or table.

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


_ROW_COLUMNS = (
    "CAST(job AS VARCHAR) AS job, rank, attempt, iteration, position, "
    "CAST(name AS VARCHAR) AS name, "
    "CAST(op_type AS VARCHAR) AS op_type, CAST(side AS VARCHAR) AS side, slot, "
    "CAST(argument AS VARCHAR) AS argument, CAST(dtype AS VARCHAR) AS dtype, shape, "
    "CAST(layout AS VARCHAR) AS layout, bytes, digest, l2norm, max, min, avg, nan_count, path, "
    f"CAST(member AS VARCHAR) AS member, ({NONFINITE}) AS nonfinite"
)
_TEXTS = (
    *("job", "name", "op_type", "side", "argument", "dtype", "layout", "digest", "path", "member"),
)
_NUMBERS = ("rank", "attempt", "position", "slot", "bytes")
_STATISTICS = ("l2norm", "max", "min", "avg")
EXECUTION_ORDER = "iteration NULLS LAST, rank, attempt, position"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a rank in one iteration."""

    job: str
    rank: int
    attempt: int
    iteration: int | None
    """Iteration; None for a constant of a graph."""
    position: int
    name: str
    short_name: str
    op_type: str
    side: str
    slot: int
    argument: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    bytes: int
    digest: str
    l2norm: float | None
    max: float | None
    min: float | None
    avg: float | None
    nonfinite: bool
    path: str
    """Path below the root of the tree; empty if only statistics were kept."""
    member: str


def match_rows(
    *, search: str = "", rank: int | None = None, iteration: int | None = None
) -> tuple[list[str], list[object]]:
    """Return conditions for a SELECT over `tensors`, which are joined by AND, and their values.

    `search` is a part of the operator's name, in upper or lower case.
    """
    conditions, values = ["true"], list[object]()
    if search:
        conditions.append("contains(lower(CAST(name AS VARCHAR)), lower(?))")
        values.append(search)
    for name, value in (("rank", rank), ("iteration", iteration)):
        if value is not None:
            conditions.append(f"{name} = ?")
            values.append(value)
    return conditions, values


def read_rows(source: DumpSource, rest: str, values: Sequence[object]) -> tuple[TensorRow, ...]:
    """Return the rows of a SELECT over `tensors`; `rest` is the text after WHERE."""
    found = source.get_rows(f"SELECT {_ROW_COLUMNS} FROM tensors WHERE {rest}", values)
    return tuple(map(make_row, found))


def make_row(found: Mapping[str, Any]) -> TensorRow:
    """Return a row that was selected by `read_rows`."""
    known: dict[str, Any] = {name: found[name] or "" for name in _TEXTS}
    known |= {name: found[name] or 0 for name in _NUMBERS}
    known |= {name: None if found[name] is None else float(found[name]) for name in _STATISTICS}
    return TensorRow(
        iteration=found["iteration"],
        short_name=format_scope_name(found["name"] or ""),
        shape=tuple(found["shape"] or ()),
        nonfinite=bool(found["nonfinite"]),
        **known,
    )


MAX_OPEN = 8
"""Largest number of trees whose tables are open, because each takes memory."""


class SourceList(Sequence[DumpSource]):
    """The trees that could be opened so far; safe to use from several threads."""

    def __init__(self) -> None:
        self._sources: list[DumpSource] = []
        self._waiting: list[Path] = []
        self._known: set[Path] = set()
        self._latest: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, roots: Iterable[Path]) -> None:
        """Add the trees that are not known; a tree that no job has begun yet is added
        when one has.
        """
        with self._lock:
            new = [root for root in dict.fromkeys(roots) if root not in self._known]
            self._known.update(new)
            self._waiting += new

    def list_waiting(self) -> tuple[Path, ...]:
        """Return the trees that no job has begun yet."""
        with self._lock:
            self._open_waiting()
            return tuple(self._waiting)

    def close(self) -> None:
        """Close the tables of all trees."""
        for source in tuple(self):
            source.close()

    def __len__(self) -> int:
        with self._lock:
            self._open_waiting()
            return len(self._sources)

    def __iter__(self) -> Iterator[DumpSource]:
        with self._lock:
            return iter(tuple(self._sources))

    @overload
    def __getitem__(self, index: int) -> DumpSource: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DumpSource]: ...
    def __getitem__(self, index: int | slice) -> DumpSource | Sequence[DumpSource]:
        with self._lock:
            found = self._sources[index]
            if isinstance(index, slice):
                return found
            self._latest[index] = None
            self._latest.move_to_end(index)
            over = len(self._latest) - MAX_OPEN
            late = [self._latest.popitem(last=False)[0] for _ in range(over)]
            closed = [self._sources[number] for number in late]
        for source in closed:
            source.close()
        return found

    def _open_waiting(self) -> None:
        still: list[Path] = []
        for root in self._waiting:
            try:
                self._sources.append(DumpSource(root))
            except (RankdumpError, OSError):
                still.append(root)
        self._waiting = still
