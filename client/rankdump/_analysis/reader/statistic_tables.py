"""Rows of statistics from `statistic.csv`, from the table of one operator, and from the info file
of a dump of APIs, each with its operator and the record in its manifest. Reads one table at a
time; titles of columns are those of MindSpore, whatever tool wrote the table.

An info file that rankdump wrote states the step of each line. Those of api_dump in the
troubleshooter all say 1: there a step is a block of forward records followed by a block of
backward records, as its own comparison assumes, and the whole file is one step where no backward
was recorded.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.reader.manifests import (
    StatusAndRecord,
    list_manifest_files,
    list_rank_folders,
    read_manifests,
)
from rankdump._analysis.reader.tensor_loader import normalize_element_name
from rankdump._analysis.reader.tree import Entry, Figures, Table, Tree
from rankdump._codec.file_codec import select_codec
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.manifest import Manifest
from rankdump._core.record import TensorKey
from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES
from rankdump._layout import api_tree, statistic_tables
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_dtype_name, parse_info_line
from rankdump._layout.api_tree import parse_place
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN
from rankdump.errors import CorruptedError

_MSPROBE_STEP = 1
"""Step of every line of the real tool."""

_STATISTIC_ITEMS = (*SUMMARY_ITEMS, "l2norm")
RecordsByName: TypeAlias = "Mapping[tuple[int, int, str], list[StatusAndRecord]]"
"""Records of the tensors of an API dump, by rank, iteration and name."""
MAX_TABLE_BYTES = 4 << 30
"""Most a packed table may unpack to."""
_TITLE_SPELLINGS = {title.lower(): title for title in STATISTIC_TITLES.values()} | {
    "l2norm": STATISTIC_TITLES["l2norm"],
    "md5 value": STATISTIC_TITLES["md5"],
}
"""Columns that CANN and its tools spell otherwise."""


@dataclass(frozen=True, slots=True)
class PlacedInfoLine:
    """One line of an info file."""

    line: InfoLine
    line_number: int
    """Of the line, from 1: the order of execution."""
    iteration: int


@dataclass(frozen=True, slots=True)
class InfoFileContent:
    """Content of an info file."""

    lines: tuple[PlacedInfoLine, ...]
    damage: str = ""
    """Why there is nothing behind these lines; empty where the file ends well."""
    is_torn: bool = False
    """Whether the damage is only that the last line was not written to its end."""
    has_steps: bool = True
    """Whether its steps are real ones."""

    @property
    def statistic_items(self) -> frozenset[str]:
        """Statistics that the file has of any tensor: where another lacks one, it is NaN."""
        return frozenset(item for noted in self.lines for item in noted.line.statistics)


def read_info(path: Path, *, stepped: bool) -> InfoFileContent:
    """Return what an info file says; with `stepped` it is known to have real steps.

    A line that is torn or none of these ends it; CorruptedError when it cannot be read at all.
    """
    try:
        # Bytes that are no text are in no line of JSON: they end what is read of the file.
        text = path.read_bytes().decode("utf-8", "backslashreplace")
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None
    found: list[tuple[int, InfoLine]] = []
    damage, torn = "", False
    *ended, rest = text.split("\n")
    for number, line in enumerate((*ended, rest), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, parse_info_line(line, file=f"{path}, line {number}")))
        except CorruptedError as error:
            torn = number > len(ended)
            damage = f"{path}: its last line is incomplete: {line[:60]!r}" if torn else str(error)
            break
    stepped = stepped or any(line.step != _MSPROBE_STEP for _, line in found)
    lines = [line for _, line in found]
    iterations = [line.step for line in lines] if stepped else _iterations_by_block(lines)
    pairs = zip(found, iterations, strict=True)
    noted = tuple(PlacedInfoLine(line, number, at) for (number, line), at in pairs)
    return InfoFileContent(noted, damage, torn, stepped)


def _iterations_by_block(lines: Sequence[InfoLine]) -> list[int]:
    """Return the iteration of each line: a forward behind a backward begins the next one."""
    iterations: list[int] = []
    at, backward = 0, False
    for line in lines:
        now = "_backward_" in line.name
        at += backward and not now
        backward = now
        iterations.append(at)
    return iterations


def index_call_records(manifests: Iterable[Manifest]) -> RecordsByName:
    """Return what the manifests of an api dump say."""
    found: defaultdict[tuple[int, int, str], list[StatusAndRecord]] = defaultdict(list)
    for manifest in manifests:
        status = manifest.status
        for record in manifest.records:
            place = parse_place(record.argument)
            if place is not None:
                name = api_tree.spell_api_tensor_name(record.op_name, place)
                found[status.rank, status.iteration, name].append((status, record))
    return found


def read_info_rows(table: Table, known: RecordsByName) -> Iterator[Figures]:
    """Yield the rows of an info file; CorruptedError, after all others, for a line that is none."""
    info = read_info(table.path, stepped=any(rank == table.rank for rank, _, _ in known))
    seen: Counter[tuple[int, int, str]] = Counter()
    given = info.statistic_items
    for noted in info.lines:
        where = table.rank, noted.iteration, noted.line.name
        every = known.get(where, [])
        known_record = every[min(seen[where], len(every) - 1)] if every else None
        seen[where] += 1
        row = _info_row(noted, table, known_record, given)
        if row is not None:
            yield row
    if info.damage:
        raise CorruptedError(info.damage)


def _info_row(
    noted: PlacedInfoLine, table: Table, known_record: StatusAndRecord | None, given: frozenset[str]
) -> Figures | None:
    line = noted.line
    file = api_tree.parse_api_file_name(f"{line.name}.npy")
    if file is None:
        return None
    dtype = parse_dtype_name(line.dtype)
    values = {STATISTIC_TITLES[item]: repr(value) for item, value in line.statistics.items()}
    if dtype != "bool":
        values |= {
            STATISTIC_TITLES[i]: repr(math.nan)
            for i in _STATISTIC_ITEMS
            if i in given - set(line.statistics)
        }
    if line.md5:
        values[STATISTIC_TITLES[MD5_ITEM]] = line.md5
    element = ELEMENT_TYPES.get(dtype)
    return Figures(
        key=TensorKey(
            rank=table.rank,
            net_name="",
            graph=0,
            iteration=noted.iteration,
            timestamp_us=noted.line_number
            if known_record is None
            else known_record[1].timestamp_us,
            op_type=file.op_type,
            op_name=file.op_name,
            side=file.side,
            slot=file.slot,
            argument=file.argument,
        ),
        dtype=dtype,
        shape=line.shape,
        data_bytes=math.prod(line.shape) * (element.item_bytes if element is not None else 0),
        values=values,
        relative=table.relative,
        record=None if known_record is None else known_record[1],
    )


class InfoFilePlaces:
    """Iteration and order of tensors that no manifest names, from the info file beside them."""

    def __init__(self, root: Path, *, stepped: bool) -> None:
        self._root, self._stepped = root, stepped
        self._known: dict[str, dict[str, PlacedInfoLine]] = {}

    def place_of_file(self, folder: str, name: str) -> tuple[int, int]:
        """Return iteration and place in time of a file's tensor; those with no line come last."""
        if folder not in self._known:
            self._known[folder] = self._lines(folder)
        lines = self._known[folder]
        noted = lines.get(name.removesuffix(".zst").removesuffix(".npy"))
        if noted is not None:
            return noted.iteration, noted.line_number
        last = next(reversed(lines.values()), None)
        return (0, 0) if last is None else (last.iteration, last.line_number + 1)

    def _lines(self, folder: str) -> dict[str, PlacedInfoLine]:
        for ending in ("pkl", "csv"):
            path = self._root / f"{folder}_info.{ending}"
            if path.is_file():
                try:
                    info = read_info(path, stepped=self._stepped)
                except CorruptedError:  # reported when the table itself is read
                    return {}
                return {noted.line.name: noted for noted in info.lines}
        return {}


