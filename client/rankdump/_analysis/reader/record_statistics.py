"""Statistics for the records of manifests, from the tables of every layout: `statistic.csv` of a
folder, the table of an operator, and the info file of an API dump. Needs pyarrow.

A table that grows over all iterations is read backwards from its end, as far as the records go, so
that a program that writes rows window by window does not read the whole table each time. The info
file of a rank has a line for each tensor of all iterations, without a time stamp. A line belongs to
a record with its step and name; if there are several with the same name, the last lines belong to
the records, in the order of time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.manifest_columns import (
    ManifestColumns,
    find_constants,
    read_manifest_columns,
)
from rankdump._analysis.reader.statistic_columns import (
    STATISTIC_SCHEMA,
    StatisticTableText,
    make_statistic_table,
    parse_statistic_texts,
    read_statistic_text,
)
from rankdump._analysis.reader.statistic_tables import (
    INFO_ITEMS,
    MAX_HEADER_BYTES,
    open_table,
    read_blocks_backward,
    read_table,
    spell_info_values,
    spell_title,
)
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._codec.file_codec import select_codec
from rankdump._core.manifest import Manifest, parse_manifest_name
from rankdump._core.plan import plan_from_json
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout import api_tree
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_info_line
from rankdump._layout.api_tree import (
    ApiPlace,
    make_api_rank_folder,
    parse_info_file_name,
    parse_place,
)
from rankdump._layout.dump_folders import (
    RANK_FOLDER_PATTERN,
    ROOT_FOLDER,
    DumpFolder,
    NameScheme,
    enter_folder,
)
from rankdump._layout.file_name import FileKind, FileName, LongFileNames, parse_file_name
from rankdump._layout.statistic_tables import STATISTIC_TABLE_NAME, parse_operator_table
from rankdump._layout.tree_layouts import LAYOUTS, format_folder_owner
from rankdump._layout.tree_paths import (
    CONSTANT_FOLDER,
    MANIFEST_FOLDER,
    MAPPING_FILE,
    make_rank_folder,
)
from rankdump.errors import CorruptedError, ProtocolError

_INT64_MAX = (1 << 63) - 1
_StatisticRow: TypeAlias = "tuple[tuple[int, int, str, int], dict[str, str]]"
"""A row in the form that `make_statistic_table` takes."""


class RecordPlaces:
    """Iterations of ranks that some records belong to, numbered."""

    def __init__(self, read: ManifestColumns) -> None:
        statuses = [each.status for each in read.manifests]
        listed = dict.fromkeys((each.rank, each.iteration) for each in statuses)
        self.numbers = {place: number for number, place in enumerate(listed)}
        of_manifest = [self.numbers[each.rank, each.iteration] for each in statuses]
        self.of_records = np.array(of_manifest, np.int64)[read.manifest_of]
        """Number of the place of each record."""
        self._ranks = np.array([each.rank for each in statuses], np.int64)[read.manifest_of]
        self._stamps = read.records.column("timestamp_us").to_numpy()
        self._known: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def find_stamps(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the time stamps of a rank's records, sorted."""
        return self._find_rank(rank)[0]

    def find_numbers(self, rank: int, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each time stamp the number of the place of the rank's record with it; -1 if
        there is none.
        """
        known, places = self._find_rank(rank)
        if not len(known):
            return np.full(len(stamps), -1)
        at = np.minimum(np.searchsorted(known, stamps), len(known) - 1)
        return np.where(known[at] == stamps, places[at], -1)

    def _find_rank(self, rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if rank not in self._known:
            own = np.flatnonzero(self._ranks == rank)
            own = own[np.argsort(self._stamps[own], kind="stable")]
            self._known[rank] = self._stamps[own], self.of_records[own]
        return self._known[rank]


def read_record_statistics(
    access: TreeAccess, read: ManifestColumns, places: RecordPlaces, problems: list[str]
) -> pa.Table:
    """Return rows of STATISTIC_SCHEMA for records; add a problem for each invalid table."""
    names = [RANK_FOLDER_PATTERN.fullmatch(path.partition("/")[0]) for path in read.paths]
    of_api = np.array([name is not None and not name[1] for name in names])
    others = [each for each, is_api in zip(read.manifests, of_api, strict=True) if not is_api]
    reading = _TableReader(access, places, problems)
    if others:
        has_constants = bool(pc.any(find_constants(read.records)).as_py())
        for place in _find_table_places(access, others, has_constants=has_constants):
            reading.read(place)
    tables = reading.finish()
    if of_api.any():
        rows = _read_info_statistics(access, read, np.flatnonzero(of_api), problems)
        of_records = places.of_records.tolist()
        tables.append(
            make_statistic_table(
                ((of_records[record], stamp_us, side, slot), values)
                for (record, stamp_us, side, slot), values in rows
            )
        )
    return pa.concat_tables(tables) if tables else STATISTIC_SCHEMA.empty_table()


class _FoundTable(NamedTuple):
    """An operator's table, with the number of the place that its rows belong to."""

    folder: str
    name: str
    operator: FileName
    number: int


class _TableReader:
    """Reads the tables of folders: those of single iterations together, a growing table from its
    end.
    """

    def __init__(self, access: TreeAccess, places: RecordPlaces, problems: list[str]) -> None:
        self._access, self._places, self._problems = access, places, problems
        self._texts: list[StatisticTableText] = []
        self._grown: list[Any] = []
        self._operators: list[_FoundTable] = []

    def read(self, place: TablePlace) -> None:
        """Add the tables of a folder."""
        number = -1
        if place.iteration is not None:
            number = self._places.numbers[place.rank, place.iteration]
        for name in place.names:
            if STATISTIC_TABLE_NAME.fullmatch(name.removesuffix(select_codec(name).suffix)):
                with noted_errors(self._problems):
                    self._read_table(place, name, number)
        self._operators += self._find_operators(place, number)

    def finish(self) -> list[pa.Table]:
        """Return the rows of all tables that were added."""
        found = [*self._grown, parse_statistic_texts(self._texts, self._problems)]
        if self._operators:
            found.append(make_statistic_table(self._read_operators()))
        return found

    def _read_table(self, place: TablePlace, name: str, number: int) -> None:
        if number >= 0:
            self._texts.append(read_statistic_text(self._access, place.folder, name, number))
            return
        wanted = self._places.find_stamps(place.rank)
        if not len(wanted):
            return
        blocks: list[Any] = []
        for text in _iter_texts_backward(self._access, place.folder, name):
            rows = parse_statistic_texts([text], self._problems)
            stamps = rows.column("timestamp_us").to_numpy()
            numbers = self._places.find_numbers(place.rank, stamps)
            rows = rows.set_column(0, STATISTIC_SCHEMA.names[0], pa.array(numbers))
            blocks.append(rows.take(pa.array(np.flatnonzero(numbers >= 0))))
            # Iterations are written one after the other, so rows older than all records belong to
            # earlier iterations.
            if len(stamps) and stamps.max() < wanted[0]:
                break
        self._grown += reversed(blocks)

    def _find_operators(self, place: TablePlace, number: int) -> Iterator[_FoundTable]:
        """Yield the tables of operators that have the time stamp of a record."""
        names = _read_names(self._access, place)
        listed: list[tuple[str, FileName]] = []
        for name in place.names:
            file = parse_file_name(names.get_full_name(name) if name[:1].isdecimal() else name)
            if file is not None and file.kind is FileKind.TABLE:
                listed.append((name, file))
        if not listed:
            return
        stamps = np.array([min(file.timestamp_us, _INT64_MAX) for _, file in listed], np.int64)
        found = self._places.find_numbers(place.rank, stamps).tolist()
        for (name, file), known in zip(listed, found, strict=True):
            if known >= 0 and number in (known, -1):
                yield _FoundTable(place.folder, name, file, known)

    def _read_operators(self) -> Iterator[_StatisticRow]:
        for folder, name, operator, number in self._operators:
            path = f"{self._access.root}/{folder}/{name}"
            with noted_errors(self._problems):
                text = read_table(self._access, folder, name).decode("utf-8", "surrogateescape")
                whole = text.replace("\r\n", "\n").rpartition("\n")[0]
                for row in parse_operator_table(whole, operator, file=path):
                    values = {spell_title(title): value for title, value in row.values}
                    yield (number, row.timestamp_us, row.side.value, row.slot), values


def _read_names(access: TreeAccess, place: TablePlace) -> LongFileNames:
    """Return the full names of those files in a folder whose names were replaced by numbers."""
    if any(name[:1].isdecimal() for name in place.names):
        with suppress(OSError):
            return LongFileNames.parse(access.read(place.folder, MAPPING_FILE))
    return LongFileNames()


def _iter_texts_backward(
    access: TreeAccess, folder: str, name: str
) -> Iterator[StatisticTableText]:
    """Yield the rows of a table in blocks, from its end on, each with the header."""
    with open_table(access, folder, name) as file:
        header = file.readline(MAX_HEADER_BYTES)
        for block in read_blocks_backward(file, start=len(header)):
            where = f"{access.root}/{folder}/{name}, from byte {block.start}"
            lines = block.lines.replace(b"\r\n", b"\n")
            yield StatisticTableText(-1, where, header.rstrip(b"\r\n"), lines)


class TablePlace(NamedTuple):
    """A folder with tables of one rank.

    rank_{rank}/{net}/{graph}/{iteration}|constants/                 MindSpore's
    [{step}/]{YYYYmmddHHMMSS}/{device}/[{model}/{id}/{iteration}/]   CANN's

    A CANN folder belongs to the rank that an agent has recorded for its time and device. If there
    is no such record, as in a copy without links, it belongs to the ranks whose manifests name the
    device.
    """

    folder: str
    names: tuple[str, ...]
    """Names of the tables, and of files whose long names were replaced by numbers."""
    rank: int
    iteration: int | None
    """Iteration; None if the tables have several iterations."""


def _find_table_places(
    access: TreeAccess, manifests: Sequence[Manifest], *, has_constants: bool
) -> list[TablePlace]:
    """Return the folders of MindSpore's and CANN's layouts that have tables for these manifests;
    only folders of their iterations are entered.

    The tables of a graph's constants are listed for each iteration whose manifest may name
    constants.
    """
    found = [*_find_in_ranks(access, manifests, has_constants)]
    found += _DeviceFolders(access, manifests).find_places()
    return [place for place in found if place.names]


def _find_in_ranks(
    access: TreeAccess, manifests: Sequence[Manifest], has_constants: bool
) -> Iterator[TablePlace]:
    graphs: dict[int, list[str]] = {}
    for rank, iteration in dict.fromkeys(
        (each.status.rank, each.status.iteration) for each in manifests
    ):
        if rank not in graphs:
            graphs[rank] = _list_graph_folders(access, rank)
        for graph in graphs[rank]:
            for name in (str(iteration), *([CONSTANT_FOLDER] if has_constants else [])):
                folder = f"{graph}/{name}"
                yield TablePlace(folder, _list_tables(access, folder), rank, iteration)


def _list_graph_folders(access: TreeAccess, rank: int) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        own = make_rank_folder(rank)
        models = [name for name, is_folder in access.listing(own).items() if is_folder]
        for model in models:
            graphs = access.listing(f"{own}/{model}").items()
            found += [f"{own}/{model}/{name}" for name, is_folder in graphs if is_folder]
    return [each for each in found if each.rpartition("/")[2][:1].isdecimal()]


def _list_tables(access: TreeAccess, folder: str) -> tuple[str, ...]:
    with suppress(OSError):
        return _select_tables(access.listing(folder))
    return ()


def _select_tables(listing: dict[str, bool]) -> tuple[str, ...]:
    # The number that CANN uses in place of a long name has no suffix.
    return tuple(
        sorted(
            name
            for name, is_folder in listing.items()
            if not is_folder and (name.isdecimal() or (".csv" in name and name != MAPPING_FILE))
        )
    )


class _DeviceFolders:
    """Folders of the devices that manifests name, in CANN's trees."""

    def __init__(self, access: TreeAccess, manifests: Sequence[Manifest]) -> None:
        self._access = access
        self._iterations = {each.status.iteration for each in manifests}
        self._owners: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """For each device, the ranks by the key that an agent records for each job."""
        self._places = {(each.status.rank, each.status.iteration) for each in manifests}
        for each in manifests:
            status = each.status
            owner = format_folder_owner(status.rank, status.job_id)
            self._owners[each.device][owner] = status.rank

    def find_places(self) -> Iterator[TablePlace]:
        """Yield the folders, each once for every rank that it may belong to."""
        with suppress(OSError):
            listing = self._access.listing("")
            # Other folders are ignored, because a root may contain anything.
            names = [name for name, is_folder in listing.items() if is_folder and name.isdecimal()]
            yield from self._enter_each(ROOT_FOLDER, "", names, ())

    def _enter_each(
        self, folder: DumpFolder, path: str, names: Sequence[str], ranks: Sequence[int]
    ) -> Iterator[TablePlace]:
        for name in names:
            below = enter_folder(folder, name)
            if below is not None and self._is_wanted(below):
                yield from self._enter(below, f"{path}/{name}".lstrip("/"), ranks)

    def _enter(self, folder: DumpFolder, path: str, ranks: Sequence[int]) -> Iterator[TablePlace]:
        is_device = folder.device and folder.names is NameScheme.CANN
        if is_device and folder.base == path:
            ranks = self._find_ranks(path, folder.rank)
            if not ranks:
                return
        with suppress(OSError):
            listing = self._access.listing(path)
            tables = _select_tables(listing) if folder.names is NameScheme.CANN else ()
            for rank in ranks if tables else ():
                if folder.iteration is None or (rank, folder.iteration) in self._places:
                    yield TablePlace(path, tables, rank, folder.iteration)
            below = [name for name, is_folder in listing.items() if is_folder]
            yield from self._enter_each(folder, path, below, ranks)

    def _is_wanted(self, folder: DumpFolder) -> bool:
        for number in (folder.step, folder.iteration):
            if number is not None and number not in self._iterations:
                return False
        return folder.names is not NameScheme.CANN or folder.rank in self._owners

    def _find_ranks(self, base: str, device: int) -> Sequence[int]:
        """Return the ranks that a folder may belong to, given its path."""
        time, owners = base.split("/")[-2], self._owners[device]
        try:
            owner = self._access.read_link(STATE_FOLDER, f"{time}.{device}")
        except OSError:
            return [*dict.fromkeys(owners.values())]
        return [owners[owner]] if owner in owners else []


_OTHER = -1
"""Stands for a record of another manifest."""
_LINE_START = re.compile(rb'\["(?:[^"\\]|\\.)*", ([0-9]{1,19}), ')


def _read_info_statistics(
    access: TreeAccess,
    read: ManifestColumns,
    manifests: npt.NDArray[np.int64],
    problems: list[str],
) -> Iterator[_StatisticRow]:
    """Yield number, time stamp, side and slot of the records of the given manifests, with their
    statistics by title.

    Adds a problem for a file that is damaged where these records are.
    """
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for number in manifests.tolist():
        by_rank[read.manifests[number].status.rank].append(number)
    for rank, numbers in by_rank.items():
        folder, names = make_api_rank_folder(rank), list[str]()
        with suppress(OSError):
            names = sorted(filter(parse_info_file_name, access.listing(folder)))
        records = _RecordLines(read, numbers, _read_others(access, folder, read, numbers))
        for name in names:
            path = f"{access.root}/{folder}/{name}"
            with noted_errors(problems), named_errors(path), access.open(folder, name) as file:
                for block in read_blocks_backward(file):
                    records.add(block.lines, f"{path}, from byte {block.start}")
                    if not records.is_waiting:
                        break
        problems += records.problems[:1]
        yield from records.finish()


class _RecordLines:
    """Records of one rank, with their lines as far as these were found."""

    def __init__(
        self, read: ManifestColumns, manifests: list[int], others: ManifestColumns
    ) -> None:
        """`others` contains further manifests of the same iterations, whose records have lines,
        too.
        """
        self.problems: list[str] = []
        self._places: dict[int, ApiPlace] = {}
        self._given: dict[int, frozenset[str]] = {}
        """Statistics that the line of a record has, although they may be NaN."""
        self._lines: dict[int, InfoLine] = {}
        self._stamps: list[int] = read.records.column("timestamp_us").to_pylist()
        named: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for manifest, record, place, name in _iter_records(read, manifests):
            named[manifest.status.iteration, name].append((self._stamps[record], record))
            self._places[record] = place
            self._given[record] = _find_items(manifest.session.plan if manifest.session else "")
        stamps: list[int] = others.records.column("timestamp_us").to_pylist()
        for manifest, record, _, name in _iter_records(others, range(len(others.paths))):
            if (manifest.status.iteration, name) in named:
                named[manifest.status.iteration, name].append((stamps[record], _OTHER))
        self._waiting = {key: sorted(records) for key, records in named.items()}
        """Time stamps and records that have no line yet, by iteration and name, the latest at the
        end.
        """
        self._steps = {iteration for iteration, _ in named}

    @property
    def is_waiting(self) -> bool:
        """Whether any record has no line yet."""
        return bool(self._waiting)

    def add(self, lines: bytes, where: str) -> None:
        """Add lines; all later lines of the file must have been added before."""
        for text in reversed(lines.split(b"\n")):
            found = _LINE_START.match(text)
            if not text.strip() or (found is not None and int(found[1]) not in self._steps):
                continue
            try:
                line = parse_info_line(text.decode("utf-8", "backslashreplace"), file=where)
            except CorruptedError as error:
                self.problems.append(str(error))
                continue
            records = self._waiting.get((line.step, line.name))
            if records is not None:
                _, record = records.pop()
                if record != _OTHER:
                    self._lines[record] = line
                if not records:
                    del self._waiting[line.step, line.name]

    def finish(self) -> Iterator[_StatisticRow]:
        """Yield the statistics of the records whose lines were found."""
        # If no plan says what is recorded, every statistic that any line has counts as recorded.
        seen = {item for line in self._lines.values() for item in line.statistics}
        for record, line in self._lines.items():
            place = self._places[record]
            values = spell_info_values(line, self._given[record] | seen)
            slot = api_tree.get_slot(place)
            yield (record, self._stamps[record], place.side.value, slot), values


def _read_others(
    access: TreeAccess, folder: str, read: ManifestColumns, manifests: list[int]
) -> ManifestColumns:
    """Return other manifests of the same iterations, such as those of another attempt."""
    iterations = {read.manifests[number].status.iteration for number in manifests}
    own = {read.paths[number] for number in manifests}
    found: list[str] = []
    with suppress(OSError):
        for name in access.listing(f"{folder}/{MANIFEST_FOLDER}"):
            path, iteration = f"{folder}/{MANIFEST_FOLDER}/{name}", parse_manifest_name(name)
            if iteration in iterations and path not in own:
                found.append(path)
    return read_manifest_columns(access, found, [])


def _iter_records(
    read: ManifestColumns, manifests: Iterable[int]
) -> Iterator[tuple[Manifest, int, ApiPlace, str]]:
    """Yield manifest, number, place and name of each tensor of an API call in some manifests."""
    starts = np.searchsorted(read.manifest_of, np.arange(len(read.manifests) + 1)).tolist()
    for number in manifests:
        start, end = starts[number], starts[number + 1]
        rows = read.records.slice(start, end - start)
        op_names, arguments = (rows.column(each).to_pylist() for each in ("op_name", "argument"))
        for at, (op_name, argument) in enumerate(zip(op_names, arguments, strict=True), start):
            place = parse_place(argument)
            if place is not None:
                name = api_tree.spell_api_tensor_name(op_name, place)
                yield read.manifests[number], at, place, name


@lru_cache(maxsize=64)
def _find_items(plan: str) -> frozenset[str]:
    """Return the statistics that the info file of a plan has; none if the plan cannot be read."""
    with suppress(ProtocolError, KeyError):
        known = plan_from_json(plan.encode())
        files = LAYOUTS[known.output.layout].api_files
        items = INFO_ITEMS if files is not None and files.extended else SUMMARY_ITEMS
        return frozenset(known.content.statistics).intersection(items)
    return frozenset()
