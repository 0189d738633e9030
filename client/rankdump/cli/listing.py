"""A tree's entries as lines: the overview of ranks and iterations, and tensors one by one. Pure
but for the headers of files that no manifest describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rankdump.cli.table import Column, numbers, table
from rankdump.cli.text import label, ratio, shape, size
from rankdump.contract.errors import DamagedError
from rankdump.contract.key import Side
from rankdump.reader import Entry, Facts, Tree, facts, ranges

MOST_GROUPS = 40
_OVERVIEW_COLUMNS = (
    *numbers("rank", "iteration", "operators", "inputs", "outputs", "bytes in", "on disk", "ratio"),
    Column("state"),
)
_TENSOR_COLUMNS = (
    Column("operator", flexible=True),
    Column("side"),
    *numbers("slot"),
    Column("dtype"),
    *numbers("shape", "size"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor with what a listing says of it."""

    entry: Entry
    facts: Facts | None
    """None when the file is damaged."""
    damage: str = ""


def described(entries: Iterable[Entry]) -> list[Row]:
    """Return the entries with their facts; damage is said in the row, and the listing goes on."""
    rows: list[Row] = []
    for entry in entries:
        try:
            rows.append(Row(entry, facts(entry)))
        except DamagedError as error:
            rows.append(Row(entry, None, str(error)))
    return rows


def overview(tree: Tree, *, width: int) -> list[str]:
    """Return one line per rank and iteration, or per rank where that would be too many."""
    complete = {(m.status.rank, m.status.iteration) for m in tree.manifests}
    groups = _grouped(tree.entries, by_iteration=True)
    if len(groups) > MOST_GROUPS:
        groups = _grouped(tree.entries, by_iteration=False)
    rows = [_overview_row(group, complete) for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        rows.append(["..." for _ in _OVERVIEW_COLUMNS])
    return table(_OVERVIEW_COLUMNS, rows, width=width)


def tensors(rows: Sequence[Row], *, width: int) -> list[str]:
    """Return one line per tensor under a line for each rank and iteration."""
    lines: list[str] = []
    for (rank, iteration, net, graph), group in groupby(rows, key=_group_of):
        if lines:
            lines.append("")
        lines.append(f"rank {rank}, iteration {iteration}, net {net}, graph {graph}")
        lines += table(_TENSOR_COLUMNS, [_tensor_row(row) for row in group], width=width)
    return lines


def _group_of(row: Row) -> tuple[int, int, str, int]:
    key = row.entry.key
    return key.rank, key.iteration, key.net_name, key.graph


def _grouped(entries: Sequence[Entry], *, by_iteration: bool) -> list[list[Entry]]:
    def place(entry: Entry) -> tuple[int, int]:
        return entry.key.rank, entry.key.iteration if by_iteration else 0

    return [list(group) for _, group in groupby(entries, key=place)]


def _overview_row(group: list[Entry], complete: set[tuple[int, int]]) -> list[str]:
    rank = group[0].key.rank
    iterations = {entry.key.iteration for entry in group}
    unfinished = [i for i in iterations if (rank, i) not in complete]
    inputs = sum(entry.key.side is Side.INPUT for entry in group)
    known = all(entry.record for entry in group)
    bytes_in = sum(entry.record.bytes_in for entry in group if entry.record)
    stored = sum(
        entry.record.bytes_stored if entry.record else entry.stored_bytes for entry in group
    )
    return [
        str(rank),
        ranges(iterations),
        f"{len({(entry.key.iteration, entry.op_name) for entry in group}):,}",
        f"{inputs:,}",
        f"{len(group) - inputs:,}",
        size(bytes_in) if known else "-",
        size(stored),
        ratio(bytes_in, stored) if known else "-",
        _state(iterations, unfinished),
    ]


def _state(iterations: set[int], unfinished: list[int]) -> str:
    if not unfinished:
        return "complete"
    return "incomplete" if len(iterations) == 1 else f"incomplete: {ranges(unfinished)}"


def _tensor_row(row: Row) -> list[str]:
    entry, known = row.entry, row.facts
    dtype, extents, length = (
        (known.dtype, shape(known.shape), size(known.bytes_in)) if known else ("damaged", "", "")
    )
    key = entry.key
    return [_name(entry), key.side.value, str(key.slot), dtype, extents, length]


def _name(entry: Entry) -> str:
    """Return the label with the type, which most names end in."""
    name = label(entry.op_name)
    kind = entry.op_type
    return name if name.rpartition("/")[2].startswith(kind) else f"{kind} {name}"
