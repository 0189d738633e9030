"""Tables of statistics: the format of a row for each layout and plan, and the table files, to which
committed rows are appended in order, each once. This module computes no statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import dropwhile, groupby
from operator import attrgetter
from typing import TypeAlias

from rankdump._core.bounded_cache import remember
from rankdump._core.manifest import ManifestRecord
from rankdump._core.plan import UNNAMED_MODEL, DumpPlan
from rankdump._core.record import TensorKey, TensorKind, TensorSide
from rankdump._layout import api_files, api_tree, statistic_tables
from rankdump._layout.api_tree import ApiPlace, parse_place
from rankdump._layout.statistic_tables import StatisticRow
from rankdump._layout.tree_layouts import GraphPlace, Layout
from rankdump._layout.tree_paths import STATISTIC_FILE, FilePlace, TreeContext
from rankdumpd.agent.records import ReceivedRecord, StatisticTableRow, format_member
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles

_MAX_FOLDERS = 1024
_MAX_PLACES = 1024


@dataclass(frozen=True, slots=True)
class _SessionConstants:
    """Values that all rows of a session have in common."""

    rank: int
    net_name: str
    layout: Layout
    context: TreeContext

    def model(self, kind: TensorKind) -> str:
        """Return the name of a tensor's model as its rows contain it."""
        return self.net_name or kind.model or UNNAMED_MODEL


@dataclass(frozen=True, slots=True)
class FolderTableFormat:
    """Format with one `statistic.csv` in each folder."""

    items: tuple[str, ...]
    about: _SessionConstants
    _tables: dict[tuple[str, int, int, bool], FilePlace] = field(
        default_factory=dict[tuple[str, int, int, bool], FilePlace]
    )

    @property
    def header(self) -> str:
        """Header line of a table."""
        return statistic_tables.format_statistic_header(self.items)

    def format_record(self, record: ReceivedRecord, place: FilePlace) -> StatisticTableRow | None:
        """Return the row of a tensor whose file is at `place`; None when the tensor has no
        statistics.
        """
        if record.statistics is None:
            return None
        text = statistic_tables.format_statistic_line(
            record.head, record.statistics, self.about.context.profile
        )
        return StatisticTableRow(FilePlace(place.folder, STATISTIC_FILE), text)

    def format_statistics(
        self, rows: Sequence[StatisticRow], iteration: int
    ) -> Iterator[StatisticTableRow]:
        """Yield the rows of tensors that were sent as statistics only."""
        about, tables = self.about, self._tables
        lines = statistic_tables.iter_statistics_only_lines(
            rows, about.context.profile, unknown_id=about.layout.unknown_id
        )
        for (kind, _, _), line in zip(rows, lines, strict=True):
            table = tables.get((kind.model, kind.graph, iteration, kind.constant))
            yield StatisticTableRow(table or self._make_table(kind, iteration), line)

    def _make_table(self, kind: TensorKind, iteration: int) -> FilePlace:
        about = self.about
        place = GraphPlace(about.rank, about.model(kind), kind.graph, iteration, kind.constant)
        table = FilePlace(about.layout.make_folder(about.context, place), STATISTIC_FILE)
        where = kind.model, kind.graph, iteration, kind.constant
        remember(self._tables, where, table, _MAX_FOLDERS)
        return table


@dataclass(frozen=True, slots=True)
class OperatorTableFormat:
    """Format with one table for each operator, which replaces the operator's file."""

    items: tuple[str, ...]
    about: _SessionConstants

    @property
    def header(self) -> str:
        """Header line of a table."""
        return statistic_tables.format_operator_header(self.items)

    def format_record(self, record: ReceivedRecord, place: FilePlace) -> StatisticTableRow | None:
        """Return None: operators with a table have no files."""
        return None

    def format_statistics(
        self, rows: Sequence[StatisticRow], iteration: int
    ) -> Iterator[StatisticTableRow]:
        """Yield the rows of tensors that were sent as statistics only."""
        return (self._format_operator(*row, iteration) for row in rows)

    def _format_operator(
        self, kind: TensorKind, timestamp_us: int, statistics: str, iteration: int
    ) -> StatisticTableRow:
        about = self.about
        layout = about.layout
        key = TensorKey(
            rank=about.rank,
            net_name=about.model(kind),
            graph=kind.graph,
            iteration=iteration,
            timestamp_us=timestamp_us,
            op_type=kind.op_type,
            op_name=kind.op_name,
            side=kind.side,
            slot=kind.slot,
            task=layout.unknown_id,
            stream=layout.unknown_id,
            constant=kind.constant,
        )
        table = layout.place_operator(key, about.context, statistic_tables.OPERATOR_TABLE_SUFFIX)
        text = statistic_tables.format_operator_line(
            kind, layout.tensor_format(kind.shape), statistics
        )
        return StatisticTableRow(table, text)


