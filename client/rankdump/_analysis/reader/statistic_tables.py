"""Rows of statistics from the lines of `statistic.csv`, of an operator's table, and of the info
file of an API dump; and the lines of these files, packed or not. Lines can also be read from the
end, because of a growing table usually the last rows are wanted. Titles of columns are those of
MindSpore, whichever tool wrote the table.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.tree import Figures, Table
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._codec.file_codec import select_codec
from rankdump._core.cann_types import normalize_element_name
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey
from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES
from rankdump._layout import api_tree
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_dtype_name, parse_info_line
from rankdump._layout.api_tree import LAYER_KIND, parse_call_name
from rankdump._layout.foreign_calls import count_bytes
from rankdump._layout.statistic_tables import StatisticCsvRow
from rankdump.errors import CorruptedError

TOOL_STEP = 1
"""Step number that troubleshooter writes in every line."""

INFO_ITEMS = (*SUMMARY_ITEMS, "l2norm")
"""Statistics that a line of an info file may have, besides an MD5."""
_TITLE_SPELLINGS = {title.lower(): title for title in STATISTIC_TITLES.values()} | {
    "l2norm": STATISTIC_TITLES["l2norm"],
    "md5 value": STATISTIC_TITLES["md5"],
}
"""MindSpore's title for each spelling of CANN and its tools, in lower case."""


def spell_title(title: str) -> str:
    """Return the title of a column as MindSpore spells it; an unknown title is returned
    unchanged.
    """
    return _TITLE_SPELLINGS.get(title.lower(), title)


@dataclass(frozen=True, slots=True)
class PlacedInfoLine:
    """One line of an info file with its position."""

    line: InfoLine
    line_number: int
    """Number of the line from 1, in execution order."""
    iteration: int


@dataclass(frozen=True, slots=True)
class InfoFileContent:
    """Content of an info file."""

    lines: tuple[PlacedInfoLine, ...]
    damage: str = ""
    """Error in the line after the last valid one; empty for an intact file."""
    is_torn: bool = False
    """Whether the damage is only an incomplete last line."""
    has_steps: bool = True
    """Whether the lines have real step numbers."""


def read_info(path: Path, *, stepped: bool) -> InfoFileContent:
    """Return the lines of an info file; `stepped` says that it is known to have real step numbers.

    Reading ends at the first invalid line; CorruptedError when the file cannot be read at all.
    """
    with named_errors(path):
        # Bytes that are not valid text make their line invalid, and reading ends there.
        text = path.read_bytes().decode("utf-8", "backslashreplace")
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
    stepped = stepped or any(line.step != TOOL_STEP for _, line in found)
    blocks: list[int] = number_blocks(["_backward_" in line.name for _, line in found]).tolist()
    noted = tuple(
        PlacedInfoLine(line, number, line.step if stepped else block)
        for (number, line), block in zip(found, blocks, strict=True)
    )
    return InfoFileContent(noted, damage, torn, stepped)


def number_blocks(is_backward: Sequence[bool]) -> npt.NDArray[np.int64]:
    """Return the iteration of each line; a forward line after a backward line begins the next
    iteration.
    """
    backward = np.array(is_backward, bool)
    begins = np.concatenate([np.zeros(min(1, len(backward)), bool), backward[:-1] & ~backward[1:]])
    return np.cumsum(begins, dtype=np.int64)


def make_info_row(
    noted: PlacedInfoLine,
    table: Table,
    record: ManifestRecord | None,
    given: Collection[str],
) -> Figures | None:
    """Return the row for a line of an info file; None if the line's name is not a tensor's.

    `given` contains the statistics that any line of the file has.
    """
    line = noted.line
    file = api_tree.parse_api_file_name(f"{line.name}.npy")
    if file is None:
        return None
    dtype = parse_dtype_name(line.dtype)
    return Figures(
        key=TensorKey(
            rank=table.rank,
            net_name="",
            graph=0,
            iteration=noted.iteration,
            timestamp_us=noted.line_number if record is None else record.timestamp_us,
            op_type=file.op_type,
            op_name=file.op_name,
            side=file.side,
            slot=file.slot,
            argument=file.argument,
        ),
        dtype=dtype,
        shape=line.shape,
        data_bytes=count_bytes(dtype, line.shape),
        values=spell_info_values(line, given),
        relative=table.relative,
        record=record,
    )


