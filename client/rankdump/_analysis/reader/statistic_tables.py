"""Rows of statistics from `statistic.csv`, from the table of one operator, and from the info file
of an API dump, each with its operator and the record in its manifest. Reads one table at a time;
titles of columns are those of MindSpore for tables of any tool.

In an info file of rankdump, each line has its step. In one of troubleshooter's api_dump, the step
of every line is 1: there a step is a block of forward records followed by a block of backward
records, as its own comparison assumes, and a file without backward records is one step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.reader.foreign_dumps import read_foreign_rows
from rankdump._analysis.reader.manifests import (
    StatusAndRecord,
    list_manifest_files,
    list_rank_folders,
    read_manifests,
)
from rankdump._analysis.reader.tree import Entry, Figures, Table, Tree
from rankdump._codec.file_codec import select_codec
from rankdump._core.cann_types import normalize_element_name
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.manifest import Manifest
from rankdump._core.record import TensorKey
from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES
from rankdump._core.status import IterationStatus
from rankdump._layout import api_tree, statistic_tables
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_dtype_name, parse_info_line
from rankdump._layout.api_tree import parse_place
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN
from rankdump.errors import CorruptedError

_TOOL_STEP = 1
"""Step of every line of troubleshooter."""

INFO_ITEMS = (*SUMMARY_ITEMS, "l2norm")
"""Statistics that a line of an info file may have, besides an MD5."""
RecordsByName: TypeAlias = "Mapping[tuple[int, int, str], list[StatusAndRecord]]"
"""Records of the tensors of an API dump, by rank, iteration and name, in the order of time."""
MAX_TABLE_BYTES = 4 << 30
"""Largest unpacked size of a packed table."""
_TITLE_SPELLINGS = {title.lower(): title for title in STATISTIC_TITLES.values()} | {
    "l2norm": STATISTIC_TITLES["l2norm"],
    "md5 value": STATISTIC_TITLES["md5"],
}
"""Titles of MindSpore by the spellings of CANN and its tools, in lower case."""


def spell_title(title: str) -> str:
    """Return the title of a column as MindSpore spells it; an unknown title as it is."""
    return _TITLE_SPELLINGS.get(title.lower(), title)


@dataclass(frozen=True, slots=True)
class PlacedInfoLine:
    """One line of an info file with its position."""

    line: InfoLine
    line_number: int
    """From 1, in execution order."""
    iteration: int


@dataclass(frozen=True, slots=True)
class InfoFileContent:
    """Content of an info file."""

    lines: tuple[PlacedInfoLine, ...]
    damage: str = ""
    """Error in the line after these lines; empty for an intact file."""
    is_torn: bool = False
    """Whether the damage is only an incomplete last line."""
    has_steps: bool = True
    """Whether its lines have real steps."""

    @property
    def statistic_items(self) -> frozenset[str]:
        """Statistics that any line has; where another line lacks one, it is NaN."""
        return frozenset(item for noted in self.lines for item in noted.line.statistics)


def read_info(path: Path, *, stepped: bool) -> InfoFileContent:
    """Return the lines of an info file; with `stepped`, it is known to have real steps.

    Reading ends at the first invalid line; CorruptedError when the file cannot be read at all.
    """
    try:
        # Bytes that are not valid text make their line invalid, which ends the reading.
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
    stepped = stepped or any(line.step != _TOOL_STEP for _, line in found)
    lines = [line for _, line in found]
    iterations = [line.step for line in lines] if stepped else _iterations_by_block(lines)
    pairs = zip(found, iterations, strict=True)
    noted = tuple(PlacedInfoLine(line, number, at) for (number, line), at in pairs)
    return InfoFileContent(noted, damage, torn, stepped)


def _iterations_by_block(lines: Sequence[InfoLine]) -> list[int]:
    """Return the iteration of each line: a forward after a backward begins the next one."""
    iterations: list[int] = []
    at, backward = 0, False
    for line in lines:
        now = "_backward_" in line.name
        at += backward and not now
        backward = now
        iterations.append(at)
    return iterations


def index_call_records(manifests: Iterable[Manifest]) -> RecordsByName:
    """Return the records in the manifests of an API dump."""
    found: defaultdict[tuple[int, int, str], list[StatusAndRecord]] = defaultdict(list)
    for manifest in manifests:
        status = manifest.status
        for record in manifest.records:
            place = parse_place(record.argument)
            if place is not None:
                name = api_tree.spell_api_tensor_name(record.op_name, place)
                found[status.rank, status.iteration, name].append((status, record))
    for every in found.values():
        every.sort(key=lambda each: each[1].timestamp_us)
    return found


def read_info_rows(
    table: Table, known: RecordsByName, selects: Callable[[IterationStatus], bool]
) -> Iterator[Figures]:
    """Yield the rows of an info file, then raise CorruptedError where a line is invalid.

    Records are found only where their iteration is selected, but all count for the others' lines.
    """
    info = read_info(table.path, stepped=any(rank == table.rank for rank, _, _ in known))
    left = Counter((table.rank, noted.iteration, noted.line.name) for noted in info.lines)
    given = info.statistic_items
    for noted in info.lines:
        where = table.rank, noted.iteration, noted.line.name
        every = known.get(where, [])
        # The last lines are those of the records: a killed process has written some before.
        number = len(every) - left[where]
        known_record = every[number] if number >= 0 and every else None
        left[where] -= 1
        if known_record is not None and not selects(known_record[0]):
            known_record = None
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
        values=spell_info_values(line, given),
        relative=table.relative,
        record=None if known_record is None else known_record[1],
    )


def spell_info_values(line: InfoLine, given: Collection[str]) -> dict[str, str]:
    """Return the statistics of a line by title; one that is `given` and that it lacks is NaN."""
    values = {STATISTIC_TITLES[item]: repr(value) for item, value in line.statistics.items()}
    if parse_dtype_name(line.dtype) != "bool":
        absent = [i for i in INFO_ITEMS if i in given and i not in line.statistics]
        values |= {STATISTIC_TITLES[item]: repr(math.nan) for item in absent}
    if line.md5:
        values[STATISTIC_TITLES[MD5_ITEM]] = line.md5
    return values


class InfoFilePlaces:
    """Iteration and order of tensors without a manifest, from the info file of their folder."""

    def __init__(self, root: Path, *, stepped: bool) -> None:
        self._root, self._stepped = root, stepped
        self._known: dict[str, dict[str, PlacedInfoLine]] = {}

    def place_of_file(self, folder: str, name: str) -> tuple[int, int]:
        """Return the iteration and the order of a file's tensor; those without a line come last."""
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
                except CorruptedError:  # reported when the rows of the table are read
                    return {}
                return {noted.line.name: noted for noted in info.lines}
        return {}


