"""Rows of the tables of a tree in execution order, alone or together with its files. Only the rows
of one rank's iteration are in memory as objects at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.foreign_dumps import read_foreign_rows
from rankdump._analysis.reader.growing_tables import GrowingTable, NameFilter
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.statistic_tables import make_statistics_row, read_table
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.tree import (
    Entry,
    Figures,
    PlaceInTime,
    Table,
    Tree,
    execution_order_of,
)
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._codec.file_codec import select_codec
from rankdump._core.record import TensorKey
from rankdump._layout.statistic_tables import parse_operator_table, parse_statistic_table
from rankdump.errors import CorruptedError


class TableRows:
    """Rows of one table, by the requested iterations."""

    def __init__(self, table: Table, known: TableRecords) -> None:
        """CorruptedError when a table of several iterations cannot be read."""
        self.table, self._known = table, known
        is_growing = table.info or not (table.dated or table.operator)
        self._source = GrowingTable(table, known) if is_growing else _DatedTable(table, known)
        dated = not table.constant
        self.places = [PlaceInTime(table.rank, dated, each) for each in self._source.iterations]

    def raise_damage(self) -> None:
        """Raise a CorruptedError for damage after the rows of a table with several iterations."""
        if self._source.damage:
            raise CorruptedError(self._source.damage)

    def count_finite_rows(self, place: PlaceInTime) -> int:
        """Return the number of rows of an info file at a place; 0 if a tensor may not be finite."""
        return self._source.count_finite_rows(place.iteration)

    def read_text(self, place: PlaceInTime) -> bytes:
        """Return the text of a `statistic.csv` with only the rows of a place; CorruptedError when
        it cannot be read.
        """
        return self._source.read_text(place.iteration)

    def read_rows(
        self, place: PlaceInTime, keeps_name: NameFilter | None = None
    ) -> Iterator[Figures]:
        """Yield the rows of one of the table's places; CorruptedError names an invalid line."""
        return filter(self._is_selected, self._source.read_rows(place.iteration, keeps_name))

    def read_all_rows(self) -> Iterator[Figures]:
        """Yield the rows of all places in the order of the table, then raise an error if it is
        damaged.
        """
        yield from filter(self._is_selected, self._source.read_all_rows())
        self.raise_damage()

    def _is_selected(self, row: Figures) -> bool:
        return self._known.is_selected(row, self.table)


class _DatedTable:
    """One table with rows of one iteration; it has the methods of `GrowingTable`."""

    damage = ""

    def __init__(self, table: Table, known: TableRecords) -> None:
        self._table, self._known = table, known
        at = known.find_iteration(table)
        self.iterations = [at] if table.dated or known.is_asked(table, at) else []

    def read_rows(self, iteration: int, keeps_name: NameFilter | None) -> Iterator[Figures]:
        is_foreign = bool(self._table.form)
        rows = read_foreign_rows(self._table) if is_foreign else self._read_own_rows(iteration)
        if keeps_name is None:
            return rows
        return (row for row in rows if keeps_name(row.key.op_name))

    def read_all_rows(self) -> Iterator[Figures]:
        for iteration in self.iterations:
            yield from self.read_rows(iteration, None)

    def count_finite_rows(self, iteration: int) -> int:
        return 0

    def read_text(self, iteration: int) -> bytes:
        table = self._table
        text = read_table(LocalTree(table.root), table.folder, table.path.name)
        return text.replace(b"\r\n", b"\n")

    def _read_own_rows(self, iteration: int) -> Iterator[Figures]:
        operator, file = self._table.operator, str(self._table.path)
        text = self.read_text(iteration).decode("utf-8", "surrogateescape")
        whole, _, torn = text.rpartition("\n")
        for row in (
            parse_statistic_table(whole, file=file)
            if operator is None
            else parse_operator_table(whole, operator, file=file)
        ):
            found = self._known.find_of_row(self._table, row)
            yield make_statistics_row(row, self._table, iteration, *found)
        if torn:
            raise CorruptedError(f"{file}: its last line is incomplete: {torn[:60]!r}")


