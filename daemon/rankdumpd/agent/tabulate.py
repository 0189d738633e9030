"""Rows of committed records to `statistic.csv`, in order and each once; knows no gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.mindspore_sync import STATISTIC_FILE
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import TableRow

_MAX_OPEN_TABLES = 256


class Tables:
    """The tables of one session; not for several threads.

    A table that this process has not touched yet is read first: an earlier one may have written
    some of the rows already.
    """

    def __init__(self, tree: Tree, header: str) -> None:
        self._tree, self._header = tree, header
        self._open: dict[str, str] = {}
        """Name of the file by folder."""

    def add(self, rows: Iterable[TableRow]) -> list[str]:
        """Append rows; return a sentence where they stand beside another job's table.

        After an OSError the same rows may be added again: none will stand there twice.
        """
        names = [
            self._append(folder, [row.text for row in some])
            for folder, some in groupby(rows, key=lambda row: row.folder)
        ]
        return [
            f"{STATISTIC_FILE} of another job has other columns: rows stand in {name} beside it"
            for name in dict.fromkeys(names)
            if name != STATISTIC_FILE
        ]

    def _append(self, folder: str, lines: list[str]) -> str:
        # Forgotten while it is written: what a failing disk leaves has to be read again.
        name = self._open.pop(folder, "")
        if not name:
            name, there = self._found(folder)
            known = set(there)
            lines = [line for line in lines if line not in known]
            lines = lines if there else [self._header, *lines]
        if lines:
            self._tree.append_lines(folder, name, lines)
        if len(self._open) >= _MAX_OPEN_TABLES:
            self._open.clear()
        self._open[folder] = name
        return name

    def _found(self, folder: str) -> tuple[str, list[str]]:
        """Return the file that these rows belong in, with the lines it has."""
        there = self._tree.lines(folder, STATISTIC_FILE)
        if not there or there[0] == self._header:
            return STATISTIC_FILE, there
        name = statistic_csv.beside(self._header)
        return name, self._tree.lines(folder, name)
