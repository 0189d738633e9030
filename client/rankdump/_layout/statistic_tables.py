"""Tables of statistics: MindSpore's `statistic.csv` of a folder, and the table of one operator that
CANN writes instead of a `bin` file; formats headers and rows, and parses both. Pure.

Source: MindSpore 2.3, Dump guide; CANN, dump_stats. A row of `statistic.csv` ends in a comma that
the header lacks; readers of any release accept files with and without it. The table of an operator
has the name of the `bin` file with `.csv` appended. In it, the count of elements follows the
average by default, and the shape if statistics are chosen; the plan's items are already in the
order of the columns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

from rankdump._core.cann_types import DATA_TYPE_NUMBERS, DATA_TYPES
from rankdump._core.record import TensorKind, TensorSide, sanitize_name
from rankdump._core.session_protocol import RecordHead
from rankdump._core.statistics import STATISTIC_TITLES
from rankdump._layout.file_name import FileName
from rankdump._layout.profile import Profile
from rankdump._layout.tree_paths import STATISTIC_FILE, spell_operator
from rankdump.errors import CorruptedError

STATISTIC_COLUMNS = (
    "Op Type",
    "Op Name",
    "Task ID",
    "Stream ID",
    "Timestamp",
    "IO",
    "Slot",
    "Data Size",
    "Data Type",
    "Shape",
)
_FORMAT_COLUMN, _FORMAT_INDEX = "Format", 9
STATISTIC_COLUMNS_WITH_FORMAT = (
    *STATISTIC_COLUMNS[:_FORMAT_INDEX],
    _FORMAT_COLUMN,
    *STATISTIC_COLUMNS[_FORMAT_INDEX:],
)
"""Columns as tools of CANN write them (msaccucmp, with sides in capital letters)."""
FIXED_TABLE_STATISTICS = tuple(item for item in STATISTIC_TITLES if item not in ("md5", "l2norm"))
"""The ten columns, in order, of releases without `statistic_category`."""
# These kinds take about 5 MB of the 100 MB that an idle agent may use.
_MAX_REMEMBERED_KINDS = 1 << 14
_RowT = TypeVar("_RowT")


STATISTIC_TABLE_NAME = re.compile(r"statistic(?:\.[0-9a-f]{8})?\.csv")
"""Name of a table: that of MindSpore, or one of `make_second_table_name`."""


@dataclass(frozen=True, slots=True)
class StatisticCsvRow:
    """Parsed line of a table of either form."""

    op_type: str
    op_name: str
    """Name of the operator as the table, or the name of the table, spells it."""
    task: int
    stream: int
    timestamp_us: int
    side: TensorSide
    slot: int
    data_bytes: int
    dtype: str
    """Element type as the table spells it; the table of an operator has a prefix, as in
    `DT_FLOAT`.
    """
    shape: tuple[int, ...]
    values: tuple[tuple[str, str], ...]
    """Column title and text of each statistic, in the table's order."""


StatisticRow: TypeAlias = "tuple[TensorKind, int, str]"
"""Kind and time stamp of a tensor with statistics only, and the statistics, joined by commas."""


def select_table_items(items: tuple[str, ...], profile: Profile) -> tuple[str, ...]:
    """Return the items that a table of this profile has, given those of the plan."""
    return FIXED_TABLE_STATISTICS if profile.fixed_table else items


def make_second_table_name(header: str, name: str = STATISTIC_FILE) -> str:
    """Return the name of a table with these columns if another job's table has the usual name."""
    digest = hashlib.blake2b(header.encode(), digest_size=4).hexdigest()
    return f"{name.removesuffix('.csv')}.{digest}.csv"


def format_statistic_header(items: tuple[str, ...]) -> str:
    """Return the header line of `statistic.csv`, without the line end."""
    return ",".join((*STATISTIC_COLUMNS, *(STATISTIC_TITLES[item] for item in items)))


def clean_table_field(name: str) -> str:
    """Return a name for a row, without commas and quotes, which would move the columns."""
    return name.replace(",", "_").replace('"', "_")


def format_statistic_line(head: RecordHead, statistics: Sequence[str], profile: Profile) -> str:
    """Return the line of one tensor in `statistic.csv`, without the line end."""
    operator, tensor = _format_kind(head.kind, profile)
    end = "" if profile.fixed_table else ","
    fixed = f"{operator},{head.task},{head.stream},{head.timestamp_us},{tensor}"
    return ",".join((fixed, *statistics)) + end


def iter_statistics_only_lines(
    rows: Iterable[StatisticRow], profile: Profile, *, unknown_id: int = 0
) -> Iterator[str]:
    """Yield the lines of tensors with statistics only.

    Task and stream of the operators are not known.
    """
    end = "" if profile.fixed_table else ","
    ids = f"{unknown_id},{unknown_id}"
    for kind, timestamp_us, statistics in rows:
        operator, tensor = _format_kind(kind, profile)
        yield f"{operator},{ids},{timestamp_us},{tensor}{statistics and ','}{statistics}{end}"


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _format_kind(kind: TensorKind, profile: Profile) -> tuple[str, str]:
    extents = ",".join(map(str, kind.shape))
    tensor = f'{kind.side.value},{kind.slot},{kind.byte_count},{kind.dtype},"({extents})"'
    return _format_operator(kind.op_type, kind.op_name, profile), tensor


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _format_operator(op_type: str, op_name: str, profile: Profile) -> str:
    spelled = clean_table_field(spell_operator(op_type, op_name, profile))
    return f"{clean_table_field(sanitize_name(op_type))},{spelled}"


