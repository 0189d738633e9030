"""Rows of tensors as several pages list them, and the statements that find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._core.scope_names import format_scope_name
from rankdump._web.dump_source import DumpSource

_ROW_COLUMNS = (
    "CAST(job AS VARCHAR) AS job, rank, attempt, iteration, position, "
    "CAST(name AS VARCHAR) AS name, "
    "CAST(op_type AS VARCHAR) AS op_type, CAST(side AS VARCHAR) AS side, slot, "
    "CAST(argument AS VARCHAR) AS argument, CAST(dtype AS VARCHAR) AS dtype, shape, "
    "CAST(layout AS VARCHAR) AS layout, bytes, digest, l2norm, max, min, avg, nan_count, path, "
    f"CAST(member AS VARCHAR) AS member, ({NONFINITE}) AS nonfinite"
)
_TEXTS = (
    *("job", "name", "op_type", "side", "argument", "dtype", "layout", "digest", "path", "member"),
)
_NUMBERS = ("rank", "attempt", "position", "slot", "bytes")
_STATISTICS = ("l2norm", "max", "min", "avg")
EXECUTION_ORDER = "iteration NULLS LAST, rank, attempt, position"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a rank in one iteration."""

    job: str
    rank: int
    attempt: int
    iteration: int | None
    """None for a constant of a graph."""
    position: int
    name: str
    short_name: str
    op_type: str
    side: str
    slot: int
    argument: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    bytes: int
    digest: str
    l2norm: float | None
    max: float | None
    min: float | None
    avg: float | None
    nonfinite: bool
    path: str
    """Below the root; empty for statistics without elements."""
    member: str


def match_rows(
    *, search: str = "", rank: int | None = None, iteration: int | None = None
) -> tuple[list[str], list[object]]:
    """Return conditions of a SELECT over `tensors`, joined by AND, and their values.

    `search` is a part of the name of the operator, without regard to case.
    """
    conditions, values = ["true"], list[object]()
    if search:
        conditions.append("contains(lower(CAST(name AS VARCHAR)), lower(?))")
        values.append(search)
    for name, value in (("rank", rank), ("iteration", iteration)):
        if value is not None:
            conditions.append(f"{name} = ?")
            values.append(value)
    return conditions, values


def read_rows(source: DumpSource, rest: str, values: Sequence[object]) -> tuple[TensorRow, ...]:
    """Return rows of a SELECT over `tensors`, whose `rest` begins behind WHERE."""
    found = source.get_rows(f"SELECT {_ROW_COLUMNS} FROM tensors WHERE {rest}", values)
    return tuple(map(make_row, found))


def make_row(found: Mapping[str, Any]) -> TensorRow:
    """Return a row that was selected by `read_rows`."""
    known: dict[str, Any] = {name: found[name] or "" for name in _TEXTS}
    known |= {name: found[name] or 0 for name in _NUMBERS}
    known |= {name: None if found[name] is None else float(found[name]) for name in _STATISTICS}
    return TensorRow(
        iteration=found["iteration"],
        short_name=format_scope_name(found["name"] or ""),
        shape=tuple(found["shape"] or ()),
        nonfinite=bool(found["nonfinite"]),
        **known,
    )
