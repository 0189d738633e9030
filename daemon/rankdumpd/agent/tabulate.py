"""Rows of committed records to tables of figures, in order and each once; knows no gRPC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import dropwhile, groupby

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.place import Place
from rankdumpd.agent.names import Names
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import TableRow

_MAX_OPEN_TABLES = 256


class Tables:
    """The tables of one session; not for several threads.

    An earlier process may have written some of the rows already. A table that this one has not
    touched yet is gone through for the first of its rows: what stands behind that may be those that
    follow.
    """

    def __init__(self, tree: Tree, names: Names, header: str, *, looks_back: bool = True) -> None:
        """Without `looks_back` no row can be there: the session is a new one."""
        self._tree, self._names, self._header = tree, names, header
        self.looks_back = looks_back
        """Whether rows may be there before they are added."""
        self._open: dict[str, str] = {}
        """Name of the file by the path that its rows say."""
        self._there: dict[str, Counter[str]] = {}
        """Lines by that path that may be rows which are yet to be added again."""

    def look_back(self) -> None:
        """Expect from now on that rows are there before they are added."""
        self.looks_back = True
        self._open.clear()
        self._there.clear()

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
        name, head = self._open.pop(table.path, ""), list[str]()
        there = self._there.pop(table.path, Counter[str]())
        if not name:
            self._names.note(table)
            name, began, there = self._found(table, lines[0])
            head = [self._header] if self._header and not began else []
        new = [line for line in lines if not _taken(there, line)] if there else lines
        if head or new:
            self._tree.append_lines(table.folder, name, (*head, *new))
        if len(self._open) >= _MAX_OPEN_TABLES:
            self._open.clear()
            self._there.clear()
        self._open[table.path] = name
        if there:
            self._there[table.path] = there
        return name

    def _found(self, table: Place, first: str) -> tuple[str, bool, Counter[str]]:
        """Return the file of these rows, whether it has any line, and those to check."""
        name = table.name
        began = next(self._tree.each_line(table.folder, name), None)
        if self._header and began not in (None, self._header):
            name = statistic_csv.beside(self._header, name)
            began = next(self._tree.each_line(table.folder, name), None)
        there = Counter[str]()
        if began is not None and self.looks_back:
            lines = self._tree.each_line(table.folder, name)
            there.update(dropwhile(lambda line: line != first, lines))
        return name, began is not None, there


def _taken(there: Counter[str], line: str) -> bool:
    """Return whether a line is there, and count it as found."""
    if not there[line]:
        return False
    there[line] -= 1
    return True
