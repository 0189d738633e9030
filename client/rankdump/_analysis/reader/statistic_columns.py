"""Statistics of tensors as columns, and their assignment to the records of manifests. Arrow reads
`statistic.csv`; a table that Arrow rejects, and tables of other forms, are read row by row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from rankdump._analysis.reader.file_errors import noted_errors
from rankdump._analysis.reader.manifest_columns import SIDES, UNKNOWN_SIDE
from rankdump._analysis.reader.statistic_tables import read_table, spell_title
from rankdump._analysis.reader.tree import NONFINITE_COUNT_ITEMS, Figures
from rankdump._analysis.table.table_schema import STATISTIC_COLUMNS, TENSOR_SCHEMA
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES
from rankdump._layout.statistic_tables import (
    STATISTIC_COLUMNS as FIXED_TITLES,
)
from rankdump._layout.statistic_tables import (
    STATISTIC_COLUMNS_WITH_FORMAT,
    parse_statistic_table,
)

_COLUMNS = {**STATISTIC_COLUMNS, MD5_ITEM: MD5_ITEM}
_COLUMN_OF_TITLE = {title: _COLUMNS[item] for item, title in STATISTIC_TITLES.items()}
# Types are looked up once, because looking up a type in the schema takes longer than reading a
# value.
_TITLED_FIELDS = [(t, n, TENSOR_SCHEMA.field(n).type) for t, n in _COLUMN_OF_TITLE.items()]
STATISTIC_FIELDS = [TENSOR_SCHEMA.field(name) for name in _COLUMNS.values()]
_PLACE_FIELDS = [
    pa.field("place", pa.int64()),
    pa.field("timestamp_us", pa.int64()),
    pa.field("side", pa.int64()),
    pa.field("slot", pa.int64()),
]
STATISTIC_SCHEMA = pa.schema([*_PLACE_FIELDS, *STATISTIC_FIELDS])
_INT64_MAX = (1 << 63) - 1
_NULL_TEXTS = ["", "null"]
_NONFINITE_COUNTS = [STATISTIC_COLUMNS[item] for item in NONFINITE_COUNT_ITEMS]
_CHECKED_TITLES = ("Task ID", "Stream ID", "Data Size")
_SHAPE = r"^\([0-9,]*\)$"


@dataclass(frozen=True, slots=True)
class StatisticTableText:
    """Text of a `statistic.csv`, without an incomplete last line."""

    place: int
    """Number of the rank and iteration that the table belongs to."""
    file: str
    """Path of the table, for messages."""
    header: bytes
    rows: bytes
    is_torn: bool = False
    """Whether the file ends in the middle of a line."""


def read_statistic_text(
    access: TreeAccess, folder: str, name: str, place: int
) -> StatisticTableText:
    """Return the text of a table; CorruptedError when it cannot be read."""
    text = read_table(access, folder, name).replace(b"\r\n", b"\n")
    return split_text(text, access.root / folder / name, place)


def split_text(text: bytes, file: Path, place: int) -> StatisticTableText:
    """Return the parts of the text of a table, whose lines end with `\\n`."""
    header, _, rows = text.partition(b"\n")
    end = rows.rfind(b"\n") + 1
    return StatisticTableText(place, str(file), header, rows[:end], is_torn=end < len(rows))


def count_finite_rows(texts: Sequence[StatisticTableText]) -> dict[int, int]:
    """Return the number of rows of each place, for places whose tensors are all finite according to
    their statistics (`are_statistics_finite`) and of which no two have the same time stamp, side
    and slot. Places with an invalid table are left out.
    """
    problems: list[str] = []
    rows = parse_statistic_texts(texts, problems, is_strict=True)
    if problems:
        # At least one of the tables is invalid, so each is read by itself.
        each_alone = ([text] for text in texts) if len(texts) > 1 else ()
        return {place: n for one in each_alone for place, n in count_finite_rows(one).items()}
    keys = [rows.column(name).to_numpy() for name in STATISTIC_SCHEMA.names[:4]]
    order = np.lexsort(keys[::-1])
    same = np.logical_and.reduce([each[order][1:] == each[order][:-1] for each in keys])
    is_good = _find_finite(rows)
    is_good[order[1:][same]] = False
    count = max((text.place for text in texts), default=0) + 1
    all_rows, good = (np.bincount(each, minlength=count) for each in (keys[0], keys[0][is_good]))
    bad = {text.place for text in texts if text.is_torn}
    places = np.flatnonzero((all_rows == good) & (all_rows > 0)).tolist()
    return {place: int(all_rows[place]) for place in places if place not in bad}


def _find_finite(rows: Any) -> npt.NDArray[np.bool_]:
    counts = [rows.column(name) for name in _NONFINITE_COUNTS]
    has_counts = np.logical_and.reduce([pc.is_valid(each).to_numpy() for each in counts])
    is_zero = np.logical_and.reduce([each.fill_null(1).to_numpy() == 0 for each in counts])
    extremes = [rows.column(name).fill_null(np.nan).to_numpy() for name in ("max", "min")]
    is_bounded = np.logical_and.reduce([np.isfinite(each) for each in extremes])
    return (has_counts & is_zero) | (~has_counts & is_bounded)


def parse_statistic_texts(
    texts: Sequence[StatisticTableText], problems: list[str], *, is_strict: bool = False
) -> pa.Table:
    """Return the rows of tables; add a problem for each invalid table.

    With `is_strict`, also for a table that is invalid in columns that no row has.
    """
    by_form: defaultdict[tuple[bytes, bool], list[StatisticTableText]] = defaultdict(list)
    for text in texts:
        if text.rows:
            first = text.rows[: text.rows.find(b"\n")]
            by_form[text.header, first.endswith(b",")].append(text)
    tables: list[pa.Table] = []
    for (header, has_end), same in by_form.items():
        try:
            tables.append(_parse_with_arrow(header, same, has_end, is_strict))
        except (pa.ArrowException, UnicodeError):
            tables += _parse_each(same, problems)
    return pa.concat_tables(tables) if tables else STATISTIC_SCHEMA.empty_table()


def _parse_with_arrow(
    header: bytes, texts: Sequence[StatisticTableText], has_end: bool, is_strict: bool
) -> pa.Table:
    """Return the rows of tables with the same header; ArrowInvalid if one of them needs the exact
    reader.
    """
    titles = header.decode().rstrip(",").split(",")
    fixed = STATISTIC_COLUMNS_WITH_FORMAT if "Format" in titles else FIXED_TITLES
    if tuple(titles[: len(fixed)]) != fixed:
        raise pa.ArrowInvalid("the header is not that of a table of statistics")
    columns = {spell_title(title): title for title in titles[len(fixed) :]}
    known = {title: name for name, title in columns.items() if name in _COLUMN_OF_TITLE}
    kinds = {f: TENSOR_SCHEMA.field(_COLUMN_OF_TITLE[n]).type for f, n in known.items()}
    numbers = dict.fromkeys(["Timestamp", "Slot", *(_CHECKED_TITLES * is_strict)], pa.int64())
    table = arrow_csv.read_csv(
        pa.BufferReader(b"".join(text.rows for text in texts)),
        arrow_csv.ReadOptions(
            use_threads=False, column_names=[*titles, *([" end"] if has_end else [])]
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={**numbers, "IO": pa.string(), "Shape": pa.string(), **kinds},
            include_columns=[*numbers, "IO", *(["Shape"] * is_strict), *known],
            null_values=_NULL_TEXTS,
            strings_can_be_null=True,
        ),
    )
    counts = [text.rows.count(b"\n") for text in texts]
    if len(table) != sum(counts):
        raise pa.ArrowInvalid("a row has several lines")
    if is_strict and not pc.all(pc.match_substring_regex(table.column("Shape"), _SHAPE)).as_py():
        raise pa.ArrowInvalid("a row has no shape")
    places = np.repeat([text.place for text in texts], counts)
    made = {_COLUMN_OF_TITLE[name]: table.column(title) for title, name in known.items()}
    return _make_table(
        places,
        table.column("Timestamp"),
        _number_io(table.column("IO")),
        table.column("Slot"),
        made,
    )


def _number_io(words: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    given = words.dictionary_encode().combine_chunks()
    numbers: list[int] = []
    for word in given.dictionary.to_pylist():
        side = (word or "").lower()
        if side not in SIDES:
            raise pa.ArrowInvalid(f"{word!r} is no side")
        numbers.append(SIDES.index(side))
    if given.null_count or not numbers:
        raise pa.ArrowInvalid("a row has no side")
    return np.array(numbers, np.int64)[given.indices.to_numpy()]


def _make_table(
    places: Any, stamps: Any, sides: Any, slots: Any, values: dict[str, Any]
) -> pa.Table:
    count = len(places)
    columns: list[Any] = [places, stamps, sides, slots]
    columns += [values.get(each.name, pa.nulls(count, each.type)) for each in STATISTIC_FIELDS]
    return pa.Table.from_arrays(
        [each if isinstance(each, pa.ChunkedArray) else pa.array(each) for each in columns],
        names=STATISTIC_SCHEMA.names,
    ).cast(STATISTIC_SCHEMA)


def _parse_each(texts: Sequence[StatisticTableText], problems: list[str]) -> list[pa.Table]:
    tables: list[pa.Table] = []
    for text in texts:
        whole = (text.header + b"\n" + text.rows).decode("utf-8", "surrogateescape")
        with noted_errors(problems):
            rows = (
                (
                    (text.place, row.timestamp_us, row.side.value, row.slot),
                    {spell_title(title): value for title, value in row.values},
                )
                for row in parse_statistic_table(whole, file=text.file)
            )
            tables.append(make_statistic_table(rows))
    return tables


def make_statistic_table(
    rows: Iterable[tuple[tuple[int, int, str, int], dict[str, str]]],
) -> pa.Table:
    """Return a table of rows, each given by its place, time stamp, side and slot and by the texts
    of its statistics by title.
    """
    columns: dict[str, list[Any]] = {name: [] for name in STATISTIC_SCHEMA.names}
    for (place, stamp, side, slot), values in rows:
        columns["place"].append(place)
        # Limited, because names and tables of other programs may have any number.
        columns["timestamp_us"].append(min(stamp, _INT64_MAX))
        columns["side"].append(SIDES.index(side))
        columns["slot"].append(min(slot, _INT64_MAX))
        for title, name, kind in _TITLED_FIELDS:
            columns[name].append(_read_value(values.get(title), kind))
    return pa.Table.from_pydict(columns, STATISTIC_SCHEMA)


def _read_value(text: str | None, kind: pa.DataType) -> object:
    if text is None or text in _NULL_TEXTS:
        return None
    try:
        if kind == pa.int64():
            return int(text)
        return float(text) if kind == pa.float64() else text
    except ValueError:
        return None


def read_statistics(row: Figures) -> dict[str, object]:
    """Return the statistics of a row by the names of their columns."""
    return {name: _read_value(row.values.get(title), kind) for title, name, kind in _TITLED_FIELDS}


def match_statistics(
    places: npt.NDArray[np.int64],
    stamps: npt.NDArray[np.int64],
    sides: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    statistics: pa.Table,
) -> npt.NDArray[np.int64]:
    """Return for each tensor the row with its statistics, -1 if there is none.

    Tensors are identified by rank and iteration (`place`), time stamp, side and slot; one with
    UNKNOWN_SIDE by place and time stamp only. Among equal rows the last one counts, because it was
    written last.
    """
    if not len(statistics) or not len(places):
        return np.full(len(places), -1)
    found = [statistics.column(name).to_numpy() for name in STATISTIC_SCHEMA.names[:4]]
    moments = _number_pairs(np.concatenate([found[0], places]), np.concatenate([found[1], stamps]))
    parts = _number_pairs(
        moments, np.concatenate([found[2], sides]) * (1 << 32) + np.concatenate([found[3], slots])
    )
    count = len(statistics)
    exact = _find_last(parts[:count], parts[count:])
    by_time = _find_last(moments[:count], moments[count:])
    return np.where(sides == UNKNOWN_SIDE, by_time, exact)


def _number_pairs(
    first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return one number for each pair of values, which is equal for equal pairs."""
    firsts = np.unique(first, return_inverse=True)[1]
    values, seconds = np.unique(second, return_inverse=True)
    return firsts.astype(np.int64) * len(values) + seconds


def _find_last(
    known: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the last position of each wanted value among the known values; -1 for none."""
    order = np.argsort(known, kind="stable")
    after = np.searchsorted(known[order], wanted, side="right") - 1
    rows = order[np.maximum(after, 0)]
    return np.where((after >= 0) & (known[rows] == wanted), rows, -1)