class TableRecords:
    """Records in the manifests of a tree for the rows of its tables.

    Holds the records of one iteration at a time; for tables without an iteration those of the rank,
    and for tables without a rank those of the whole tree.
    """

    def __init__(self, tree: Tree) -> None:
        """Only records of the tree's job and attempt are found, if it is restricted to them."""
        self._tree, self._root, self.job_id = tree, tree.root, tree.job_id
        self._place: tuple[str, int | None] | None = None
        """Folder of the rank and iteration whose records are held."""
        self._by_time: dict[tuple[int, int, str], StatusAndRecord] = {}
        self._by_name: RecordsByName = {}

    def find_by_time(self, table: Table, timestamp_us: int, member: str) -> StatusAndRecord | None:
        """Return the record of a tensor, by a time stamp that is unique for its rank."""
        self._load(table)
        return self._by_time.get((table.rank, timestamp_us, member))

    def records_by_name(self, table: Table) -> RecordsByName:
        """Return the records for an info file, which has no time stamps, by tensor name."""
        self._load(table)
        return self._by_name

    def is_selected(self, row: Figures, table: Table) -> bool:
        """Return whether a row is of the job and the attempt."""
        attempt = self._tree.attempt
        if self.job_id or (table.info and attempt is not None):
            return row.record is not None
        key = row.key
        return (
            attempt is None
            or self._tree.periods.find_attempt(key.rank, key.timestamp_us) == attempt
        )

    def selects(self, status: IterationStatus) -> bool:
        """Return whether an iteration is of the job and the attempt."""
        is_of_job = self.job_id in ("", status.job_id)
        return is_of_job and self._tree.attempt in (None, status.attempt)

    def _load(self, table: Table) -> None:
        base = table.relative.partition("/")[0]
        ranked = RANK_FOLDER_PATTERN.fullmatch(base) is not None
        at = table.iteration if ranked and table.dated and not table.constant else None
        place = base if ranked else "", at
        if place == self._place:
            return
        self._place = place
        files = [
            file
            for rank in ([base] if ranked else list_rank_folders(self._root))
            for file in list_manifest_files(self._root, rank, [])
            if at is None or file.iteration in (None, at)
        ]
        # The walk of the tree reports unreadable manifests.
        every = read_manifests(files, [])
        if table.info:
            self._by_time, self._by_name = {}, index_call_records(every)
            return
        self._by_name = {}
        self._by_time = {
            (manifest.status.rank, record.timestamp_us, record.member): (manifest.status, record)
            for manifest in every
            if self.selects(manifest.status)
            for record in manifest.records
        }


