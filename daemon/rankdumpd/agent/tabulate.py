"""Rows of committed records to tables of figures, in order and each once; knows no gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.place import Place
from rankdumpd.agent.names import Names
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import TableRow

_MAX_OPEN_TABLES = 256


class Tables:
    """The tables of one session; not for several threads.

    A table that this process has not touched yet is read first: an earlier one may have written
    some of the rows already.
    """

    def __init__(self, tree: Tree, names: Names, header: str) -> None:
        self._tree, self._names, self._header = tree, names, header
        self._open: dict[str, str] = {}
        """Name of the file by the path that its rows say."""

    def add(self, rows: Iterable[TableRow]) -> list[str]:
        """Append rows; return a sentence where they stand beside another job's table.

        After an OSError the same rows may be added again: none will stand there twice.
        """
        pairs = [
            (table.name, self._append(table, [row.text for row in some]))
            for table, some in groupby(rows, key=lambda row: row.table)
        ]
        return [
            f"{usual} of another job has other columns: rows stand in {name} beside it"
            for usual, name in dict.fromkeys(pairs)
            if name != usual
        ]

    def _append(self, table: Place, lines: list[str]) -> str:
        # Forgotten while it is written: what a failing disk leaves has to be read again.
        name = self._open.pop(table.path, "")
        if not name:
            self._names.note(table)
            name, there = self._found(table)
            known = set(there)
            lines = [line for line in lines if line not in known]
            lines = lines if there else [self._header, *lines]
        if lines:
            self._tree.append_lines(table.folder, name, lines)
        if len(self._open) >= _MAX_OPEN_TABLES:
            self._open.clear()
        self._open[table.path] = name
        return name

    def _found(self, table: Place) -> tuple[str, list[str]]:
        """Return the file that these rows belong in, with the lines it has."""
        there = self._tree.lines(table.folder, table.name)
        if not there or there[0] == self._header:
            return table.name, there
        name = statistic_csv.beside(self._header, table.name)
        return name, self._tree.lines(table.folder, name)
