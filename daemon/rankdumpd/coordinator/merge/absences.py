"""Finds who should have taken part in a collective or message and did not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rankdump.contract.events import EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import call_words

_SILENT = (-1, False)


def missing_members(
    table: Table, match: Match, sequence: CallOrder, excluded: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Return the missing ranks of each call that misses any, in the order of the calls."""
    group = table["group"][match.first_rows]
    sizes = np.array([len(set(each.ranks) - excluded) for each in table.groups], dtype="i8")
    present = np.diff(match.bounds)
    alone = ~match.collective & (match.send_of < 0)
    alone[match.send_of[match.send_of >= 0]] = False
    suspect = alone | (match.collective & (present != sizes[group]))
    missing: dict[int, tuple[int, ...]] = {}
    for call in sequence.order[suspect[sequence.order]].tolist():
        rows = match.rows_of(call)
        if alone[call]:
            gone = {int(table["peer"][rows[0]])} - excluded
        else:
            here = set(table["rank"][rows].tolist())
            gone = set(table.groups[int(group[call])].ranks) - here - excluded
        if gone:
            missing[call] = tuple(sorted(gone))
    return missing


def absence_findings(
    table: Table, match: Match, missing: Mapping[int, tuple[int, ...]]
) -> Iterator[str]:
    """Say who is missing: once for each rank and group, with the first call and how many more."""
    calls: dict[tuple[int, tuple[int, bool]], list[int]] = {}
    for call, ranks in missing.items():
        where = (int(table["group"][match.rows_of(call)[0]]), bool(match.collective[call]))
        for rank in ranks:
            calls.setdefault((rank, where if rank in table.ranks else _SILENT), []).append(call)
    for (rank, where), missed in calls.items():
        what = call_words(table, match, missed[0])
        more = f" and {len(missed) - 1} more after it" if len(missed) > 1 else ""
        if where == _SILENT:
            yield f"rank {rank} reported nothing but belongs to {what}{more}"
        elif where[1]:
            yield f"rank {rank} never arrived at {what}{more}; {_last_operator(table, rank)}"
        else:
            yield f"{what}{more} has no other end on rank {rank}; {_last_operator(table, rank)}"


def _last_operator(table: Table, rank: int) -> str:
    span = table.ranks[rank]
    operators = np.flatnonzero(table["kind"][span] == int(EventKind.OPERATOR))
    if not len(operators):
        return "it executed no operator"
    row = span.start + int(operators[-1])
    return f"its last operator is {table.name(row)!r} at position {int(table['position'][row])}"
