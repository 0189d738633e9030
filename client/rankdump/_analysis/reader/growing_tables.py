"""Tables with rows of several iterations: `statistic.csv` of a device in CANN's trees, and the info
file of an API dump. The position and the iteration of each line are kept as columns; only the lines
of a requested iteration become objects.

In an info file of rankdump each line has its step. In an info file of troubleshooter's api_dump the
step of every line is 1; there, a step is a block of forward lines followed by a block of backward
lines, as its own comparison assumes, and a file without backward lines is one step. A line of
`statistic.csv` has a time stamp, and the manifest with this time stamp tells the iteration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice, pairwise
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.manifests import StatusAndRecord
from rankdump._analysis.reader.statistic_tables import (
    INFO_ITEMS,
    MAX_HEADER_BYTES,
    TOOL_STEP,
    PlacedInfoLine,
    make_info_row,
    make_statistics_row,
    number_blocks,
    open_table,
)
from rankdump._analysis.reader.table_records import MAX_STAMP_US, TableRecords
from rankdump._analysis.reader.tree import Figures, Table
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_info_line
from rankdump._layout.api_tree import LAYER_KIND, split_tensor_name
from rankdump._layout.statistic_tables import StatisticCsvRow, parse_statistic_table
from rankdump.errors import CorruptedError

_BLOCK_BYTES = 4 << 20
_LINES_AT_A_TIME = 4096
_STEP = re.compile(rb'\["([^"\\]*(?:\\.[^"\\]*)*)", (-?[0-9]{1,18}), ')
_SUMMARY = re.compile(rb', \[([^\[\]]*)\](?:, (?:"[^"]*"|\[\]), ([^,\[\]]*|\[\]))?\]\s*\Z')
_TIME = re.compile(rb"[^,]*,[^,]*,[^,]*,[^,]*,([0-9]{1,18}),")
_NUMBER = rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?"
_FINITE_LINE = re.compile(
    rb'\["[^"\\.]+_(?:input|output)(?:\.[^"\\.]+)*", -?[0-9]+, \[[^\[\]]*\], "[^"\\]*", '
    rb"\[[0-9, ]*\], \[" + _NUMBER + rb", " + _NUMBER + rb", (?:" + _NUMBER + rb"|NaN|null)\]"
    rb'(?:, (?:"[^"\\]*"|\[\]), (?:' + _NUMBER + rb"|NaN|\[\]))?\]\s*\Z"
)
"""Matches a line of an info file that has a row, if the tensor's maximum and minimum are finite."""
_LAYER_LINE = f'["{LAYER_KIND}_'.encode()
"""First bytes of the line of a layer mark."""
_PLAIN_END = b"]]"
"""End of a line without a norm."""
_NO_NUMBERS = (b"NaN", b"null", b"[]", None)

NameFilter: TypeAlias = "Callable[[str], bool]"
"""Function that returns whether rows of an operator are wanted, given its name as the table spells
it.
"""


class _NumberedLine(NamedTuple):
    number: int
    """Number of the line, from 1."""
    text: bytes


_RowMaker: TypeAlias = "Callable[[Iterable[_NumberedLine]], Iterator[Figures]]"
"""Function that makes the rows of an iteration from its lines; it may get the lines in several
parts.
"""