def read_table_rows(table: Table, known: TableRecords) -> Iterator[Figures]:
    """Yield the rows of one table in order; CorruptedError names an invalid line.

    An incomplete last line is also an error, raised after all other rows.
    """
    return (row for row in _read_every_row(table, known) if known.is_selected(row, table))


def _read_every_row(table: Table, known: TableRecords) -> Iterator[Figures]:
    if table.form:
        yield from read_foreign_rows(table)
        return
    if table.info:
        yield from read_info_rows(table, known.records_by_name(table), known.selects)
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
    """Return the rows of a table in the form of `statistic.csv`."""
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
    # Records have no member where every tensor has its own time stamp.
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
        values={spell_title(title): text for title, text in row.values},
        relative=table.relative,
        record=known_record[1] if known_record is not None else None,
    )


def named(tree: Tree, keeps: Callable[[Entry | Figures], bool]) -> Sequence[Entry | Figures]:
    """Return tensors in execution order: files, and rows of tables in folders without files."""
    entries = tree.entries.where(keeps)
    filed = tree.entries.folders
    tables = [table for table in tree.tables if table.folder not in filed]
    if not tables:
        return entries
    known = TableRecords(tree)
    # An info file has a line for every tensor, including those with a file.
    has_file = {_call_of_key(entry.key) for entry in entries if entry.key.argument}
    tabled = (
        row
        for table in tables
        for row in read_table_rows(table, known)
        if keeps(row) and _call_of_key(row.key) not in has_file
    )
    return tuple(sorted((*entries, *tabled), key=lambda tensor: _execution_order(tensor.key)))


def find_places_by_name(
    tree: Tree, keeps: Callable[[int, int, int | None], bool]
) -> set[tuple[int, int, int | None]] | None:
    """Return rank, graph and iteration of the tensors that `named` returns, without their rows.

    The iteration of constants is None. None where a table has rows of several iterations, or of
    several jobs or attempts of which one is selected.
    """
    if tree.job_id or tree.attempt is not None:
        return None
    found = {place for place in tree.entries.graphs_in_time if keeps(*place)}
    filed = tree.entries.folders
    for table in tree.tables:
        place = table.rank, table.graph, table.when
        if table.folder in filed or place in found or not keeps(*place):
            continue
        if table.info or table.form or not table.dated or select_codec(table.relative).suffix:
            return None
        if _has_row(table):
            found.add(place)
    return found


def _has_row(table: Table) -> bool:
    """Return whether a table has a line after its header."""
    try:
        with table.path.open("rb") as file:
            file.readline()
            return file.readline().endswith(b"\n")
    except OSError as error:
        raise CorruptedError(f"{table.path}: cannot be read: {error.strerror}") from None


def _call_of_key(key: TensorKey) -> tuple[int, int, str, str]:
    return key.rank, key.iteration, key.op_name, key.argument


def _execution_order(key: TensorKey) -> tuple[int, bool, int, int, str, int]:
    when = key.rank, not key.constant, key.iteration, key.timestamp_us
    return *when, key.side.value, key.slot