def spell_info_values(line: InfoLine, given: Collection[str]) -> dict[str, str]:
    """Return the statistics of a line by title; a statistic that is in `given` and that the line
    lacks is NaN.
    """
    values = {STATISTIC_TITLES[item]: repr(value) for item, value in line.statistics.items()}
    if parse_dtype_name(line.dtype) != "bool":
        absent = [i for i in INFO_ITEMS if i in given and i not in line.statistics]
        values |= {STATISTIC_TITLES[item]: repr(math.nan) for item in absent}
    if line.md5:
        values[STATISTIC_TITLES[MD5_ITEM]] = line.md5
    return values


class InfoFilePlaces:
    """Iteration and order of tensors without a manifest, from the info file in their folder."""

    def __init__(self, root: Path, *, stepped: bool) -> None:
        self._root, self._stepped = root, stepped
        self._known: dict[str, dict[str, PlacedInfoLine]] = {}

    def place_of_file(self, folder: str, name: str) -> tuple[int, int]:
        """Return the iteration and the order of a file's tensor; tensors without a line
        come last.
        """
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
                except CorruptedError:  # the error is reported when the rows of the table are read
                    return {}
                return {noted.line.name: noted for noted in info.lines}
        return {}


def is_layer_mark(op_name: str) -> bool:
    """Return whether a name is that of a layer mark. A mark records the call of a module as a
    tensor with one zero, which is not a tensor of the job.
    """
    # Most names belong to other trees, for which this first test is sufficient.
    api = parse_call_name(op_name) if op_name.startswith(LAYER_KIND) else None
    return api is not None and api.kind == LAYER_KIND


def make_statistics_row(
    row: StatisticCsvRow,
    table: Table,
    iteration: int,
    record: ManifestRecord | None,
    full_name: str,
) -> Figures:
    """Return the row of a line of `statistic.csv`, or of the table of an operator."""
    stamp = row.timestamp_us
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
        record=record,
        full_name=full_name,
    )


BLOCK_BYTES = 4 << 20
MAX_HEADER_BYTES = 1 << 16
_MAX_TABLE_BYTES = 4 << 30
"""Largest unpacked size in bytes of a table that is read as a whole."""


def read_table(access: TreeAccess, folder: str, name: str) -> bytes:
    """Return the unpacked bytes of a table; CorruptedError when it cannot be read."""
    with named_errors(access.root / folder / name):
        packed = access.read(folder, name)
        return bytes(select_codec(name).decode(packed, limit_bytes=_MAX_TABLE_BYTES))


@contextmanager
def open_table(access: TreeAccess, folder: str, name: str) -> Generator[BinaryIO]:
    """Open a table for reading; CorruptedError when the file cannot be read, packed or not.

    Errors in its lines are left to the callers, which report them with the path.
    """
    if select_codec(name).suffix:
        yield io.BytesIO(read_table(access, folder, name))
        return
    path = access.root / folder / name
    with ExitStack() as stack:
        with named_errors(path):
            file = stack.enter_context(access.open(folder, name))
        try:
            yield file
        except OSError as error:
            raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None


class LineBlock(NamedTuple):
    """Several whole lines of a file."""

    start: int
    """Position of the first line, in bytes."""
    lines: bytes


def read_blocks_backward(file: BinaryIO, *, start: int = 0) -> Iterator[LineBlock]:
    """Yield the lines after a position in blocks, the last block first; each block is in the order
    of the file.

    A last line without a line end is left out, because it is still being written.
    """
    place, rest, has_end = file.seek(0, os.SEEK_END), b"", False
    while place > start:
        first = max(start, place - BLOCK_BYTES)
        file.seek(first)
        data = file.read(place - first) + rest
        place = first
        if not has_end:
            data = data[: data.rfind(b"\n") + 1]
            has_end = bool(data)
        # The text before the first line end belongs to a line that begins in the previous block.
        cut = data.find(b"\n") + 1 if place > start else 0
        rest = data[:cut]
        if len(data) > cut:
            yield LineBlock(place + cut, data[cut:])
