"""Statistics of one array, defined as in `statistic.csv`, and statistics of all tensors of a tree
in execution order, taken from the row of a table or computed from the file. Only the names of one
iteration and one tensor are in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.baseline_files import is_baseline_missing
from rankdump._analysis.reader.file_errors import noted_errors
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.statistic_tables import is_layer_mark
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_rows import TableRows, group_by_place
from rankdump._analysis.reader.tensor_loader import Facts, facts, facts_of, load
from rankdump._analysis.reader.tree import (
    NONFINITE_COUNT_ITEMS,
    Entry,
    Figures,
    PlaceInTime,
    Table,
    Tree,
)
from rankdump._core.record import TensorKey, sanitize_name
from rankdump._kernels.array_kernels import measure_array
from rankdump._kernels.element_moments import ElementMoments
from rankdump._layout import statistic_tables
from rankdump._layout.foreign_calls import L1NORM_ITEM
from rankdump.errors import CorruptedError, UnsupportedError

if TYPE_CHECKING:
    from rankdump._analysis.reader.statistic_columns import StatisticTableText

_MIN_PLACES = 8
"""Number of rank iterations from which on columns save more time than loading pyarrow takes."""
_PLACES_AT_A_TIME = 64
_MAX_TEXT_BYTES = 32 << 20
"""Bytes of table text after which columns are made from it."""
_BLOCK_ELEMENTS = 1 << 20
"""Number of complex elements whose moduli are computed together."""

_TensorPosition = tuple[int, str, int, str, int, str, str]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics over all elements, including NaN and infinities, in float64.

    A complex element counts with its modulus; `statistic.csv` has no statistics of complex tensors.
    """

    count: int
    minimum: float | None
    """Smallest element; None for an empty array, like `maximum` and `mean`."""
    maximum: float | None
    mean: float | None
    l2norm: float
    nans: int
    infinities: int
    zeros: int


def statistics(tensor: npt.NDArray[Any]) -> Statistics:
    """Return the statistics of an array; the memory needed does not depend on its size."""
    flat = tensor.reshape(-1)
    found = _modulus_moments(flat) if flat.dtype.kind == "c" else measure_array(flat)
    return Statistics(
        count=found.size,
        minimum=found.minimum if found.size else None,
        maximum=found.maximum if found.size else None,
        mean=found.mean if found.size else None,
        l2norm=found.l2norm,
        nans=found.nans,
        infinities=found.positive_infinities + found.negative_infinities,
        zeros=found.zeros,
    )


def _modulus_moments(flat: npt.NDArray[Any]) -> ElementMoments:
    found = ElementMoments()
    for at in range(0, flat.size, _BLOCK_ELEMENTS):
        with np.errstate(all="ignore"):
            block = np.abs(flat[at : at + _BLOCK_ELEMENTS])
        found = found.merge_with(measure_array(block))
    return found


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Statistics of one tensor; a statistic that its source does not have is None."""

    key: TensorKey
    op_type: str
    op_name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    """Path, relative to the root, of the tensor's file; if there is none, of the table."""
    computed: bool
    """Whether the statistics were computed from the file; if not, they are from `statistic.csv`."""
    finite: bool | None = None
    """Whether every element is finite; None if this is unknown."""
    maximum: float | None = None
    minimum: float | None = None
    mean: float | None = None
    l2norm: float | None = None
    l1norm: float | None = None
    """L1 norm, which only logs of torch's DebugMode have."""
    nans: int | None = None
    infinities: int | None = None
    damage: str = ""
    """Reason why there are no statistics; empty if there are."""
    argument: str = ""
    """Place of the tensor in its call; empty if it is unknown."""
    is_sample: bool = False
    """Whether the statistics are of the first elements, because the tree has no others."""


