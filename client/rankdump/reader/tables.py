"""A `statistic.csv`, or the table of one operator, to typed rows that know their operators.

Reads one table at a time. Titles of columns are MindSpore's, whoever wrote the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rankdump.codec import codec_of
from rankdump.contract.errors import DamagedError
from rankdump.contract.key import TensorKey
from rankdump.contract.layout import operator_csv, statistic_csv
from rankdump.contract.layout.folders import RANK_FOLDER
from rankdump.contract.statistics import ITEMS
from rankdump.reader.api_rows import ByName, info_rows, named_calls
from rankdump.reader.elements import element_named
from rankdump.reader.entry import Entry, Table, Tree
from rankdump.reader.figures import Figures
from rankdump.reader.manifests import (
    Said,
    manifest_files,
    ranks_with_manifests,
    read_manifests,
)

LIMIT_BYTES = 4 << 30
"""Most a packed table may unpack to."""

_TITLES = {title.lower(): title for title in ITEMS.values()} | {
    "l2norm": ITEMS["l2norm"],
    "md5 value": ITEMS["md5"],
}
"""Columns that CANN and its tools spell otherwise."""


class Recorded:
    """What the manifests of a tree say of the rows of its tables.

    Only what those of one iteration say is held, and of tables that do not tell the iteration what
    all of a rank say, or of the tree where ranks are not told either.
    """

    def __init__(self, root: Path, job_id: str = "") -> None:
        """With a job, rows that no manifest of it names are another job's."""
        self._root, self.job_id = root, job_id
        self._place: tuple[str, int | None] | None = None
        """Folder of the rank and iteration that were looked at last."""
        self._by_time: dict[tuple[int, int, str], Said] = {}
        self._by_name: ByName = {}

    def at(self, table: Table, timestamp_us: int, member: str) -> Said | None:
        """Return what is said of a tensor, by a time stamp that no other one of its rank has."""
        self._look(table)
        return self._by_time.get((table.rank, timestamp_us, member))

    def called(self, table: Table) -> ByName:
        """Return what is said of the tensors of an info file, which says no time."""
        self._look(table)
        return self._by_name

    def _look(self, table: Table) -> None:
        base = table.relative.partition("/")[0]
        told = RANK_FOLDER.fullmatch(base) is not None
        at = table.iteration if told and table.dated and not table.constant else None
        place = base if told else "", at
        if place == self._place:
            return
        self._place = place
        files = [
            file
            for rank in ([base] if told else ranks_with_manifests(self._root))
            for file in manifest_files(self._root, rank, [])
            if at is None or file.iteration in (None, at)
        ]
        # What of them cannot be read is said by who walks the tree.
        every = read_manifests(files, [])
        manifests = [m for m in every if self.job_id in ("", m.status.job_id)]
        self._by_time = {
            (manifest.status.rank, record.timestamp_us, record.member): (manifest.status, record)
            for manifest in manifests
            for record in manifest.records
        }
        self._by_name = named_calls(manifests) if table.info else {}


def rows(table: Table, known: Recorded) -> Iterator[Figures]:
    """Yield the rows of one table, in its order; DamagedError names the line at fault.

    A last line without an end is such a line, after all others: it is torn, or being written.
    """
    every = _rows(table, known)
    return (row for row in every if row.record is not None) if known.job_id else every


def _rows(table: Table, known: Recorded) -> Iterator[Figures]:
    if table.info:
        yield from info_rows(table, known.called(table))
        return
    try:
        data = codec_of(table.path.name).decode(table.path.read_bytes(), limit_bytes=LIMIT_BYTES)
    except OSError as error:
        raise DamagedError(f"{table.path}: cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise DamagedError(f"{table.path}: {error}") from None
    text = bytes(data).decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    whole, _, torn = text.rpartition("\n")
    for row in _parsed(whole, table):
        yield _figures(row, table, known)
    if torn:
        raise DamagedError(f"{table.path}: its last line has no end: {torn[:60]!r}")


def _parsed(text: str, table: Table) -> Iterable[statistic_csv.Row]:
    """Return the rows of a table in one form."""
    operator = table.operator
    if operator is None:
        return statistic_csv.parse(text, file=str(table.path))
    return (
        statistic_csv.Row(
            op_type=operator.op_type,
            op_name=operator.op_name,
            task=operator.task,
            stream=operator.stream,
            timestamp_us=operator.timestamp_us,
            side=row.side,
            slot=row.slot,
            data_bytes=row.data_bytes,
            dtype=row.data_type,
            shape=row.shape,
            values=row.values,
        )
        for row in operator_csv.parse(text, file=str(table.path))
    )


def _figures(row: statistic_csv.Row, table: Table, known: Recorded) -> Figures:
    stamp, member = row.timestamp_us, f"{row.side.value}.{row.slot}"
    # Where every tensor has a time of its own, nothing else is said.
    said = known.at(table, stamp, member) or known.at(table, stamp, "")
    iteration = table.iteration if table.dated or said is None else said[0].iteration
    return Figures(
        key=TensorKey(
            rank=table.rank,
            net_name=table.net_name,
            graph=table.graph,
            iteration=iteration,
            timestamp_us=stamp,
            op_type=row.op_type,
            op_name=row.op_name,
            side=row.side,
            slot=row.slot,
            task=row.task,
            stream=row.stream,
            constant=table.constant,
        ),
        dtype=element_named(row.dtype),
        shape=row.shape,
        data_bytes=row.data_bytes,
        values={_TITLES.get(title.lower(), title): text for title, text in row.values},
        relative=table.relative,
        record=said[1] if said is not None else None,
    )


def named(tree: Tree, keeps: Callable[[Entry | Figures], bool]) -> Sequence[Entry | Figures]:
    """Return every tensor that has a file, and those with a row where no files are, as they ran."""
    entries = tree.entries.where(keeps)
    filed = tree.entries.folders
    tables = [table for table in tree.tables if table.folder not in filed]
    if not tables:
        return entries
    known = Recorded(tree.root, tree.job_id)
    # An info file has a line for every tensor, whether or not it has a file as well.
    has_file = {_call(entry.key) for entry in entries if entry.key.argument}
    tabled = (
        row
        for table in tables
        for row in rows(table, known)
        if keeps(row) and _call(row.key) not in has_file
    )
    return tuple(sorted((*entries, *tabled), key=lambda tensor: _in_time(tensor.key)))


def _call(key: TensorKey) -> tuple[int, int, str, str]:
    return key.rank, key.iteration, key.op_name, key.argument


def _in_time(key: TensorKey) -> tuple[int, bool, int, int, str, int]:
    when = key.rank, not key.constant, key.iteration, key.timestamp_us
    return *when, key.side.value, key.slot
