"""`statistic.csv`: header, rows, and reading both back. Pure.

Source: mindspore-dump.md 3.2 and 3.3. A row ends in a comma that the header has not; readers of
any release take files with and without it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankdump.contract.errors import DamagedError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side, sanitised
from rankdump.contract.layout.mindspore_sync import STATISTIC_FILE, spelt
from rankdump.contract.layout.profile import Profile
from rankdump.contract.statistics import ITEMS

FIXED = (
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
_FORMAT, _FORMAT_AT = "Format", 9
WITH_FORMAT = (*FIXED[:_FORMAT_AT], _FORMAT, *FIXED[_FORMAT_AT:])
"""As tools of CANN write them (ascend-formats.md 4.6); the words of sides are capitals there."""
OLD_ITEMS = tuple(item for item in ITEMS if item not in ("md5", "l2norm"))
"""The ten columns of releases that let nobody choose, in their order."""
# Some 5 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 14


TABLE = re.compile(r"statistic(?:\.[0-9a-f]{8})?\.csv")
"""Name of a table: MindSpore's, or what `beside` gives."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, read back."""

    op_type: str
    op_name: str
    """As the table spells it."""
    task: int
    stream: int
    timestamp_us: int
    side: Side
    slot: int
    data_bytes: int
    dtype: str
    shape: tuple[int, ...]
    values: tuple[tuple[str, str], ...]
    """Column title and text of each figure, in the table's order."""


def items_of(items: tuple[str, ...], profile: Profile) -> tuple[str, ...]:
    """Return the items a table of that profile has, given those that were asked for."""
    return OLD_ITEMS if profile.fixed_table else items


def beside(header: str, name: str = STATISTIC_FILE) -> str:
    """Return the name of a table with these columns, where another job's stands under the usual."""
    digest = hashlib.blake2b(header.encode(), digest_size=4).hexdigest()
    return f"{name.removesuffix('.csv')}.{digest}.csv"


def header(items: tuple[str, ...]) -> str:
    """Return the first line, without its end."""
    return ",".join((*FIXED, *(ITEMS[item] for item in items)))


def field(name: str) -> str:
    """Return a name as it can stand in a row: a comma or a quote in it would move the columns."""
    return name.replace(",", "_").replace('"', "_")


def row(head: RecordHead, figures: Sequence[str], profile: Profile) -> str:
    """Return the line of one tensor, without its end."""
    operator, tensor = _around(head.kind, profile)
    end = "" if profile.fixed_table else ","
    fixed = f"{operator},{head.task},{head.stream},{head.timestamp_us},{tensor}"
    return ",".join((fixed, *figures)) + end


def figure_row(
    kind: TensorKind, timestamp_us: int, figures: str, profile: Profile, *, unknown_id: int = 0
) -> str:
    """Return the line of a tensor of which only figures came, joined by commas.

    Task and stream of its operator are not known.
    """
    operator, tensor = _around(kind, profile)
    end = "" if profile.fixed_table else ","
    when = f"{unknown_id},{unknown_id},{timestamp_us}"
    return f"{operator},{when},{tensor}{figures and ','}{figures}{end}"


@lru_cache(maxsize=_REMEMBERED)
def _around(kind: TensorKind, profile: Profile) -> tuple[str, str]:
    return (
        _operator(kind.op_type, kind.op_name, profile),
        _tensor(kind.side.value, kind.slot, kind.byte_count, kind.dtype, kind.shape),
    )


@lru_cache(maxsize=_REMEMBERED)
def _operator(op_type: str, op_name: str, profile: Profile) -> str:
    return f"{field(sanitised(op_type))},{field(spelt(op_type, op_name, profile))}"


def _tensor(side: str, slot: int, byte_count: int, dtype: str, shape: tuple[int, ...]) -> str:
    extents = ",".join(map(str, shape))
    return f'{side},{slot},{byte_count},{dtype},"({extents})"'


def parse(text: str, *, file: str) -> list[Row]:
    """Read a whole table; DamagedError names the line at fault.

    A header that stands among the rows, as an interrupted writer may leave it, is passed over.
    """
    lines = text.split("\n")
    first = lines[0].split(",")
    fixed = WITH_FORMAT if first[_FORMAT_AT:][:1] == [_FORMAT] else FIXED
    if tuple(first[: len(fixed)]) != fixed:
        raise DamagedError(f"{file}: not a statistic table: it begins with {lines[0][:60]!r}")
    titles = [title for title in first[len(fixed) :] if title]
    rows: list[Row] = []
    for at, line in enumerate(lines[1:], start=2):
        if line and line != lines[0]:
            try:
                rows.append(_row(line, titles, len(fixed)))
            except (ValueError, IndexError) as error:
                raise DamagedError(f"{file}, line {at}: {error}") from None
    return rows


def _row(line: str, titles: list[str], columns: int) -> Row:
    before, quote, rest = line.partition('"(')
    shape, closed, after = rest.partition(')"')
    fields = before.split(",")
    if not quote or not closed or len(fields) != columns:
        raise ValueError(f"it has no shape in its column {columns}")
    values = after.split(",")[1:]
    if len(values) < len(titles):
        raise ValueError(f"{len(values)} figures for {len(titles)} columns")
    return Row(
        op_type=fields[0],
        op_name=fields[1],
        task=int(fields[2]),
        stream=int(fields[3]),
        timestamp_us=int(fields[4]),
        side=Side(fields[5].lower()),
        slot=int(fields[6]),
        data_bytes=int(fields[7]),
        dtype=fields[8],
        shape=tuple(int(extent) for extent in shape.split(",") if extent),
        values=tuple(zip(titles, values, strict=False)),
    )