@dataclass(frozen=True, slots=True)
class InfoFileFormat:
    """Format of an API dump's info file, one for each rank, with a row for every tensor."""

    items: tuple[str, ...]
    files: api_tree.ApiFileNames
    table: FilePlace

    @property
    def header(self) -> str:
        """Empty, because an info file has no header line."""
        return ""

    def format_record(self, record: ReceivedRecord, place: FilePlace) -> StatisticTableRow:
        """Return the row of a tensor with a file, even if it has no statistics."""
        return self._make_row(record.head.kind, record.head.iteration, record.statistics or ())

    def format_statistics(
        self, rows: Sequence[StatisticRow], iteration: int
    ) -> Iterator[StatisticTableRow]:
        """Yield the rows of tensors that were sent as statistics only."""
        for kind, _, statistics in rows:
            values = tuple(statistics.split(",")) if statistics else ()
            yield self._make_row(kind, iteration, values)

    def _make_row(
        self, kind: TensorKind, iteration: int, values: tuple[str, ...]
    ) -> StatisticTableRow:
        place = _find_place(kind.argument, kind.side, kind.slot)
        text = api_files.format_info_line(
            self.files,
            name=api_tree.spell_api_tensor_name(kind.op_name, place),
            step=iteration,
            place=place,
            dtype=kind.dtype,
            shape=kind.shape,
            statistics=dict(zip(self.items, values, strict=False)),
        )
        return StatisticTableRow(self.table, text)


TableFormat: TypeAlias = FolderTableFormat | OperatorTableFormat | InfoFileFormat
"""The format of the tables of one session."""


def make_table_format(
    plan: DumpPlan, layout: Layout, context: TreeContext, rank: int
) -> TableFormat:
    """Return the table format for a plan, even if the plan has no statistics."""
    content = plan.content
    if layout.api_files is not None:
        table = FilePlace(layout.rank_folder(rank), layout.api_files.info_file)
        return InfoFileFormat(content.statistics, layout.api_files, table)
    about = _SessionConstants(rank, plan.output.net_name, layout, context)
    if content.tables == "operator":
        return OperatorTableFormat(content.statistics, about)
    return FolderTableFormat(
        statistic_tables.select_table_items(content.statistics, context.profile), about
    )


@lru_cache(maxsize=_MAX_PLACES)
def _find_place(argument: str, side: TensorSide, slot: int) -> ApiPlace:
    return parse_place(argument) or ApiPlace(side, str(slot))


def make_row_record(kind: TensorKind, timestamp_us: int, has_member: bool) -> ManifestRecord:
    """Return the manifest record of a tensor that has statistics only."""
    # Arguments are passed by position, which is faster: this runs for each row.
    return ManifestRecord(
        "",
        timestamp_us,
        kind.op_type,
        kind.op_name,
        kind.argument,
        kind.dtype,
        kind.shape,
        0,
        0,
        "",
        format_member(kind.side, kind.slot) if has_member else "",
        kind.microbatch,
        kind.phase,
        kind.layout,
    )


_MAX_OPEN_TABLES = 256


class StatisticTables:
    """The tables of one session; not for use from several threads.

    An earlier process may have written some of the rows already. So a table that this process has
    not written to yet is searched for the first new row: the lines from there on may be rows that
    are added again.
    """

    def __init__(
        self, tree: DumpTree, names: MappingFiles, header: str, *, looks_back: bool = True
    ) -> None:
        """Without `looks_back` no earlier rows are searched for, because the session is new."""
        self._tree, self._names, self._header = tree, names, header
        self.looks_back = looks_back
        """Whether rows may be in a table before they are added."""
        self._open: dict[str, str] = {}
        """Names of the files in use, by the table path of their rows."""
        self._existing: dict[str, Counter[str]] = {}
        """Lines of existing files that may equal rows which will be added again, by table path."""

    def expect_existing_rows(self) -> None:
        """Expect from now on that rows may be in a table before they are added."""
        self.looks_back = True
        self._open.clear()
        self._existing.clear()

    def add(self, rows: Iterable[StatisticTableRow]) -> list[str]:
        """Append rows; return a finding for each table that got a second file beside another job's.

        After an OSError the same rows may be added again: none is written twice.
        """
        pairs = [
            (table.name, self._append(table, [row.text for row in some]))
            for table, some in groupby(rows, key=attrgetter("table"))
        ]
        return [
            f"{usual} of another job has other columns: rows are written to {name} beside it"
            for usual, name in dict.fromkeys(pairs)
            if name != usual
        ]

    def _append(self, table: FilePlace, lines: list[str]) -> str:
        # Removed while rows are written, because after an error the file has to be read again.
        name, head = self._open.pop(table.path, ""), list[str]()
        existing = self._existing.pop(table.path, Counter[str]())
        if not name:
            self._names.write_mapping(table)
            name, began, existing = self._find_file(table, lines[0])
            head = [self._header] if self._header and not began else []
        new = [line for line in lines if not _take_line(existing, line)] if existing else lines
        if head or new:
            self._tree.append_lines(table.folder, name, (*head, *new))
        if len(self._open) >= _MAX_OPEN_TABLES:
            self._open.clear()
            self._existing.clear()
        self._open[table.path] = name
        if existing:
            self._existing[table.path] = existing
        return name

    def _find_file(self, table: FilePlace, first: str) -> tuple[str, bool, Counter[str]]:
        """Return the file for these rows, whether it has any line, and the existing lines to
        compare with.
        """
        name = table.name
        began = next(self._tree.each_line(table.folder, name), None)
        if self._header and began not in (None, self._header):
            name = statistic_tables.make_second_table_name(self._header, name)
            began = next(self._tree.each_line(table.folder, name), None)
        existing = Counter[str]()
        if began is not None and self.looks_back:
            lines = self._tree.each_line(table.folder, name)
            existing.update(dropwhile(lambda line: line != first, lines))
        return name, began is not None, existing


def _take_line(existing: Counter[str], line: str) -> bool:
    """Remove a line from `existing`; return False if it is not there."""
    if not existing[line]:
        return False
    existing[line] -= 1
    return True
