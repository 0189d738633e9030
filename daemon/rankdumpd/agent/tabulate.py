"""Rows of committed records to `statistic.csv`, in order and each once; knows no gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rankdump.contract.layout.mindspore_sync import STATISTIC_FILE
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import TableRow

_MAX_OPEN_TABLES = 256


class Tables:
    """The tables of one session; not for several threads.

    A table that this process has not touched yet is read first: an earlier one may have written
    some of the rows already, and died within a line.
    """

    def __init__(self, tree: Tree, header: str) -> None:
        self._tree, self._header = tree, header
        self._open: set[str] = set()

    def add(self, rows: Iterable[TableRow]) -> list[str]:
        """Append rows; return a sentence for each table that has other columns and gets none.

        After an OSError the same rows may be added again: none will stand there twice.
        """
        refused: dict[str, str] = {}
        for folder, some in groupby(rows, key=lambda row: row.folder):
            sentence = self._append(folder, [row.text for row in some])
            if sentence:
                refused[folder] = sentence
        return list(refused.values())

    def _append(self, folder: str, lines: list[str]) -> str:
        if folder not in self._open:
            there = self._whole_lines(folder)
            if there and there[0] != self._header:
                return f"{folder}/{STATISTIC_FILE} has other columns: rows are left out"
            known = set(there)
            lines = [line for line in lines if line not in known]
            lines = lines if there else [self._header, *lines]
        # Forgotten while it is written: what a failing disk leaves has to be read again.
        self._open.discard(folder)
        if lines:
            self._tree.append_lines(folder, STATISTIC_FILE, lines)
        if len(self._open) >= _MAX_OPEN_TABLES:
            self._open.clear()
        self._open.add(folder)
        return ""

    def _whole_lines(self, folder: str) -> list[str]:
        """Return the lines of a table, which has no torn one afterwards."""
        text = self._tree.text(folder, STATISTIC_FILE)
        whole, end, torn = text.rpartition("\n")
        if torn:
            data = (whole + end).encode()
            self._tree.put(folder, STATISTIC_FILE, (data,), mark=STATISTIC_FILE)
        return whole.split("\n") if end else []
