"""Finds where events of a rank were lost, so that nobody is called missing there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.values import IterationView

Hole = tuple[int, int]
"""First and last of positions that follow each other."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Positions of each rank's program whose events were lost."""

    holes: Mapping[int, tuple[Hole, ...]]
    """Of each rank that lost any, rising."""

    def between(self, rank: int, low: int, high: int) -> bool:
        """Return whether a rank lost anything between two of its positions."""
        return any(first < high and last > low for first, last in self.holes.get(rank, ()))


def unfinished(view: IterationView, rank: int) -> bool:
    """Return whether a rank may still execute something of the iteration."""
    if rank in view.spans:
        return False
    return view.provisional or rank in view.late or view.late_count > len(view.late)


def gaps_of(table: Table, view: IterationView) -> Gaps:
    """Return what was lost of each rank.

    A rank that has not said which positions belong to the iteration lost at least what lies
    between its own; while it still runs, that is only under way.
    """
    holes: dict[int, tuple[Hole, ...]] = {}
    for rank in sorted({*table.ranks, *view.spans}):
        span = view.spans.get(rank, (0, 0))
        if span != (0, 0) or (rank in table.ranks and not view.provisional):
            positions = table["position"][table.ranks.get(rank, slice(0, 0))]
            found = _holes(positions, span)
            if found:
                holes[rank] = found
    return Gaps(holes)


def _holes(positions: Column, span: Hole) -> tuple[Hole, ...]:
    if span != (0, 0):
        low = np.searchsorted(positions, np.array(span[0], positions.dtype), side="left")
        high = np.searchsorted(positions, np.array(span[1], positions.dtype), side="right")
        positions = positions[low:high]
    if not len(positions):
        return (span,) if span != (0, 0) and span[0] <= span[1] else ()
    ends = (int(positions[0]), int(positions[-1]))
    first, last = span if span != (0, 0) else ends
    if last - first + 1 == len(positions):
        return ()
    before = np.flatnonzero(np.diff(positions) > 1)
    lows, highs = positions[before].tolist(), positions[before + 1].tolist()
    inner = [(low + 1, high - 1) for low, high in zip(lows, highs, strict=True)]
    head = [(first, ends[0] - 1)] if first < ends[0] else []
    tail = [(ends[1] + 1, last)] if last > ends[1] else []
    return (*head, *inner, *tail)


def gap_findings(gaps: Gaps) -> Iterator[Finding]:
    """Say once for each rank how many of its events were lost, and where."""
    for rank, holes in gaps.holes.items():
        count = sum(last - first + 1 for first, last in holes)
        first, last = holes[0][0], holes[-1][1]
        events = f"{count} events" if count != 1 else "1 event"
        where = f"between positions {first} and {last}" if last > first else f"at position {first}"
        holed = f", in {len(holes)} holes" if len(holes) > 1 else ""
        yield Finding(
            kind=FindingKind.GAP,
            iteration=0,
            text=f"{events} of rank {rank} {'was' if count == 1 else 'were'} lost "
            f"{where} of its program{holed}: what is missing there is not known to be missing",
            ranks=(rank,),
            position=first,
        )