class _LineColumns(NamedTuple):
    """Positions, numbers and iterations of the lines that have a row, in order."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """Position after the last byte of each line, without its line end."""
    numbers: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]


class GrowingTable:
    """One table with rows of several iterations."""

    def __init__(self, table: Table, known: TableRecords) -> None:
        """CorruptedError when the table cannot be read at all, or when the iteration of a line is
        unknown.
        """
        self._table = table
        self.damage = ""
        """Error after the rows that could be read; empty for an intact table."""
        self._header = b""
        """Header of a `statistic.csv`."""
        self._form: _InfoForm | _StatisticForm
        with self._open() as file:
            if table.info:
                self._form = _InfoForm(table, known)
                self._lines = self._index_lines(file, start=0)
            else:
                header = file.readline(MAX_HEADER_BYTES)
                self._header = header.rstrip(b"\r\n")
                self._form = _StatisticForm(table, known, self._header)
                self._lines = self._index_lines(file, start=len(header))
        found = np.unique(self._lines.iterations).tolist()
        self.iterations: list[int] = [each for each in found if known.is_asked(table, each)]
        """Requested iterations that the table has rows of, ascending."""
        by_iteration = np.argsort(self._lines.iterations, kind="stable")
        levels = self._lines.iterations[by_iteration]
        starts: list[int] = np.searchsorted(levels, np.array(found)).tolist()
        self._places = {
            each: by_iteration[start:end]
            for each, (start, end) in zip(found, pairwise([*starts, len(levels)]), strict=True)
        }

    def read_rows(self, iteration: int, keeps_name: NameFilter | None = None) -> Iterator[Figures]:
        """Yield the rows of an iteration in order; CorruptedError names an invalid line."""
        lines = self._read_wanted(self._places[iteration], keeps_name)
        first = next(lines, None)
        if first is not None:
            yield from self._begin(iteration, keeps_name)(chain([first], lines))

    def read_all_rows(self) -> Iterator[Figures]:
        """Yield the rows of all requested iterations, in the order of the table."""
        left = {each: len(self._places[each]) for each in self.iterations}
        makers: dict[int, _RowMaker] = {}
        iterations = self._lines.iterations
        changes = (np.flatnonzero(iterations[1:] != iterations[:-1]) + 1).tolist()
        for start, end in pairwise([0, *changes, len(iterations)] if len(iterations) else []):
            iteration = int(iterations[start])
            if iteration in left:
                if iteration not in makers:
                    makers[iteration] = self._begin(iteration, None)
                yield from makers[iteration](self._read_lines(np.arange(start, end)))
                left[iteration] -= end - start
                if not left[iteration]:
                    del makers[iteration]

    def count_finite_rows(self, iteration: int) -> int:
        """Return the number of an iteration's rows in an info file, without layer marks; 0 if any
        tensor may not be finite.
        """
        lines = [line.text for line in self._read_lines(self._places[iteration])]
        marks = sum(line.startswith(_LAYER_LINE) for line in lines)
        return len(lines) - marks if all(map(_FINITE_LINE.match, lines)) else 0

    def read_text(self, iteration: int) -> bytes:
        """Return the lines of an iteration in a `statistic.csv`, with its header in front."""
        lines = (line.text.rstrip(b"\r") for line in self._read_lines(self._places[iteration]))
        return b"\n".join([self._header, *lines, b""])

    def _open(self) -> AbstractContextManager[BinaryIO]:
        table = self._table
        return open_table(LocalTree(table.root), table.folder, table.path.name)

    def _begin(self, iteration: int, keeps_name: NameFilter | None) -> _RowMaker:
        lines = self._read_wanted(self._places[iteration], keeps_name)
        return self._form.begin(iteration, lines)

    def _read_wanted(
        self, places: npt.NDArray[np.int64], keeps_name: NameFilter | None
    ) -> Iterator[_NumberedLine]:
        lines = self._read_lines(places)
        if keeps_name is None:
            return lines
        return (line for line in lines if self._form.keeps(line, keeps_name))

    def _read_lines(self, places: npt.NDArray[np.int64]) -> Iterator[_NumberedLine]:
        if not len(places):
            return
        with self._open() as file:
            for at in range(0, len(places), _LINES_AT_A_TIME):
                part = places[at : at + _LINES_AT_A_TIME]
                starts, ends = self._lines.starts[part], self._lines.ends[part]
                numbers = self._lines.numbers[part].tolist()
                # Consecutive lines are read together.
                cuts = (np.flatnonzero(starts[1:] - ends[:-1] > 2) + 1).tolist()
                for first, last in pairwise([0, *cuts, len(part)]):
                    begin = int(starts[first])
                    file.seek(begin)
                    data = file.read(int(ends[last - 1]) - begin)
                    spans = (starts[first:last] - begin).tolist(), (ends[first:last] - begin)
                    for number, start, end in zip(
                        numbers[first:last], spans[0], spans[1].tolist(), strict=True
                    ):
                        yield _NumberedLine(number, data[start:end])

    def _index_lines(self, file: BinaryIO, *, start: int) -> _LineColumns:
        none = np.zeros(0, np.int64)
        parts = [(none, none, none, none)]
        number = 1 + bool(start)
        for block in _iter_blocks(file, start=start):
            own = self._form.read_keys(block.lines)
            kept = np.arange(len(block.lines))
            if own is None:
                own, kept = self._read_each_key(block, number)
            keys = np.array(own, np.int64)
            parts.append((block.starts[kept], block.ends[kept], kept + number, keys))
            number += len(block.lines)
            if self.damage:
                break
        starts, ends, numbers, keys = (np.concatenate(each) for each in zip(*parts, strict=True))
        return _LineColumns(starts, ends, numbers, self._form.find_iterations(keys))

    def _read_each_key(
        self, block: _TextBlock, number: int
    ) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the keys and positions of those lines of a block that have a row; reading ends at
        damage.
        """
        keys: list[int] = []
        kept: list[int] = []
        try:
            for at, text in enumerate(block.lines):
                key = self._form.read_key(_NumberedLine(number + at, text))
                if key is not None:
                    keys.append(key)
                    kept.append(at)
        except CorruptedError as error:
            self.damage = str(error)
            if block.is_torn:
                shown = block.lines[-1][:60].decode("utf-8", "backslashreplace")
                self.damage = f"{self._table.path}: its last line is incomplete: {shown!r}"
            elif not self._table.info:
                raise
        return keys, np.array(kept, np.int64)


