"""Values that a walk of a tree returns: tensors, tables of statistics and their rows, and the tree
as a whole. Pure: no disk.

The tensors of a tree are stored in columns, because one object for each would take ten times the
memory. What differs from tensor to tensor is a number in an array. What repeats, in every
iteration and on every rank, is a tuple that tensors share: the folder, the operator, and the
part of the tensor in it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from rankdump._codec.file_codec import select_codec
from rankdump._core.manifest import Manifest, ManifestRecord, RetiredIteration
from rankdump._core.record import TensorKey
from rankdump._core.statistics import STATISTIC_TITLES
from rankdump._layout.file_name import FileName

NULL_TEXT = "null"
"""Text that MindSpore up to 2.2 writes for a tensor without finite elements."""
_NONFINITE_COUNT_ITEMS = ("nan count", "negative inf count", "positive inf count")
_DIGEST_BYTES = 16
_MAX_COLUMN_NUMBER = (1 << 64) - 1
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class Described:
    """Description of one tensor in the header of a bin file."""

    op_name: str
    """Full scope name, raw."""
    dtype: str
    shape: tuple[int, ...]
    """As it lay on the device."""
    tensor_format: str
    """Of that shape."""
    original_shape: tuple[int, ...]
    """In the format that the operator itself speaks; empty where the header does not say it."""
    data_bytes: int
    groups: int = 0
    """Of a grouped convolution."""
    c0: int = 0
    """Elements of a block of the format, where its number says it."""


class Entry(NamedTuple):
    """One tensor: a file, or a member of a bin file."""

    root: Path
    relative: str
    """Path of the file below the root, with `/`."""
    key: TensorKey
    """As the file's name says it; `op_name` below is the raw one where it is known.

    The rank is the device's number where no rank folder and no manifest says better.
    """
    stored_bytes: int
    """Size of the file, or the share of a member in it."""
    record: ManifestRecord | None = None
    """Record in the manifest; None for a file that no manifest names."""
    member: str = ""
    """Which tensor of a bin file, `input.0`; empty where the file is the tensor."""
    described: Described | None = None
    """Description in the header; None where a manifest made reading the header unnecessary."""

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
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest or the file itself knows it."""
        if self.record is not None:
            return self.record.op_name
        raw = self.described.op_name if self.described is not None else ""
        return raw or self.key.op_name

    @property
    def bytes_in(self) -> int | None:
        """Bytes of the elements as the framework held them; None where only the file knows."""
        if self.record is not None:
            return self.record.bytes_in
        return self.described.data_bytes if self.described is not None else None

    @property
    def taken_bytes(self) -> int:
        """Room the file takes; by the manifests, a link to identical bytes takes none."""
        return self.record.bytes_stored if self.record else self.stored_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """One `statistic.csv`, the table of one operator, or the info file of a dump of APIs."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    rank: int
    net_name: str
    graph: int
    iteration: int
    """0 for the table of a graph's constants, which belong to none."""
    constant: bool = False
    dated: bool = True
    """False when the folder has no iteration; manifests may state it for each row."""
    operator: FileName | None = None
    """The operator whose table it is; None for those of a whole folder."""
    info: bool = False
    """The info file of a dump of APIs: rows of every iteration, and of tensors with a file."""

    @property
    def stored_bytes(self) -> int:
        """Size of the file; 0 when it is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def when(self) -> int | None:
        """Iteration of its rows; None for constants."""
        return None if self.constant else self.iteration

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.root / self.relative

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the root."""
        return self.relative.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Tree:
    """Result of a walk."""

    root: Path
    ranks: tuple[int, ...]
    """Ranks that have a folder, with or without tensors; devices where there are no ranks."""
    entries: Entries
    """Sorted by rank, iteration and time; the constants of a rank stand first."""
    manifests: tuple[Manifest, ...]
    """Manifests without their records, which are in the entries."""
    tables: tuple[Table, ...] = ()
    """Sorted by rank, iteration and time; those of constants stand first."""
    foreign: int = 0
    """Files among the tensors that are none; half-written hidden ones are not counted."""
    problems: tuple[str, ...] = ()
    """Sentences about files that could not be read, or that a manifest names and are missing."""
    by_device: bool = False
    """The ranks are the numbers of devices: no folder of a rank is there."""
    retired: frozenset[RetiredIteration] = frozenset()
    """Retired iterations of ranks that have a folder."""
    whole: bool = True
    """False when only the selected ranks, graphs or iterations were read."""
    job_id: str = ""
    """Of this job only, of several; what its manifests do not name is left out of tables too."""

    @property
    def gone(self) -> set[tuple[int, int]]:
        """Ranks with iterations that were removed, and did not come again."""
        there = {(m.status.rank, m.status.iteration) for m in self.manifests}
        return {(each.rank, each.iteration) for each in self.retired} - there

    @property
    def unit(self) -> str:
        """Noun for the numbers in `ranks`."""
        return "device" if self.by_device else "rank"


