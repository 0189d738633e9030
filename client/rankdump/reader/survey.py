"""Figures of every tensor in the order of the program: from `statistic.csv` where there is a row,
else computed from the file. Holds one iteration's names and one tensor at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.contract.key import TensorKey, sanitised
from rankdump.contract.layout import statistic_csv
from rankdump.reader.columns import PlaceInTime
from rankdump.reader.entry import Entry, Table, Tree
from rankdump.reader.figures import Figures
from rankdump.reader.load import Facts, facts, facts_of, load
from rankdump.reader.query import Query
from rankdump.reader.statistics import statistics
from rankdump.reader.tables import Recorded, rows


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One tensor in figures; None for a figure that its source does not have."""

    key: TensorKey
    op_type: str
    op_name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    """Of the tensor, or of the table where no file is, relative to the root."""
    computed: bool
    """From the file; without this from `statistic.csv`."""
    finite: bool | None = None
    """Whether every element is; None when nobody can tell."""
    maximum: float | None = None
    minimum: float | None = None
    mean: float | None = None
    l2norm: float | None = None
    nans: int | None = None
    infinities: int | None = None
    damage: str = ""
    """Why there are no figures."""


_Where = tuple[int, str, int, str, int, str, str]
_COUNTS = ("nan count", "negative inf count", "positive inf count")


class Survey:
    """An iterable over the figures of a tree; what could not be read stands in `problems`."""

    def __init__(self, tree: Tree, query: Query, *, decide: bool = False) -> None:
        """With `decide`, a tensor whose row cannot tell whether it is finite is computed."""
        self.problems: list[str] = []
        self._query, self._decide = query, decide
        self._known = Recorded(tree.root, tree.job_id)
        self._entries = tree.entries.where(query.keeps).by_place()
        self._tables: defaultdict[PlaceInTime, list[Table]] = defaultdict(list)
        self._infos: list[Table] = []
        for table in tree.tables:
            if query.keeps_place(table.rank, table.graph, table.when, dated=table.dated):
                place = PlaceInTime(table.rank, not table.constant, table.iteration)
                (self._infos if table.info else self._tables[place]).append(table)

    def __iter__(self) -> Iterator[Surveyed]:
        # One file has the rows of every iteration: of these dumps all are held.
        spread: defaultdict[PlaceInTime, list[Figures]] = defaultdict(list)
        for table in self._infos:
            for row in self._rows(table):
                spread[PlaceInTime(row.key.rank, True, row.key.iteration)].append(row)
        for place in sorted({*self._entries, *self._tables, *spread}):
            filed = _by_where(self._entries.get(place, ()))
            tables = self._tables.get(place, ())
            there = chain(spread.get(place, ()), *map(self._rows, tables))
            tabled = {_where(row.key): row for row in there}
            for where in sorted({*filed, *tabled}):
                row = tabled.get(where)
                undecided = row is not None and self._decide and row.finite is None
                if row is None or (undecided and where in filed):
                    yield _computed(filed[where])
                else:
                    yield _tabled(row, filed.get(where))

    def _rows(self, table: Table) -> Iterator[Figures]:
        try:
            yield from filter(self._query.keeps, rows(table, self._known))
        except DamagedError as error:
            self.problems.append(str(error))


def _by_where(entries: Iterable[Entry]) -> dict[_Where, Entry]:
    """Return the files of a place; parts of one task have one name, and may have one time."""
    found: dict[_Where, Entry] = {}
    for entry in entries:
        where = _where(entry.key)
        found[(*where[:-1], entry.relative) if where in found else where] = entry
    return found


def _where(key: TensorKey) -> _Where:
    # Two processes of MindSpore may write to one rank at the same microsecond. Files and tables
    # spell a name differently, in some releases.
    name = statistic_csv.field(sanitised(key.op_name))
    return key.timestamp_us, key.net_name, key.graph, key.side.value, key.slot, name, ""


def _tabled(row: Figures, entry: Entry | None) -> Surveyed:
    nans, low, high = (_count(row, item) for item in _COUNTS)
    return Surveyed(
        key=row.key,
        op_type=row.op_type,
        op_name=row.op_name,
        dtype=row.dtype,
        shape=row.shape,
        path=entry.relative if entry else row.relative,
        computed=False,
        finite=row.finite,
        maximum=row.number("max"),
        minimum=row.number("min"),
        mean=row.number("avg"),
        l2norm=row.number("l2norm"),
        nans=nans,
        infinities=None if low is None or high is None else low + high,
    )


def _count(row: Figures, item: str) -> int | None:
    number = row.number(item)
    return int(number) if number is not None and math.isfinite(number) else None


def _computed(entry: Entry) -> Surveyed:
    try:
        tensor = load(entry)
    except DamagedError as error:
        return _described(entry, Facts("", (), 0), damage=str(error))
    except UnsupportedError:  # there are no figures of strings
        return _described(entry, facts(entry))
    figures = statistics(tensor)
    return replace(
        _described(entry, facts_of(entry, tensor)),
        finite=figures.nans + figures.infinities == 0,
        maximum=figures.maximum,
        minimum=figures.minimum,
        mean=figures.mean,
        l2norm=figures.l2norm,
        nans=figures.nans,
        infinities=figures.infinities,
    )


def _described(entry: Entry, known: Facts, *, damage: str = "") -> Surveyed:
    return Surveyed(
        key=entry.key,
        op_type=entry.op_type,
        op_name=entry.op_name,
        dtype=known.dtype,
        shape=known.shape,
        path=entry.relative,
        computed=True,
        damage=damage,
    )