class Survey:
    """Iterable over the statistics of a tree; `problems` lists what could not be read."""

    def __init__(
        self, tree: Tree, query: Query, *, decide: bool = False, skip_finite: bool = False
    ) -> None:
        """With `decide`, a tensor whose row does not show whether it is finite is read from its
        file.

        With `skip_finite`, iterations of a rank may be left out if the columns of their tables show
        that all of their tensors are finite.
        """
        self.problems: list[str] = []
        self.skipped_rows = 0
        """Number of rows of `statistic.csv` tables that were left out so far."""
        self._query, self._decide = query, decide
        is_whole = query == query.places and not tree.job_id and tree.attempt is None
        self._skip_finite = skip_finite and is_whole
        self._known = TableRecords(tree, [query.places])
        self._entries = tree.entries.where(query.keeps).by_place()
        self._dated: defaultdict[PlaceInTime, list[Table]] = defaultdict(list)
        self._others: list[Table] = []
        """Tables whose folder does not tell the iteration."""
        for table in tree.tables:
            if query.keeps_place(table.rank, table.graph, table.when, dated=table.dated):
                place = PlaceInTime(table.rank, not table.constant, table.iteration)
                (self._dated[place] if table.dated else self._others).append(table)

    def __iter__(self) -> Iterator[Surveyed]:
        groups = groupby(self._iterate_places(), lambda each: each[0])
        places = ((at, [reader for _, own in same for reader in own]) for at, same in groups)
        while batch := list(islice(places, _PLACES_AT_A_TIME)):
            is_worthwhile = self._skip_finite and len(batch) >= _MIN_PLACES
            finite = self._count_finite_rows(batch) if is_worthwhile else {}
            for place, readers in batch:
                if place in finite:
                    self.skipped_rows += finite[place]
                else:
                    yield from self._survey_place(place, readers)

    def _iterate_places(self) -> Iterator[tuple[PlaceInTime, list[TableRows]]]:
        """Yield places in order, with their tables; one place may come twice in succession."""
        dated = sorted({*self._entries, *self._dated})
        known = ((each, self._open(self._dated.get(each, ()))) for each in dated)
        return merge(known, self._iterate_other_places(), key=lambda each: each[0])

    def _iterate_other_places(self) -> Iterator[tuple[PlaceInTime, list[TableRows]]]:
        """Yield places of tables whose folder does not tell the iteration; only the tables of one
        rank are open at a time.
        """
        for rank in sorted({table.rank for table in self._others}):
            readers = self._open(table for table in self._others if table.rank == rank)
            by_place = group_by_place(readers)
            yield from ((place, by_place[place]) for place in sorted(by_place))
            for reader in readers:
                with noted_errors(self.problems):
                    reader.raise_damage()

    def _open(self, tables: Iterable[Table]) -> list[TableRows]:
        found: list[TableRows] = []
        for table in tables:
            with noted_errors(self.problems):
                found.append(TableRows(table, self._known))
        return found

    def _survey_place(self, place: PlaceInTime, readers: Sequence[TableRows]) -> Iterator[Surveyed]:
        filed = _index_by_position(self._entries.get(place, ()))
        tabled: dict[_TensorPosition, Figures] = {}
        for reader in readers:
            with noted_errors(self.problems):
                rows = filter(self._query.keeps, reader.read_rows(place))
                tabled.update(
                    (_position_of(row.key), row)
                    for row in rows
                    if not is_layer_mark(row.key.op_name)
                )
        for where in sorted({*filed, *tabled}):
            row = tabled.get(where)
            undecided = row is not None and self._decide and row.finite is None
            if row is None or (undecided and where in filed):
                yield _survey_entry(filed[where])
            else:
                yield _survey_row(row, filed.get(where))

    def _count_finite_rows(
        self, places: Iterable[tuple[PlaceInTime, Sequence[TableRows]]]
    ) -> dict[PlaceInTime, int]:
        """Return the number of rows of those places that have only tables and only
        finite tensors.
        """
        counted: list[tuple[PlaceInTime, int]] = []
        texts: list[tuple[PlaceInTime, TableRows]] = []
        for place, readers in places:
            if place.dated and place not in self._entries:
                for each in readers:
                    if each.table.info:
                        counted.append((place, each.count_finite_rows(place)))
                    else:
                        texts.append((place, each))
        counted += zip((place for place, _ in texts), self._count_finite_texts(texts), strict=True)
        finite = Counter[PlaceInTime]()
        for place, count in counted:
            finite[place] += count
        unknown = {place for place, count in counted if not count}
        return {place: count for place, count in finite.items() if place not in unknown}

    def _count_finite_texts(self, tables: Sequence[tuple[PlaceInTime, TableRows]]) -> list[int]:
        """Return the number of rows of each table at its place; 0 if a tensor may not be finite."""
        counts = [0] * len(tables)
        if not tables:
            return counts
        try:
            # Imported on use, because it loads pyarrow, which may not be installed.
            from rankdump._analysis.reader.statistic_columns import count_finite_rows, split_text
        except ImportError:  # also of a pyarrow that does not fit NumPy
            return counts
        texts: list[StatisticTableText] = []
        size = 0
        for number, (place, reader) in enumerate(tables):
            with suppress(CorruptedError):
                if not (reader.table.operator or reader.table.form):
                    texts.append(split_text(reader.read_text(place), reader.table.path, number))
                    size += len(texts[-1].rows)
            if size > _MAX_TEXT_BYTES or number == len(tables) - 1:
                for at, count in count_finite_rows(texts).items():
                    counts[at] = count
                texts, size = [], 0
        return counts


