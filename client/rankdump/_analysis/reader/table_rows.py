"""Rows of the tables of a tree in execution order, alone and beside its files: those of one
iteration of a rank are objects at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.foreign_dumps import read_foreign_rows
from rankdump._analysis.reader.growing_tables import GrowingTable, NameFilter
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.statistic_tables import make_statistics_row
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_text import read_table
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
    """Rows of one table by the iterations that are asked for."""

    def __init__(self, table: Table, known: TableRecords) -> None:
        """CorruptedError when a table of several iterations cannot be read."""
        self.table, self._known = table, known
        self._grown = GrowingTable(table, known) if is_growing(table) else None
        if self._grown is not None:
            self.places = [PlaceInTime(table.rank, True, each) for each in self._grown.iterations]
        else:
            at = known.find_iteration(table)
            is_asked = table.dated or known.is_asked(table, at)
            self.places = [PlaceInTime(table.rank, not table.constant, at)] if is_asked else []

    def raise_damage(self) -> None:
        """Raise CorruptedError for what is behind the rows of a table of several iterations."""
        if self._grown is not None and self._grown.damage:
            raise CorruptedError(self._grown.damage)

    def count_finite_rows(self, place: PlaceInTime) -> int:
        """Return the rows of an info file at a place; 0 where one may not be finite."""
        return self._grown.count_finite_rows(place.iteration) if self._grown is not None else 0

    def read_text(self, place: PlaceInTime) -> bytes:
        """Return the text of a `statistic.csv` with the rows of a place; CorruptedError."""
        if self._grown is not None:
            return self._grown.read_text(place.iteration)
        return _read_text(self.table).replace(b"\r\n", b"\n")

    def read_rows(
        self, place: PlaceInTime, keeps_name: NameFilter | None = None
    ) -> Iterator[Figures]:
        """Yield the rows of one of its places; CorruptedError names an invalid line."""
        grown = self._grown
        rows = (
            _read_dated_rows(self.table, self._known, place.iteration)
            if grown is None
            else grown.read_rows(place.iteration, keeps_name)
        )
        return (
            row
            for row in rows
            if self._known.is_selected(row, self.table)
            and (keeps_name is None or grown is not None or keeps_name(row.key.op_name))
        )

    def read_all_rows(self) -> Iterator[Figures]:
        """Yield the rows of all places in the order of the table, then raise for its damage."""
        if self._grown is None:
            for place in self.places:
                yield from self.read_rows(place)
            return
        for row in self._grown.read_all_rows():
            if self._known.is_selected(row, self.table):
                yield row
        self.raise_damage()


def is_growing(table: Table) -> bool:
    """Return whether a table may have rows of several iterations."""
    return table.info or not (table.dated or table.operator)


def read_table_rows(table: Table, known: TableRecords) -> Iterator[Figures]:
    """Yield the rows of one table in order; CorruptedError names an invalid line.

    An incomplete last line is also an error, raised after all other rows.
    """
    yield from TableRows(table, known).read_all_rows()


def _read_dated_rows(table: Table, known: TableRecords, iteration: int) -> Iterator[Figures]:
    if table.form:
        yield from read_foreign_rows(table)
        return
    text = _read_text(table).decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    whole, _, torn = text.rpartition("\n")
    operator, file = table.operator, str(table.path)
    for row in (
        parse_statistic_table(whole, file=file)
        if operator is None
        else parse_operator_table(whole, operator, file=file)
    ):
        member = f"{row.side.value}.{row.slot}"
        record = known.find_by_time(table, row.timestamp_us, member)
        yield make_statistics_row(row, table, iteration, record)
    if torn:
        raise CorruptedError(f"{table.path}: its last line is incomplete: {torn[:60]!r}")


def _read_text(table: Table) -> bytes:
    return read_table(LocalTree(table.root), table.folder, table.path.name)


def iterate_named(
    tree: Tree,
    keeps: Callable[[Entry | Figures], bool],
    *,
    queries: Sequence[Query] = (),
    keeps_name: NameFilter | None = None,
) -> Iterator[Entry | Figures]:
    """Yield tensors in execution order: files, and rows of tables in folders without files.

    `queries` are those of `keeps`, as far as it asks for ranks and iterations. Rows of which
    `keeps_name` does not keep the name of the operator, as tables spell it, are left out.
    CorruptedError names an invalid line of a table.
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
            # An info file has a line for every tensor, including those with a file.
            has_file = {_call_of_key(entry.key) for entry in found if entry.key.argument}
            read = (reader.read_rows(place, keeps_name) for reader in by_place[place])
            rows = filter(keeps, chain.from_iterable(read))
            own = (row for row in rows if _call_of_key(row.key) not in has_file)
            yield from sorted((*found, *own), key=lambda each: execution_order_of(each.key))
        for reader in readers:
            reader.raise_damage()


def group_by_place(readers: Iterable[TableRows]) -> dict[PlaceInTime, list[TableRows]]:
    """Return the tables that have rows of each place."""
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
    """Return rank, graph and iteration of the tensors that `named` returns, without their rows.

    Of tensors that queries of places keep. The iteration of constants is None. None where tables
    have rows of several jobs or attempts of which one is selected.
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