@dataclass(frozen=True, slots=True)
class Figures:
    """One row."""

    key: TensorKey
    """As the table spells it; `op_name` below is the raw one where it is known."""
    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    values: Mapping[str, str]
    """Text of each statistic by the title of its column."""
    relative: str
    """Path of the table below the root, with `/`."""
    record: ManifestRecord | None = None
    """Record in the manifest; None for a row that no manifest names."""

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest knows it."""
        return self.record.op_name if self.record else self.key.op_name

    def number(self, item: str) -> float | None:
        """Return a statistic by its name in `statistic_category`; None when the row has none."""
        text = self.values.get(STATISTIC_TITLES[item], NULL_TEXT)
        try:
            return None if text == NULL_TEXT else float(text)
        except ValueError:
            return None

    @property
    def finite(self) -> bool | None:
        """Whether every element is; None when the columns of the table cannot tell.

        The counts tell, and so do both extremes: a NaN makes them NaN.
        """
        counts = [self.number(item) for item in _NONFINITE_COUNT_ITEMS]
        if None not in counts:
            return not any(counts)
        extremes = [self.number(item) for item in ("max", "min")]
        known = [number for number in extremes if number is not None]
        if not all(math.isfinite(number) for number in known):
            return False
        return True if len(known) == len(extremes) else None


class PlaceInTime(NamedTuple):
    """Rank and iteration of a tensor; sorts in execution order."""

    rank: int
    dated: bool
    """False for constants."""
    iteration: int


def place_in_time_of(key: TensorKey) -> PlaceInTime:
    """Return the place of a tensor."""
    return PlaceInTime(key.rank, not key.constant, key.iteration)


class _SharedValues(dict[Hashable, int]):
    """Values that many rows share, each with its number."""

    def __missing__(self, value: Hashable) -> int:
        number = self[value] = len(self)
        return number


class _EntryColumns:
    """The rows, in the order in which they came."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places: list[Any] = []
        """What rows share, by the numbers in the columns of the same names."""
        self.operators: list[Any] = []
        self.parts: list[Any] = []
        self.place, self.operator, self.part = array("I"), array("I"), array("I")
        self.timestamps_us, self.stored_bytes = array("Q"), array("Q")
        self.bytes_in, self.bytes_stored = array("Q"), array("Q")
        self.digests = bytearray()
        self.unpacked_entries: dict[int, Entry] = {}
        """Those that the columns cannot hold as they are, by their rows."""

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Take all tensors that there are."""
        places, operators, parts = _SharedValues(), _SharedValues(), _SharedValues()
        for entry in entries:
            key, record = entry.key, entry.record
            folder, _, name = entry.relative.rpartition("/")
            # The time in a name is all that differs from one iteration to the next.
            before, found, after = name.partition(str(key.timestamp_us))
            raw, said, sizes, digest = None, None, (0, 0), b""
            if record is not None:
                digest = _pack_digest(record.digest)
                raw, sizes = record[2:4], record[7:9]
                said = *record[4:7], record.member, bool(digest)
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
            # By place: names would take as long as all the rest.
            self.place.append(places[(folder, *key[:4], key.constant)])
            self.operator.append(operators[(before, *key[5:7], *key[9:11], raw)])
            shared = after if found else None, *key[7:9], key.tensor_format, *key[13:]
            self.part.append(parts[(*shared, entry.member, entry.described, said)])
            self.timestamps_us.append(numbers[0])
            self.stored_bytes.append(numbers[1])
            self.bytes_in.append(numbers[2])
            self.bytes_stored.append(numbers[3])
            self.digests += digest or bytes(_DIGEST_BYTES)
        self.places, self.operators, self.parts = list(places), list(operators), list(parts)

    def entry(self, row: int) -> Entry:
        """Return one tensor as it was."""
        if row in self.unpacked_entries:
            return self.unpacked_entries[row]
        folder, rank, net_name, graph, iteration, constant = self.places[self.place[row]]
        before, op_type, op_name, task, stream, raw = self.operators[self.operator[row]]
        part = self.parts[self.part[row]]
        after, side, slot, laid, element, argument, member, described, said = part
        stamp = self.timestamps_us[row]
        name = before if after is None else f"{before}{stamp}{after}"
        relative = f"{folder}/{name}" if folder else name
        key = TensorKey(
            *(rank, net_name, graph, iteration, stamp, op_type, op_name, side, slot),
            *(task, stream, laid, constant, element, argument),
        )
        record = None
        if said is not None:
            spelt, dtype, shape, part_of, digested = said
            start = row * _DIGEST_BYTES
            digest = self.digests[start : start + _DIGEST_BYTES].hex() if digested else ""
            record = ManifestRecord(
                *(relative, stamp, raw[0], raw[1], spelt, dtype, shape),
                *(self.bytes_in[row], self.bytes_stored[row], digest, part_of),
            )
        return Entry(self.root, relative, key, self.stored_bytes[row], record, member, described)

    def places_in_time(self) -> list[PlaceInTime]:
        """Return what each of the places is."""
        return [
            PlaceInTime(rank, not constant, iteration)
            for _, rank, _, _, iteration, constant in self.places
        ]


class Entries(Sequence[Entry]):
    """Tensors by rank, iteration and time, each an object while somebody looks at it."""

    def __init__(self, columns: _EntryColumns, rows: npt.NDArray[np.uint32]) -> None:
        self._columns, self._rows = columns, rows

    @staticmethod
    def of(root: Path, batches: Iterable[Iterable[Entry]]) -> Entries:
        """Return the tensors of batches, each of which is in order."""
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
        """Yield the rows, as numbers of Python's some at a time."""
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            yield from self._rows[start : start + _ROWS_AT_A_TIME].tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        others = cast("Sequence[object]", other)
        return len(self) == len(others) and all(map(eq, self, others))

    def where(self, keeps: Callable[[Entry], bool]) -> Entries:
        """Return those that are kept."""
        kept = array("I", (row for row in self._numbers() if keeps(self._columns.entry(row))))
        return Entries(self._columns, _column_array(kept))

    def by_place(self) -> dict[PlaceInTime, Entries]:
        """Return the tensors of each place, in order."""
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
        """Folders of the files, relative to the root."""
        there = np.unique(_column_array(self._columns.place)[self._rows]).tolist()
        return {self._columns.places[place][0] for place in there}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files, of all tensors here."""
        return int(np.frombuffer(self._columns.stored_bytes, np.uint64)[self._rows].sum())


def _column_array(column: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(column, np.uint32)


def _is_restorable(entry: Entry, record: ManifestRecord, digest: bytes) -> bool:
    """Return whether the columns give a tensor back with its record."""
    return (
        record.path == entry.relative
        and record.timestamp_us == entry.key.timestamp_us
        and bool(digest) == bool(record.digest)
    )


def _pack_digest(digest: str) -> bytes:
    """Return a digest in half of its characters; nothing for one of another form."""
    if len(digest) != 2 * _DIGEST_BYTES or digest.lower() != digest:
        return b""
    try:
        packed = bytes.fromhex(digest)
    except ValueError:
        return b""
    return packed if len(packed) == _DIGEST_BYTES else b""