def _index_by_position(entries: Iterable[Entry]) -> dict[_TensorPosition, Entry]:
    """Return the files of a place, without layer marks; parts of one task have the same name, and
    may have the same time stamp.
    """
    found: dict[_TensorPosition, Entry] = {}
    for entry in entries:
        if is_layer_mark(entry.key.op_name):
            continue
        where = _position_of(entry.key)
        found[(*where[:-1], entry.relative) if where in found else where] = entry
    return found


def _position_of(key: TensorKey) -> _TensorPosition:
    # Two processes of MindSpore may write to one rank in the same microsecond. In some releases,
    # files and tables spell a name differently.
    name = statistic_tables.clean_table_field(sanitize_name(key.op_name))
    return key.timestamp_us, key.net_name, key.graph, key.side.value, key.slot, name, ""


def _survey_row(row: Figures, entry: Entry | None) -> Surveyed:
    nans, low, high = (_count(row, item) for item in NONFINITE_COUNT_ITEMS)
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
        l1norm=row.number(L1NORM_ITEM),
        nans=nans,
        infinities=None if low is None or high is None else low + high,
        argument=row.record.argument if row.record else "",
    )


def _count(row: Figures, item: str) -> int | None:
    number = row.number(item)
    return int(number) if number is not None and math.isfinite(number) else None


def _survey_entry(entry: Entry) -> Surveyed:
    if is_baseline_missing(entry):  # a missing baseline is no damage
        return _empty_survey(entry, facts(entry))
    try:
        tensor = load(entry)
    except CorruptedError as error:
        return _empty_survey(entry, Facts("", (), 0), damage=str(error))
    except UnsupportedError:  # strings have no statistics
        return _empty_survey(entry, facts(entry))
    computed = statistics(tensor)
    empty = _empty_survey(entry, facts_of(entry, tensor))
    is_finite = computed.nans + computed.infinities == 0
    return replace(
        empty,
        # The elements that were not kept may be NaN.
        finite=None if is_finite and empty.is_sample else is_finite,
        maximum=computed.maximum,
        minimum=computed.minimum,
        mean=computed.mean,
        l2norm=computed.l2norm,
        nans=computed.nans,
        infinities=computed.infinities,
    )


def _empty_survey(entry: Entry, known: Facts, *, damage: str = "") -> Surveyed:
    return Surveyed(
        key=entry.key,
        op_type=entry.op_type,
        op_name=entry.op_name,
        dtype=known.dtype,
        shape=known.shape,
        path=entry.relative,
        computed=True,
        damage=damage,
        argument=entry.record.argument if entry.record else "",
        is_sample=bool(entry.record and entry.record.layout and entry.record.layout.is_sample),
    )