def parse_statistic_table(
    text: str, *, file: str, numbers: Sequence[int] = ()
) -> list[StatisticCsvRow]:
    """Parse a whole table; CorruptedError names the wrong line.

    A header among the rows, which an interrupted writer may leave, is skipped. `numbers` are those
    of the lines after the header, if `text` has only some of them.
    """
    lines = text.split("\n")
    first = lines[0].split(",")
    fixed = (
        STATISTIC_COLUMNS_WITH_FORMAT
        if first[_FORMAT_INDEX:][:1] == [_FORMAT_COLUMN]
        else STATISTIC_COLUMNS
    )
    if tuple(first[: len(fixed)]) != fixed:
        raise CorruptedError(f"{file}: not a statistic table: it begins with {lines[0][:60]!r}")
    titles = [title for title in first[len(fixed) :] if title]
    return _parse_lines(
        lines, lambda line: _parse_statistic_line(line, titles, len(fixed)), file, numbers
    )


def _parse_lines(
    lines: list[str], parse: Callable[[str], _RowT], file: str, numbers: Sequence[int] = ()
) -> list[_RowT]:
    rows: list[_RowT] = []
    for at, line in zip(numbers or range(2, len(lines) + 1), lines[1:], strict=True):
        if line and line != lines[0]:
            try:
                rows.append(parse(line))
            except (ValueError, IndexError) as error:
                raise CorruptedError(f"{file}, line {at}: {error}") from None
    return rows


def _parse_statistic_line(line: str, titles: list[str], columns: int) -> StatisticCsvRow:
    before, quote, rest = line.partition('"(')
    shape, closed, after = rest.partition(')"')
    fields = before.split(",")
    if not quote or not closed or len(fields) != columns:
        raise ValueError(f"it has no shape in column {columns}")
    values = after.split(",")[1:]
    if len(values) < len(titles):
        raise ValueError(f"{len(values)} values for {len(titles)} columns")
    return StatisticCsvRow(
        op_type=fields[0],
        op_name=fields[1],
        task=int(fields[2]),
        stream=int(fields[3]),
        timestamp_us=int(fields[4]),
        side=TensorSide(fields[5].lower()),
        slot=int(fields[6]),
        data_bytes=int(fields[7]),
        dtype=fields[8],
        shape=tuple(int(extent) for extent in shape.split(",") if extent),
        values=tuple(zip(titles, values, strict=False)),
    )


OPERATOR_TABLE_SUFFIX = ".csv"
OPERATOR_COLUMNS = ("Input/Output", "Index", "Data Size", "Data Type", "Format", "Shape")
OPERATOR_TITLES = {**STATISTIC_TITLES, "nan count": "Nan Count", "l2norm": "l2norm"}
"""Column title of each item in the table of an operator, some of which CANN spells in another way
than MindSpore.
"""
_SIDE_WORDS = {TensorSide.INPUT: "Input", TensorSide.OUTPUT: "Output"}
_SIDES_BY_WORD = {word: side for side, word in _SIDE_WORDS.items()}
_SCALAR_SHAPE = "-"
_COUNT_PATTERN = re.compile(r"[0-9]{1,20}")


def format_operator_header(items: tuple[str, ...]) -> str:
    """Return the header line of an operator's table, without the line end."""
    return ",".join((*OPERATOR_COLUMNS, *(OPERATOR_TITLES[item] for item in items)))


def format_operator_line(kind: TensorKind, tensor_format: str, statistics: str) -> str:
    """Return the line of one tensor in an operator's table, without the line end; `statistics` are
    joined by commas.
    """
    return f"{_format_operator_tensor(kind, tensor_format)}{statistics and ','}{statistics}"


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _format_operator_tensor(kind: TensorKind, tensor_format: str) -> str:
    data_type = DATA_TYPES[DATA_TYPE_NUMBERS.get(kind.dtype, 0)].name
    shape = "x".join(map(str, kind.shape)) or _SCALAR_SHAPE
    where = f"{_SIDE_WORDS[kind.side]},{kind.slot},{kind.byte_count}"
    return f"{where},DT_{data_type},{tensor_format},{shape}"


def parse_operator_table(text: str, operator: FileName, *, file: str) -> list[StatisticCsvRow]:
    """Parse a whole table of an operator in the way of `parse_statistic_table`."""
    lines = text.split("\n")
    first = lines[0].split(",")
    if tuple(first[: len(OPERATOR_COLUMNS)]) != OPERATOR_COLUMNS:
        raise CorruptedError(f"{file}: not an operator table: it begins with {lines[0][:60]!r}")
    titles = [title for title in first[len(OPERATOR_COLUMNS) :] if title]
    return _parse_lines(lines, lambda line: _parse_operator_line(line, titles, operator), file)


def _parse_operator_line(line: str, titles: list[str], operator: FileName) -> StatisticCsvRow:
    fields = line.split(",")
    if len(fields) < len(OPERATOR_COLUMNS) + len(titles):
        raise ValueError(f"{len(fields)} fields for {len(OPERATOR_COLUMNS) + len(titles)} columns")
    side, slot, data_bytes, data_type, _, shape = fields[: len(OPERATOR_COLUMNS)]
    if side not in _SIDES_BY_WORD:
        raise ValueError(f"{side[:60]!r} in place of Input or Output")
    return StatisticCsvRow(
        op_type=operator.op_type,
        op_name=operator.op_name,
        task=operator.task,
        stream=operator.stream,
        timestamp_us=operator.timestamp_us,
        side=_SIDES_BY_WORD[side],
        slot=_parse_count(slot),
        data_bytes=_parse_count(data_bytes),
        dtype=data_type,
        shape=() if shape == _SCALAR_SHAPE else tuple(map(_parse_count, shape.split("x"))),
        values=tuple(zip(titles, fields[len(OPERATOR_COLUMNS) :], strict=False)),
    )


def _parse_count(text: str) -> int:
    if not _COUNT_PATTERN.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not an integer")
    return int(text)
