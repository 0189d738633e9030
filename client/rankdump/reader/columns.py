"""Tensors of a tree in columns: one object for each would take ten times the memory.

What differs from tensor to tensor is a number in an array. What repeats, in every iteration and
on every rank, is a tuple that they share: the place, the operator, and the tensor's part in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from rankdump.contract.key import TensorKey
from rankdump.contract.manifest import ManifestRecord
from rankdump.reader.entry import Entry

_DIGEST_BYTES = 16
_LARGEST = (1 << 64) - 1
_AT_A_TIME = 4096


class PlaceInTime(NamedTuple):
    """What a tensor belongs to; sorts as the program ran."""

    rank: int
    dated: bool
    """Without this it is a constant."""
    iteration: int


def place_of(key: TensorKey) -> PlaceInTime:
    """Return the place of a tensor."""
    return PlaceInTime(key.rank, not key.constant, key.iteration)


class _Pool(dict[Hashable, int]):
    """Values that many rows share, each with its number."""

    def __missing__(self, value: Hashable) -> int:
        number = self[value] = len(self)
        return number


class _Columns:
    """The rows, in the order in which they came."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places: list[Any] = []
        """What rows share, by the numbers in the columns of the same names."""
        self.operators: list[Any] = []
        self.parts: list[Any] = []
        self.place, self.operator, self.part = array("I"), array("I"), array("I")
        self.stamp, self.stored = array("Q"), array("Q")
        self.bytes_in, self.bytes_stored = array("Q"), array("Q")
        self.digests = bytearray()
        self.odd: dict[int, Entry] = {}
        """Those that the columns cannot hold as they are, by their rows."""

    def fill(self, entries: Iterable[Entry]) -> None:
        """Take all tensors that there are."""
        places, operators, parts = _Pool(), _Pool(), _Pool()
        for entry in entries:
            key, record = entry.key, entry.record
            folder, _, name = entry.relative.rpartition("/")
            # The time in a name is all that differs from one iteration to the next.
            before, found, after = name.partition(str(key.timestamp_us))
            raw, said, sizes, digest = None, None, (0, 0), b""
            if record is not None:
                digest = _packed(record.digest)
                raw, sizes = record[2:4], record[7:9]
                said = *record[4:7], record.member, bool(digest)
            numbers = key.timestamp_us, entry.stored_bytes, *sizes
            if max(numbers) > _LARGEST or (record is not None and not _fits(entry, record, digest)):
                self.odd[len(self.place)] = entry
                numbers = min(key.timestamp_us, _LARGEST), min(entry.stored_bytes, _LARGEST), 0, 0
            # By place: names would take as long as all the rest.
            self.place.append(places[(folder, *key[:4], key.constant)])
            self.operator.append(operators[(before, *key[5:7], *key[9:11], raw)])
            shared = after if found else None, *key[7:9], key.tensor_format, *key[13:]
            self.part.append(parts[(*shared, entry.member, entry.described, said)])
            self.stamp.append(numbers[0])
            self.stored.append(numbers[1])
            self.bytes_in.append(numbers[2])
            self.bytes_stored.append(numbers[3])
            self.digests += digest or bytes(_DIGEST_BYTES)
        self.places, self.operators, self.parts = list(places), list(operators), list(parts)

    def entry(self, row: int) -> Entry:
        """Return one tensor as it was."""
        if row in self.odd:
            return self.odd[row]
        folder, rank, net_name, graph, iteration, constant = self.places[self.place[row]]
        before, op_type, op_name, task, stream, raw = self.operators[self.operator[row]]
        part = self.parts[self.part[row]]
        after, side, slot, laid, element, argument, member, described, said = part
        stamp = self.stamp[row]
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
        return Entry(self.root, relative, key, self.stored[row], record, member, described)

    def places_in_time(self) -> list[PlaceInTime]:
        """Return what each of the places is."""
        return [
            PlaceInTime(rank, not constant, iteration)
            for _, rank, _, _, iteration, constant in self.places
        ]


class Entries(Sequence[Entry]):
    """Tensors by rank, iteration and time, each an object while somebody looks at it."""

    def __init__(self, columns: _Columns, rows: npt.NDArray[np.uint32]) -> None:
        self._columns, self._rows = columns, rows

    @staticmethod
    def of(root: Path, batches: Iterable[Iterable[Entry]]) -> Entries:
        """Return the tensors of batches, each of which is in order."""
        columns = _Columns(root)
        columns.fill(chain.from_iterable(batches))
        places = columns.places_in_time()
        level = {place: at for at, place in enumerate(sorted(set(places)))}
        levels = np.array([level[place] for place in places], np.uint32)
        stamps, place = np.frombuffer(columns.stamp, np.uint64), _numbers(columns.place)
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
        for start in range(0, len(self), _AT_A_TIME):
            yield from self._rows[start : start + _AT_A_TIME].tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        others = cast("Sequence[object]", other)
        return len(self) == len(others) and all(map(eq, self, others))

    def where(self, keeps: Callable[[Entry], bool]) -> Entries:
        """Return those that are kept."""
        kept = array("I", (row for row in self._numbers() if keeps(self._columns.entry(row))))
        return Entries(self._columns, _numbers(kept))

    def by_place(self) -> dict[PlaceInTime, Entries]:
        """Return the tensors of each place, in order."""
        places = self._columns.places_in_time()
        numbers = {place: at for at, place in enumerate(dict.fromkeys(places))}
        same = np.array([numbers[place] for place in places], np.uint32)
        every = same[_numbers(self._columns.place)[self._rows]]
        starts = np.flatnonzero(np.diff(every, prepend=-1)).tolist()
        named = list(numbers)
        return {
            named[every[start]]: self[start:end] for start, end in pairwise((*starts, len(every)))
        }

    @property
    def folders(self) -> set[str]:
        """Folders of the files, relative to the root."""
        there = np.unique(_numbers(self._columns.place)[self._rows]).tolist()
        return {self._columns.places[place][0] for place in there}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files, of all tensors here."""
        return int(np.frombuffer(self._columns.stored, np.uint64)[self._rows].sum())


def _numbers(column: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(column, np.uint32)


def _fits(entry: Entry, record: ManifestRecord, digest: bytes) -> bool:
    """Return whether the columns give a tensor back with its record."""
    return (
        record.path == entry.relative
        and record.timestamp_us == entry.key.timestamp_us
        and bool(digest) == bool(record.digest)
    )


def _packed(digest: str) -> bytes:
    """Return a digest in half of its characters; nothing for one of another form."""
    if len(digest) != 2 * _DIGEST_BYTES or digest.lower() != digest:
        return b""
    try:
        packed = bytes.fromhex(digest)
    except ValueError:
        return b""
    return packed if len(packed) == _DIGEST_BYTES else b""