class _TextBlock(NamedTuple):
    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    is_torn: bool
    """Whether the block is only the last line, which has no line end."""


def _iter_blocks(file: BinaryIO, *, start: int) -> Iterator[_TextBlock]:
    """Yield the lines after a position in blocks; a last line without a line end is a block of its
    own.
    """
    rest = b""
    while data := file.read(_BLOCK_BYTES):
        data = rest + data
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        if not len(ends):
            rest = data
            continue
        cut = int(ends[-1]) + 1
        starts = np.concatenate([[0], ends[:-1] + 1])
        yield _TextBlock(data[: cut - 1].split(b"\n"), starts + start, ends + start, is_torn=False)
        start, rest = start + cut, data[cut:]
    if rest:
        place = np.array([start], np.int64)
        yield _TextBlock([rest], place, place + len(rest), is_torn=True)


def _clip(number: int) -> int:
    """Limit a number to what a column can hold, because other programs may write any number."""
    return max(-MAX_STAMP_US, min(number, MAX_STAMP_US))


class _StatisticForm:
    """Meaning of the lines of a `statistic.csv`; `_InfoForm` has the same methods."""

    def __init__(self, table: Table, known: TableRecords, header: bytes) -> None:
        self._table, self._known = table, known
        self._header = header
        parse_statistic_table(self._decode(self._header), file=str(table.path))

    def read_key(self, line: _NumberedLine) -> int | None:
        """Return the key that tells the iteration of a line; None for a line without a row.

        CorruptedError for an invalid line.
        """
        found = _TIME.match(line.text)
        if found is not None:
            return int(found[1])
        if not line.text.rstrip(b"\r") or line.text.rstrip(b"\r") == self._header:
            return None
        (row,) = self._parse([line])
        return _clip(row.timestamp_us)

    def read_keys(self, lines: Sequence[bytes]) -> list[int] | None:
        """Return the keys of consecutive lines; None if each line has to be parsed by itself."""
        found = list(map(_TIME.match, lines))
        return None if None in found else [int(each[1]) for each in found if each is not None]

    def find_iterations(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._known.find_iterations(self._table, keys)

    def keeps(self, line: _NumberedLine, keeps_name: NameFilter) -> bool:
        return keeps_name(self._decode(line.text.split(b",", 2)[1]))

    def begin(self, iteration: int, lines: Iterable[_NumberedLine]) -> _RowMaker:
        """Return a function that makes the rows of an iteration, given all its wanted lines."""
        return partial(self._make_rows, iteration)

    def _make_rows(self, iteration: int, lines: Iterable[_NumberedLine]) -> Iterator[Figures]:
        each = iter(lines)
        while batch := list(islice(each, _LINES_AT_A_TIME)):
            for row in self._parse(batch):
                found = self._known.find_of_row(self._table, row)
                yield make_statistics_row(row, self._table, iteration, *found)

    def _parse(self, lines: Sequence[_NumberedLine]) -> list[StatisticCsvRow]:
        text = b"\n".join([self._header, *(line.text.rstrip(b"\r") for line in lines)])
        numbers = [line.number for line in lines]
        return parse_statistic_table(
            self._decode(text), file=str(self._table.path), numbers=numbers
        )

    @staticmethod
    def _decode(text: bytes) -> str:
        return text.decode("utf-8", "surrogateescape")


class _InfoForm:
    """Meaning of the lines of an info file."""

    def __init__(self, table: Table, known: TableRecords) -> None:
        self._table, self._known = table, known
        self._given: set[str] = set()
        """Statistics that any line has had; if another line lacks one of them, its value is NaN."""
        self._backward: list[bool] = []
        self._has_steps = known.has_manifests(table)

    def read_key(self, line: _NumberedLine) -> int | None:
        found = _STEP.match(line.text)
        if found is None or self._may_add(line.text):
            if not line.text.strip():
                return None
            parsed = self._parse(line)
            self._given.update(parsed.statistics)
            step, name = _clip(parsed.step), parsed.name.encode("utf-8", "replace")
        else:
            step, name = int(found[2]), found[1]
        self._backward.append(b"_backward_" in name)
        return step

    def read_keys(self, lines: Sequence[bytes]) -> list[int] | None:
        has_items = self._given.issuperset(SUMMARY_ITEMS)
        has_norms = not all(line.endswith(_PLAIN_END) for line in lines)
        if not (self._has_steps and has_items) or (has_norms and any(map(self._may_add, lines))):
            return None
        found = list(map(_STEP.match, lines))
        return None if None in found else [int(each[2]) for each in found if each is not None]

    def _may_add(self, text: bytes) -> bool:
        """Return whether a line may have a statistic that no earlier line had."""
        # Most lines end with the summary, or with a norm that earlier lines had, too.
        if len(self._given) == len(INFO_ITEMS) or (
            text.endswith(_PLAIN_END) and self._given.issuperset(SUMMARY_ITEMS)
        ):
            return False
        found = _SUMMARY.search(text)
        if found is None:
            return True
        values = (*found[1].split(b", "), found[2])
        return any(
            value not in _NO_NUMBERS and item not in self._given
            for item, value in zip((*SUMMARY_ITEMS, "l2norm"), values, strict=False)
        )

    def find_iterations(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._has_steps or (keys != TOOL_STEP).any():
            return keys
        return number_blocks(self._backward[: len(keys)])

    def keeps(self, line: _NumberedLine, keeps_name: NameFilter) -> bool:
        return keeps_name(split_tensor_name(self._read_name(line))[0])

    def begin(self, iteration: int, lines: Iterable[_NumberedLine]) -> _RowMaker:
        left = Counter(map(self._read_name, lines))
        by_name = self._known.records_by_name(self._table, iteration)
        return partial(self._make_rows, iteration, left, by_name)

    def _make_rows(
        self,
        iteration: int,
        left: Counter[str],
        by_name: Mapping[str, Sequence[StatusAndRecord]],
        lines: Iterable[_NumberedLine],
    ) -> Iterator[Figures]:
        """Yield the rows of lines; `left` contains the number of unread lines of each name."""
        for line in lines:
            parsed = self._parse(line)
            records = by_name.get(parsed.name, ())
            # If a name has more lines than records, a killed process wrote the first ones, and the
            # last ones belong to the records.
            number = len(records) - left[parsed.name]
            left[parsed.name] -= 1
            status, record = records[number] if records and number >= 0 else (None, None)
            if status is not None and not self._known.selects(status):
                record = None
            noted = PlacedInfoLine(parsed, line.number, iteration)
            row = make_info_row(noted, self._table, record, self._given)
            if row is not None:
                yield row

    def _read_name(self, line: _NumberedLine) -> str:
        found = _STEP.match(line.text)
        if found is None or b"\\" in found[1]:
            return self._parse(line).name
        return found[1].decode("utf-8", "backslashreplace")

    def _parse(self, line: _NumberedLine) -> InfoLine:
        text = line.text.decode("utf-8", "backslashreplace")
        return parse_info_line(text, file=f"{self._table.path}, line {line.number}")