def read_table_rows(table: Table, known: TableRecords) -> Iterator[Figures]:
    """Yield the rows of one table in order; CorruptedError names an invalid line.

    An incomplete last line is also an error, which is raised after all other rows.
    """
    yield from TableRows(table, known).read_all_rows()


def iterate_named(
    tree: Tree,
    keeps: Callable[[Entry | Figures], bool],
    *,
    queries: Sequence[Query] = (),
    keeps_name: NameFilter | None = None,
) -> Iterator[Entry | Figures]:
    """Yield tensors in execution order: files, and rows of tables in folders without files.

    `queries` contains the ranks and iterations that `keeps` selects. A row is left out if
    `keeps_name` rejects the name of its operator, as tables spell it. CorruptedError names an
    invalid line of a table.
    """
    entries = tree.entries.where(keeps).by_place()
    filed = tree.entries.folders
    tables = [table for table in tree.tables if table.folder not in filed]
    known = TableRecords(tree, queries)
    for rank in sorted({place.rank for place in entries} | {table.rank for table in tables}):
        readers = [TableRows(table, known) for table in tables if table.rank == rank]
        by_place = group_by_place(readers)
        for place in sorted({place for place in entries if place.rank == rank}.union(by_place)):
            found = entries.get(place, ())
            if place not in by_place:
                yield from found
                continue
            # An info file has a line for every tensor, including those that have a file.
            has_file = {_call_of_key(entry.key) for entry in found if entry.key.argument}
            read = (reader.read_rows(place, keeps_name) for reader in by_place[place])
            rows = filter(keeps, chain.from_iterable(read))
            own = (row for row in rows if _call_of_key(row.key) not in has_file)
            yield from sorted((*found, *own), key=lambda each: execution_order_of(each.key))
        for reader in readers:
            reader.raise_damage()


def group_by_place(readers: Iterable[TableRows]) -> dict[PlaceInTime, list[TableRows]]:
    """Return for each place the tables that have rows of it."""
    found: defaultdict[PlaceInTime, list[TableRows]] = defaultdict(list)
    for reader in readers:
        for place in reader.places:
            found[place].append(reader)
    return dict(found)


def named(tree: Tree, keeps: Callable[[Entry | Figures], bool]) -> Sequence[Entry | Figures]:
    """Return tensors in execution order: files, and rows of tables in folders without files."""
    filed = tree.entries.folders
    if all(table.folder in filed for table in tree.tables):
        return tree.entries.where(keeps)
    return tuple(iterate_named(tree, keeps))


def find_places_by_name(
    tree: Tree, queries: Sequence[Query]
) -> set[tuple[int, int, int | None]] | None:
    """Return rank, graph and iteration of the tensors that `named` would return, without reading
    their rows.

    Only for tensors that queries by place select. The iteration of constants is None. Return None
    if tables have rows of several jobs or attempts of which one is selected.
    """

    def keeps(rank: int, graph: int, iteration: int | None) -> bool:
        return all(query.keeps_place(rank, graph, iteration) for query in queries)

    if tree.job_id or tree.attempt is not None:
        return None
    found = {place for place in tree.entries.graphs_in_time if keeps(*place)}
    filed = tree.entries.folders
    known = TableRecords(tree, queries)
    for table in tree.tables:
        if table.folder in filed:
            continue
        if not table.dated:
            reader = TableRows(table, known)
            found |= {(table.rank, table.graph, place.iteration) for place in reader.places}
            reader.raise_damage()
            continue
        place = table.rank, table.graph, table.when
        if place in found or not keeps(*place):
            continue
        if table.form or select_codec(table.relative).suffix:
            return None
        if _has_row(table):
            found.add(place)
    return found


def _has_row(table: Table) -> bool:
    """Return whether a table has a line after its header."""
    with named_errors(table.path), table.path.open("rb") as file:
        file.readline()
        return file.readline().endswith(b"\n")


def _call_of_key(key: TensorKey) -> tuple[int, int, str, str]:
    return key.rank, key.iteration, key.op_name, key.argument
