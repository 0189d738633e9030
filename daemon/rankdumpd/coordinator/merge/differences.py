"""Finds where the members of one collective or message disagree. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import call_finding, call_words, ranks_words

_UNEVEN = (EventKind.GATHER, EventKind.SCATTER, EventKind.ALL_TO_ALL)
"""Where members may rightly name different numbers of elements."""
_Sides = dict[str, list[int]]
"""Ranks by what they say."""
_Difference = tuple[FindingKind, int, tuple[int, ...]]
"""What members disagree on, in which group, and those who differ."""


def difference_findings(table: Table, match: Match, sequence: CallOrder) -> Iterator[Finding]:
    """Say where members disagree on the kind, the element count or the element type.

    Once for each group and those who differ in it, with the first call and how many more.
    """
    suspect = _suspects(table, match)
    calls: dict[_Difference, list[tuple[int, _Sides]]] = {}
    for call in sequence.order[suspect[sequence.order]].tolist():
        members = match.of(call)
        if match.send_of[call] >= 0:
            members = match.of(int(match.send_of[call])) + members
        group = int(table.members["group"][members[0]])
        collective = bool(match.collective[call])
        for kind, sides in _disagreements(table, members, collective=collective):
            calls.setdefault((kind, group, _minority(sides)), []).append((call, sides))
    for (kind, _, ranks), differing in calls.items():
        call, sides = differing[0]
        words = call_words(table, match, call)
        said = ", ".join(f"{value} on {ranks_words(side)}" for value, side in sides.items())
        more = f"; the same ranks differ in {len(differing) - 1} more" if len(differing) > 1 else ""
        text = f"members of {words.text} disagree: {said}{more}"
        yield call_finding(kind, text, words, ranks=ranks)


def _suspects(table: Table, match: Match) -> Column:
    """Return whether a call deserves a closer look; cheap, for most never do."""
    suspect = np.zeros(len(match), dtype=bool)
    if not len(match):
        return suspect
    starts = match.bounds[:-1]
    first = match.first
    for field in ("kind", "element_count", "dtype"):
        values = table.members[field][match.members]
        differs = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
        if field == "element_count":
            differs &= ~np.isin(table.members["kind"][first], _UNEVEN)
        suspect |= differs
        if field != "kind":
            ends = table.members[field][first]
            suspect |= (match.send_of >= 0) & (ends != ends[match.send_of])
    return suspect


def _disagreements(
    table: Table, members: list[int], *, collective: bool
) -> Iterator[tuple[FindingKind, _Sides]]:
    """Yield what those members say differently; who leaves a thing unsaid contradicts nobody."""
    said = {field: table.members[field][members].tolist() for field in _SAID}
    kinds = [EventKind(kind) for kind in said["kind"]]
    types: list[int] = said["dtype"]
    dtypes = [table.names[index] for index in types]
    if collective and len(set(kinds)) > 1:
        # Two different operations met: their sizes have no reason to agree.
        operations = _sides([kind.name.lower() for kind in kinds], said["rank"])
        yield FindingKind.OPERATION_MISMATCH, operations
        return
    if kinds[0] not in _UNEVEN:
        each = zip(said["element_count"], dtypes, strict=True)
        sizes = [f"{count} elements" if count or dtype else "" for count, dtype in each]
        sides = _sides(sizes, said["rank"])
        if len(sides) > 1:
            yield FindingKind.SIZE_MISMATCH, sides
    sides = _sides(dtypes, said["rank"])
    if len(sides) > 1:
        yield FindingKind.DTYPE_MISMATCH, sides


_SAID = ("kind", "element_count", "dtype", "rank")


def _sides(values: Sequence[str], ranks: Sequence[int]) -> _Sides:
    sides: _Sides = {}
    for value, rank in zip(values, ranks, strict=True):
        if value:
            sides.setdefault(value, []).append(rank)
    return sides


def _minority(sides: _Sides) -> tuple[int, ...]:
    """Return the ranks that do not say what most say; of equals the first counts."""
    most = max(sides.values(), key=len)
    return tuple(sorted(rank for side in sides.values() if side is not most for rank in side))
