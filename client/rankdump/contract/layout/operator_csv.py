"""The table of one operator that CANN writes in the place of a `bin` file. Pure.

Its name is the `bin` file's with `.csv` behind it. Source: ascend-formats.md 4.6. The count of
elements stands behind the average by default, and right behind the shape where figures are chosen:
the plan's items are in the order of the columns already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from rankdump.contract.dump_types import DATA_TYPES, NUMBERS
from rankdump.contract.errors import DamagedError
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side
from rankdump.contract.statistics import ITEMS

SUFFIX = ".csv"
FIXED = ("Input/Output", "Index", "Data Size", "Data Type", "Format", "Shape")
TITLES = {**ITEMS, "nan count": "Nan Count", "l2norm": "l2norm"}
"""Column title of each item, where CANN spells it otherwise than MindSpore does."""
_SIDES = {Side.INPUT: "Input", Side.OUTPUT: "Output"}
_SIDES_BACK = {word: side for side, word in _SIDES.items()}
_SCALAR = "-"
_COUNT = re.compile(r"[0-9]{1,20}")
# Some 5 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 14


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, read back."""

    side: Side
    slot: int
    data_bytes: int
    data_type: str
    """With the prefix, `DT_FLOAT`."""
    tensor_format: str
    shape: tuple[int, ...]
    values: tuple[tuple[str, str], ...]
    """Column title and text of each figure, in the table's order."""


def header(items: tuple[str, ...]) -> str:
    """Return the first line, without its end."""
    return ",".join((*FIXED, *(TITLES[item] for item in items)))


def row(kind: TensorKind, tensor_format: str, figures: str) -> str:
    """Return the line of one tensor, without its end; its figures are joined by commas."""
    return f"{_tensor(kind, tensor_format)}{figures and ','}{figures}"


@lru_cache(maxsize=_REMEMBERED)
def _tensor(kind: TensorKind, tensor_format: str) -> str:
    data_type = DATA_TYPES[NUMBERS.get(kind.dtype, 0)].name
    shape = "x".join(map(str, kind.shape)) or _SCALAR
    where = f"{_SIDES[kind.side]},{kind.slot},{kind.byte_count}"
    return f"{where},DT_{data_type},{tensor_format},{shape}"


def parse(text: str, *, file: str) -> list[Row]:
    """Read a whole table; DamagedError names the line at fault.

    A header that stands among the rows, as an interrupted writer may leave it, is passed over.
    """
    lines = text.split("\n")
    first = lines[0].split(",")
    if tuple(first[: len(FIXED)]) != FIXED:
        raise DamagedError(f"{file}: not an operator's table: it begins with {lines[0][:60]!r}")
    titles = [title for title in first[len(FIXED) :] if title]
    rows: list[Row] = []
    for at, line in enumerate(lines[1:], start=2):
        if line and line != lines[0]:
            try:
                rows.append(_row(line, titles))
            except ValueError as error:
                raise DamagedError(f"{file}, line {at}: {error}") from None
    return rows


def _row(line: str, titles: list[str]) -> Row:
    fields = line.split(",")
    if len(fields) < len(FIXED) + len(titles):
        raise ValueError(f"{len(fields)} fields for {len(FIXED) + len(titles)} columns")
    side, slot, data_bytes, data_type, tensor_format, shape = fields[: len(FIXED)]
    if side not in _SIDES_BACK:
        raise ValueError(f"{side[:60]!r} in the place of Input or Output")
    return Row(
        side=_SIDES_BACK[side],
        slot=_count(slot),
        data_bytes=_count(data_bytes),
        data_type=data_type,
        tensor_format=tensor_format,
        shape=() if shape == _SCALAR else tuple(map(_count, shape.split("x"))),
        values=tuple(zip(titles, fields[len(FIXED) :], strict=False)),
    )


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is no whole number")
    return int(text)
