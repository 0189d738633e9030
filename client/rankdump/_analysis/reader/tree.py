"""Values that reading a tree results in: tensors, tables of statistics and their rows, and the
whole tree. Pure: no disk.

The tensors of a tree are stored in columns, because one object for each would take ten times the
memory. Fields that differ between tensors are numbers in arrays. Fields that repeat in every
iteration and on every rank are tuples that tensors share: the folder, the operator, and the part of
the operator.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.query import Query
from rankdump._codec.file_codec import select_codec
from rankdump._core.manifest import Manifest, ManifestRecord, RetiredIteration
from rankdump._core.record import TensorKey
from rankdump._core.statistics import STATISTIC_TITLES
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._core.tree_session import SessionPeriods, TreeSession
from rankdump._layout.file_name import FileName
from rankdump._layout.foreign_calls import FOREIGN_TITLES, L1NORM_ITEM
from rankdump._layout.tree_paths import MANIFEST_FOLDER

NULL_TEXT = "null"
"""Text that MindSpore up to 2.2 writes for a tensor without finite elements."""
NONFINITE_COUNT_ITEMS = ("nan count", "negative inf count", "positive inf count")
_DIGEST_BYTES = 16
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
_MAX_COLUMN_NUMBER = (1 << 64) - 1
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class Described:
    """Description of one tensor in the header of a bin file."""

    op_name: str
    """Full scope name of the operator, as the framework spells it."""
    dtype: str
    shape: tuple[int, ...]
    """Shape on the device."""
    tensor_format: str
    """Format of `shape`."""
    original_shape: tuple[int, ...]
    """Shape in the original format of the operator; empty if the header does not have it."""
    data_bytes: int
    groups: int = 0
    """Number of groups in a grouped convolution."""
    c0: int = 0
    """Number of elements in a block of the format, if the number of the format tells it."""


class Entry(NamedTuple):
    """One tensor: a file, or a member of a bin file."""

    root: Path
    relative: str
    """Path of the file below the root, with `/`; for a tensor that is the same in the baseline, the
    path that its file would have.
    """
    key: TensorKey
    """Key from the file name; `op_name` below is the raw name if it is available.

    Without a rank folder and a manifest, the rank is the number of the device.
    """
    stored_bytes: int
    """Size of the file; for a member, of its part of the file."""
    record: ManifestRecord | None = None
    """Record in the manifest, or facts from another tool; None for a file without either."""
    member: str = ""
    """Member of a bin file, such as `input.0`; empty for a file with one tensor."""
    described: Described | None = None
    """Description in the header of a bin file; None if a manifest has a record."""
    full_name: str = ""
    """Name of the operator from elsewhere in the tree (`FullNames`), if neither record nor header
    has it.
    """

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.root / self.relative

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the root."""
        return self.relative.rpartition("/")[0]

    @property
    def codec(self) -> str:
        """Name of the codec that packed the file."""
        return select_codec(self.relative).name

    @property
    def op_type(self) -> str:
        """Type of the operator; the raw type if a manifest has it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator; the raw name if the tree has it."""
        if self.record is not None:
            return self.record.op_name
        raw = self.described.op_name if self.described is not None else self.full_name
        return raw or self.key.op_name

    @property
    def bytes_in(self) -> int | None:
        """Bytes of the elements in the framework; None if only the file tells them."""
        if self.record is not None:
            return self.record.bytes_in
        return self.described.data_bytes if self.described is not None else None

    @property
    def taken_bytes(self) -> int:
        """Disk space of the tensor; 0 for a link to a file with the same bytes, according to the
        manifest.
        """
        return self.record.bytes_stored if self.record else self.stored_bytes

    @property
    def is_same_as_baseline(self) -> bool:
        """Whether the file is in the baseline of the dump."""
        return self.record is not None and bool(self.record.same_as)


