"""Finds where the members of one collective or message disagree. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import call_words, ranks_words

_UNEVEN = (EventKind.GATHER, EventKind.SCATTER, EventKind.ALL_TO_ALL)
"""Where members may rightly name different numbers of elements."""


def difference_findings(table: Table, match: Match, sequence: CallOrder) -> Iterator[str]:
    """Say where members disagree on the kind, the element count or the element type."""
    suspect = _suspects(table, match)
    for call in sequence.order[suspect[sequence.order]].tolist():
        rows = match.rows_of(call)
        if match.send_of[call] >= 0:
            rows = match.rows_of(int(match.send_of[call])) + rows
        for words in _disagreements(table, rows, collective=bool(match.collective[call])):
            yield f"members of {call_words(table, match, call)} disagree: {words}"


def _suspects(table: Table, match: Match) -> Column:
    """Return whether a call deserves a closer look; cheap, for most never do."""
    suspect = np.zeros(len(match), dtype=bool)
    if not len(match):
        return suspect
    starts = match.bounds[:-1]
    first = match.first_rows
    for field in ("kind", "element_count", "dtype"):
        values = table[field][match.rows]
        differs = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
        if field == "element_count":
            differs &= ~np.isin(table["kind"][first], _UNEVEN)
        suspect |= differs
        if field != "kind":
            ends = table[field][first]
            suspect |= (match.send_of >= 0) & (ends != ends[match.send_of])
    return suspect


def _disagreements(table: Table, rows: list[int], *, collective: bool) -> Iterator[str]:
    """Yield what those members say differently; who leaves a thing unsaid contradicts nobody."""
    ranks: list[int] = table["rank"][rows].tolist()
    kinds = [EventKind(kind) for kind in table["kind"][rows].tolist()]
    counts: list[int] = table["element_count"][rows].tolist()
    types: list[int] = table["dtype"][rows].tolist()
    dtypes = [table.names[index] for index in types]
    if collective and len(set(kinds)) > 1:
        # Two different operations met: their sizes have no reason to agree.
        yield _sides([kind.name.lower() for kind in kinds], ranks)
        return
    if kinds[0] not in _UNEVEN:
        said = zip(counts, dtypes, strict=True)
        sizes = [f"{count} elements" if count or dtype else "" for count, dtype in said]
        yield from _differing(sizes, ranks)
    yield from _differing(dtypes, ranks)


def _differing(values: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    said = [(value, rank) for value, rank in zip(values, ranks, strict=True) if value]
    if len({value for value, _ in said}) > 1:
        yield _sides([value for value, _ in said], [rank for _, rank in said])


def _sides(values: Sequence[str], ranks: Sequence[int]) -> str:
    sides: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        sides.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks_words(side)}" for value, side in sides.items())