class TableRecords:
    """Records in the manifests of a tree for the rows of its tables.

    Only what those of one iteration say is held, and of tables that do not tell the iteration what
    all of a rank say, or of the tree where ranks are not told either.
    """

    def __init__(self, root: Path, job_id: str = "") -> None:
        """With a job, rows that no manifest of it names are another job's."""
        self._root, self.job_id = root, job_id
        self._place: tuple[str, int | None] | None = None
        """Folder of the rank and iteration that were looked at last."""
        self._by_time: dict[tuple[int, int, str], StatusAndRecord] = {}
        self._by_name: RecordsByName = {}

    def find_by_time(self, table: Table, timestamp_us: int, member: str) -> StatusAndRecord | None:
        """Return what is said of a tensor, by a time stamp that no other one of its rank has."""
        self._look(table)
        return self._by_time.get((table.rank, timestamp_us, member))

    def records_by_name(self, table: Table) -> RecordsByName:
        """Return what is said of the tensors of an info file, which says no time."""
        self._look(table)
        return self._by_name

    def _look(self, table: Table) -> None:
        base = table.relative.partition("/")[0]
        told = RANK_FOLDER_PATTERN.fullmatch(base) is not None
        at = table.iteration if told and table.dated and not table.constant else None
        place = base if told else "", at
        if place == self._place:
            return
        self._place = place
        files = [
            file
            for rank in ([base] if told else list_rank_folders(self._root))
            for file in list_manifest_files(self._root, rank, [])
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
        self._by_name = index_call_records(manifests) if table.info else {}


def read_table_rows(table: Table, known: TableRecords) -> Iterator[Figures]:
    """Yield the rows of one table, in its order; CorruptedError names the line at fault.

    A last line without an end is such a line, after all others: it is torn, or being written.
    """
    every = _read_every_row(table, known)
    return (row for row in every if row.record is not None) if known.job_id else every


def _read_every_row(table: Table, known: TableRecords) -> Iterator[Figures]:
    if table.info:
        yield from read_info_rows(table, known.records_by_name(table))
        return
    try:
        data = select_codec(table.path.name).decode(
            table.path.read_bytes(), limit_bytes=MAX_TABLE_BYTES
        )
    except OSError as error:
        raise CorruptedError(f"{table.path}: cannot be read: {error.strerror}") from None
    except CorruptedError as error:
        raise CorruptedError(f"{table.path}: {error}") from None
    text = bytes(data).decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    whole, _, torn = text.rpartition("\n")
    for row in _parse_table(whole, table):
        yield _statistics_row(row, table, known)
    if torn:
        raise CorruptedError(f"{table.path}: its last line is incomplete: {torn[:60]!r}")


def _parse_table(text: str, table: Table) -> Iterable[statistic_tables.StatisticCsvRow]:
    """Return the rows of a table in one form."""
    operator = table.operator
    if operator is None:
        return statistic_tables.parse_statistic_table(text, file=str(table.path))
    return (
        statistic_tables.StatisticCsvRow(
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
        for row in statistic_tables.parse_operator_table(text, file=str(table.path))
    )


def _statistics_row(
    row: statistic_tables.StatisticCsvRow, table: Table, known: TableRecords
) -> Figures:
    stamp, member = row.timestamp_us, f"{row.side.value}.{row.slot}"
    # Where every tensor has a time of its own, nothing else is said.
    known_record = known.find_by_time(table, stamp, member) or known.find_by_time(table, stamp, "")
    iteration = (
        table.iteration if table.dated or known_record is None else known_record[0].iteration
    )
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
        dtype=normalize_element_name(row.dtype),
        shape=row.shape,
        data_bytes=row.data_bytes,
        values={_TITLE_SPELLINGS.get(title.lower(), title): text for title, text in row.values},
        relative=table.relative,
        record=known_record[1] if known_record is not None else None,
    )


def named(tree: Tree, keeps: Callable[[Entry | Figures], bool]) -> Sequence[Entry | Figures]:
    """Return every tensor that has a file, and those with a row where no files are, as they ran."""
    entries = tree.entries.where(keeps)
    filed = tree.entries.folders
    tables = [table for table in tree.tables if table.folder not in filed]
    if not tables:
        return entries
    known = TableRecords(tree.root, tree.job_id)
    # An info file has a line for every tensor, whether or not it has a file as well.
    has_file = {_call_of_key(entry.key) for entry in entries if entry.key.argument}
    tabled = (
        row
        for table in tables
        for row in read_table_rows(table, known)
        if keeps(row) and _call_of_key(row.key) not in has_file
    )
    return tuple(sorted((*entries, *tabled), key=lambda tensor: _execution_order(tensor.key)))


def _call_of_key(key: TensorKey) -> tuple[int, int, str, str]:
    return key.rank, key.iteration, key.op_name, key.argument


def _execution_order(key: TensorKey) -> tuple[int, bool, int, int, str, int]:
    when = key.rank, not key.constant, key.iteration, key.timestamp_us
    return *when, key.side.value, key.slot