@dataclass(frozen=True, slots=True)
class Table:
    """One `statistic.csv`, the table of one operator, or the info file of an API dump."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    rank: int
    net_name: str
    graph: int
    iteration: int
    """Iteration; 0 for the table of a graph's constants, which belong to no iteration."""
    constant: bool = False
    dated: bool = True
    """Whether the folder tells the iteration; if not, manifests may tell that of each row."""
    operator: FileName | None = None
    """Operator of an operator's table; None for the table of a whole folder."""
    info: bool = False
    """Whether the table is the info file of an API dump, with rows of all iterations
    and tensors.
    """
    form: str = ""
    """Name of the other tool whose calls the file describes (`FOREIGN_READERS`); else empty."""

    @property
    def stored_bytes(self) -> int:
        """Size of the file; 0 when it was removed."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def when(self) -> int | None:
        """Iteration of the table's rows; None for constants."""
        return None if self.constant else self.iteration

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.root / self.relative

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the root."""
        return self.relative.rpartition("/")[0]


@dataclass(frozen=True)  # without slots, so that frequently used properties can be cached
class Tree:
    """Result of reading a tree."""

    root: Path
    ranks: tuple[int, ...]
    """Ranks that have a folder, even an empty one; if no rank has one, the numbers of devices."""
    entries: Entries
    """Tensors sorted by rank, iteration and time; the constants of a rank come first."""
    manifests: tuple[Manifest, ...]
    """Manifests without their records, which the entries contain."""
    tables: tuple[Table, ...] = ()
    """Tables sorted by rank, iteration and time; those of constants come first."""
    foreign: int = 0
    """Number of other files in the folders of tensors, without hidden files that are
    being written.
    """
    problems: tuple[str, ...] = ()
    """Sentences about unreadable files, and about missing files that a manifest names."""
    by_device: bool = False
    """Whether `ranks` contains numbers of devices, because the tree has no rank folder."""
    retired: frozenset[RetiredIteration] = frozenset()
    """Retired iterations of ranks that have a folder."""
    queries: tuple[Query, ...] = ()
    """Ranks, graphs and iterations that were read; only rows of these are read from the tables."""
    job_id: str = ""
    """Job of the tensors, if they are restricted to one of several jobs; else empty."""
    sessions: tuple[TreeSession, ...] = ()
    """All sessions of the ranks, in the order in which each rank had them; empty in older trees."""
    attempt: int | None = None
    """Attempt of the tensors, if they are restricted to one; else None."""
    tool: str = ""
    """Name of the other tool that wrote the dump; such a dump has no manifests. Empty for our
    trees.
    """

    @cached_property
    def periods(self) -> SessionPeriods:
        """The session of each rank at each time."""
        return SessionPeriods(each.status for each in self.sessions)

    @cached_property
    def is_recorded(self) -> bool:
        """Whether rankdump wrote the tree, or imported it: it has, or will have, manifests."""
        if self.manifests or self.sessions or (self.root / STATE_FOLDER).is_dir():
            return True
        return next(self.root.glob(f"*/{MANIFEST_FOLDER}"), None) is not None

    @property
    def whole(self) -> bool:
        """Whether all ranks, graphs and iterations were read."""
        return all(query.empty for query in self.queries)

    @property
    def own_sessions(self) -> tuple[TreeSession, ...]:
        """The sessions of the tree's job and attempt, if it is restricted to them; else all."""
        return tuple(
            each
            for each in self.sessions
            if self.job_id in ("", each.status.job_id)
            and self.attempt in (None, each.status.attempt)
        )

    @cached_property
    def jobs(self) -> tuple[str, ...]:
        """Ids of the jobs that dumped into the tree, sorted."""
        found = {each.status.job_id for each in self.manifests}
        found.update(each.status.job_id for each in self.own_sessions)
        return tuple(sorted(found))

    @cached_property
    def attempts(self) -> tuple[int, ...]:
        """Numbers of the attempts in the tree, ascending; 0 if attempts are not numbered."""
        found = {m.status.attempt for m in self.manifests}
        found.update(each.status.attempt for each in self.own_sessions)
        return tuple(sorted(found)) or (0,)

    def find_attempt(self, key: TensorKey) -> int:
        """Return the attempt that a tensor belongs to."""
        if self.attempt is not None:
            return self.attempt
        return self.periods.find_attempt(key.rank, key.timestamp_us)

    @cached_property
    def gone(self) -> frozenset[tuple[int, int]]:
        """Ranks and iterations that were removed and not dumped again."""
        there = {(m.status.rank, m.status.iteration) for m in self.manifests}
        return frozenset((each.rank, each.iteration) for each in self.retired) - there

    @property
    def unit(self) -> str:
        """Noun for the numbers in `ranks`: rank or device."""
        return "device" if self.by_device else "rank"


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of a table of statistics."""

    key: TensorKey
    """Key as the table spells it; `op_name` below is the raw name if it is available."""
    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    values: Mapping[str, str]
    """Text of each statistic, by the title of its column."""
    relative: str
    """Path of the table below the root, with `/`."""
    record: ManifestRecord | None = None
    """Record in the manifest, or facts from another tool; None for a row without either."""
    full_name: str = ""
    """Name of the operator from elsewhere in the tree (`FullNames`), if there is no record."""

    @property
    def op_type(self) -> str:
        """Type of the operator; the raw type if a manifest has it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator; the raw name if the tree has it."""
        return self.record.op_name if self.record else self.full_name or self.key.op_name

    def number(self, item: str) -> float | None:
        """Return a statistic by its name in `statistic_category`; None if the row does
        not have it.
        """
        text = self.values.get(FOREIGN_TITLES.get(item) or STATISTIC_TITLES[item], NULL_TEXT)
        try:
            return None if text == NULL_TEXT else float(text)
        except ValueError:
            return None

    @property
    def finite(self) -> bool | None:
        """Whether every element is finite; None if the columns of the table do not show it."""
        return are_statistics_finite(self.number)


def are_statistics_finite(get_number: Callable[[str], float | None]) -> bool | None:
    """Return whether statistics show that a tensor is finite; None if they do not decide it.

    The counts of NaN and infinities decide it, or both extremes, which are NaN if any element is,
    or a sum of moduli. `get_number` returns a statistic by its name in `statistic_category`, or
    None.
    """
    counts = [get_number(item) for item in NONFINITE_COUNT_ITEMS]
    if None not in counts:
        return not any(counts)
    extremes = [number for item in ("max", "min") if (number := get_number(item)) is not None]
    if not all(map(math.isfinite, extremes)):
        return False
    if len(extremes) == 2:
        return True
    l1norm = get_number(L1NORM_ITEM)
    return None if l1norm is None else math.isfinite(l1norm)


class PlaceInTime(NamedTuple):
    """Rank and iteration of a tensor; sorts in execution order."""

    rank: int
    dated: bool
    """Whether the tensor belongs to an iteration; False for constants."""
    iteration: int


def place_in_time_of(key: TensorKey) -> PlaceInTime:
    """Return the rank and iteration of a tensor."""
    return PlaceInTime(key.rank, not key.constant, key.iteration)


def execution_order_of(key: TensorKey) -> tuple[int, bool, int, int, str, int]:
    """Return the sort key of execution order, in which the inputs of a call come before its
    outputs.
    """
    when = key.rank, not key.constant, key.iteration, key.timestamp_us
    return *when, key.side.value, key.slot


class _SharedValues(dict[Hashable, int]):
    """Numbers for values that many rows share."""

    def __missing__(self, value: Hashable) -> int:
        number = self[value] = len(self)
        return number


class _EntryColumns:
    """Columns of tensors, in the order in which they were added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places: list[Any] = []
        """Values that rows share; the columns `place`, `operator` and `part` contain
        their numbers.
        """
        self.operators: list[Any] = []
        self.parts: list[Any] = []
        self.place, self.operator, self.part = array("I"), array("I"), array("I")
        self.timestamps_us, self.stored_bytes = array("Q"), array("Q")
        self.bytes_in, self.bytes_stored = array("Q"), array("Q")
        self.digests = bytearray()
        self.same_as: dict[int, str] = {}
        """Path in the baseline by row; a dictionary, because either nearly all rows have one or
        hardly any.
        """
        self.unpacked_entries: dict[int, Entry] = {}
        """Tensors that the columns cannot represent, by row."""

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Add all tensors; may be called only once."""
        places, operators, parts = _SharedValues(), _SharedValues(), _SharedValues()
        for entry in entries:
            key, record = entry.key, entry.record
            folder, _, name = entry.relative.rpartition("/")
            # Only the time stamp in a file name differs between iterations.
            before, found, after = name.partition(str(key.timestamp_us))
            raw, recorded, sizes, digest = ("", entry.full_name), None, (0, 0), b""
            if record is not None:
                digest = _pack_digest(record.digest)
                raw, sizes = record[2:4], record[7:9]
                recorded = *record[4:7], bool(digest), *record[10:-1]
                if record.same_as:
                    self.same_as[len(self.place)] = record.same_as
            numbers = key.timestamp_us, entry.stored_bytes, *sizes
            if max(numbers) > _MAX_COLUMN_NUMBER or (
                record is not None and not _is_restorable(entry, record, digest)
            ):
                self.unpacked_entries[len(self.place)] = entry
                numbers = (
                    min(key.timestamp_us, _MAX_COLUMN_NUMBER),
                    min(entry.stored_bytes, _MAX_COLUMN_NUMBER),
                    0,
                    0,
                )
            # Fields are accessed by position, because access by name would take as long as
            # everything else.
            self.place.append(places[(folder, *key[:4], key.constant)])
            self.operator.append(operators[(before, *key[5:7], *key[9:11], raw)])
            shared = after if found else None, *key[7:9], key.tensor_format, *key[13:]
            self.part.append(parts[(*shared, entry.member, entry.described, recorded)])
            self.timestamps_us.append(numbers[0])
            self.stored_bytes.append(numbers[1])
            self.bytes_in.append(numbers[2])
            self.bytes_stored.append(numbers[3])
            self.digests += digest or bytes(_DIGEST_BYTES)
        self.places, self.operators, self.parts = list(places), list(operators), list(parts)

    def entry(self, row: int) -> Entry:
        """Return one tensor as it was added."""
        if row in self.unpacked_entries:
            return self.unpacked_entries[row]
        folder, rank, net_name, graph, iteration, constant = self.places[self.place[row]]
        before, op_type, op_name, task, stream, raw = self.operators[self.operator[row]]
        part = self.parts[self.part[row]]
        after, side, slot, tensor_format, element, argument, member, described, recorded = part
        stamp = self.timestamps_us[row]
        name = before if after is None else f"{before}{stamp}{after}"
        relative = f"{folder}/{name}" if folder else name
        key = TensorKey(
            *(rank, net_name, graph, iteration, stamp, op_type, op_name, side, slot),
            *(task, stream, tensor_format, constant, element, argument),
        )
        record = None
        if recorded is not None:
            recorded_argument, dtype, shape, digested, *rest = recorded
            start = row * _DIGEST_BYTES
            digest = self.digests[start : start + _DIGEST_BYTES].hex() if digested else ""
            record = ManifestRecord(
                *(relative, stamp, raw[0], raw[1], recorded_argument, dtype, shape),
                *(self.bytes_in[row], self.bytes_stored[row], digest, *rest),
                same_as=self.same_as.get(row, ""),
            )
        full_name = "" if record is not None else raw[1]
        stored = self.stored_bytes[row]
        return Entry(self.root, relative, key, stored, record, member, described, full_name)

    def list_baselines(self) -> list[str]:
        """Return the roots of the baselines that have files of tensors."""
        records = (recorded for *_, recorded in self.parts if recorded is not None)
        return sorted({recorded[-1] for recorded in records if recorded[-1]})

    def places_in_time(self) -> list[PlaceInTime]:
        """Return the rank and iteration of each of the places."""
        return [
            PlaceInTime(rank, not constant, iteration)
            for _, rank, _, _, iteration, constant in self.places
        ]


class Entries(Sequence[Entry]):
    """Sequence of tensors by rank, iteration and time; each object is created when it
    is accessed.
    """

    def __init__(self, columns: _EntryColumns, rows: npt.NDArray[np.uint32]) -> None:
        self._columns, self._rows = columns, rows

    @property
    def baselines(self) -> list[str]:
        """Roots of the baselines that have files of tensors, including tensors that are
        left out.
        """
        return self._columns.list_baselines()

    @staticmethod
    def of(root: Path, batches: Iterable[Iterable[Entry]]) -> Entries:
        """Return the tensors of sorted batches."""
        columns = _EntryColumns(root)
        columns.add_entries(chain.from_iterable(batches))
        places = columns.places_in_time()
        level = {place: at for at, place in enumerate(sorted(set(places)))}
        levels = np.array([level[place] for place in places], np.uint32)
        stamps, place = (
            np.frombuffer(columns.timestamps_us, np.uint64),
            _column_array(columns.place),
        )
        rows = np.lexsort((stamps, levels[place])).astype(np.uint32)
        return Entries(columns, rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> Entries: ...
    def __getitem__(self, at: int | slice) -> Entry | Entries:
        if isinstance(at, slice):
            return Entries(self._columns, self._rows[at])
        return self._columns.entry(int(self._rows[at]))

    def __iter__(self) -> Iterator[Entry]:
        return map(self._columns.entry, self._numbers())

    def _numbers(self) -> Iterator[int]:
        """Yield the row numbers, converted to int in blocks."""
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            yield from self._rows[start : start + _ROWS_AT_A_TIME].tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        others = cast("Sequence[object]", other)
        return len(self) == len(others) and all(map(eq, self, others))

    def where(self, keeps: Callable[[Entry], bool]) -> Entries:
        """Return the tensors for which `keeps` is true."""
        kept = array("I", (row for row in self._numbers() if keeps(self._columns.entry(row))))
        return Entries(self._columns, _column_array(kept))

    def by_place(self) -> dict[PlaceInTime, Entries]:
        """Return the tensors of each rank and iteration, in order."""
        places = self._columns.places_in_time()
        numbers = {place: at for at, place in enumerate(dict.fromkeys(places))}
        same = np.array([numbers[place] for place in places], np.uint32)
        every = same[_column_array(self._columns.place)[self._rows]]
        starts = np.flatnonzero(np.diff(every, prepend=-1)).tolist()
        named = list(numbers)
        return {
            named[every[start]]: self[start:end] for start, end in pairwise((*starts, len(every)))
        }

    @property
    def folders(self) -> set[str]:
        """Paths of the folders with the files, relative to the root."""
        return {place[0] for place in self._list_places()}

    @property
    def graphs_in_time(self) -> set[tuple[int, int, int | None]]:
        """Rank, graph and iteration of each tensor; the iteration of constants is None."""
        return {
            (rank, graph, None if constant else iteration)
            for _, rank, _, graph, iteration, constant in self._list_places()
        }

    def _list_places(self) -> list[Any]:
        there = np.unique(_column_array(self._columns.place)[self._rows]).tolist()
        return [self._columns.places[place] for place in there]

    @property
    def stored_bytes(self) -> int:
        """Total size of the files."""
        return int(np.frombuffer(self._columns.stored_bytes, np.uint64)[self._rows].sum())


def _column_array(column: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(column, np.uint32)


def _is_restorable(entry: Entry, record: ManifestRecord, digest: bytes) -> bool:
    """Return whether the columns can restore a tensor with its record."""
    return (
        record.path == entry.relative
        and record.timestamp_us == entry.key.timestamp_us
        and bool(digest) == bool(record.digest)
    )


def _pack_digest(digest: str) -> bytes:
    """Return the bytes of a hexadecimal digest; empty for a digest in another form."""
    return bytes.fromhex(digest) if _DIGEST.fullmatch(digest) else b""
