"""Merges what the ranks of a job executed in one iteration into one order. Pure: no clock, no I/O.

The order keeps what is known and guesses nothing else:

1. the operators of a rank stand in the order in which they started;
2. a collective or message stands after everything that its members started before it, and
   before everything that they started after it was complete; what starts in between is free.
   Of two collectives on one rank the first comes first only when it was complete before the
   other started. Nothing has to stand after what is not complete;
3. a send stands before its receive;
4. what is still free goes by time: `start_us`, corrected as the exits from collectives say
   (`clocks`), on each rank never falling. A collective counts as old as the last event that a
   member started before it was complete.

Rule 4 is exact: if the time of an entry is the latest among itself and all that must stand before
it, the entries are sorted by that time; operators of one time by (rank, position).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.absences import Absence, absence_findings, missing_members
from rankdumpd.coordinator.merge.clocks import corrections
from rankdumpd.coordinator.merge.cycles import cycle_findings
from rankdumpd.coordinator.merge.differences import difference_findings
from rankdumpd.coordinator.merge.gaps import gap_findings, gaps_of
from rankdumpd.coordinator.merge.match import matched
from rankdumpd.coordinator.merge.place import ordered_calls, placed
from rankdumpd.coordinator.merge.programs import program_findings
from rankdumpd.coordinator.merge.sequence import sequenced
from rankdumpd.coordinator.merge.shift import shifted
from rankdumpd.coordinator.merge.table import Table, tabled
from rankdumpd.coordinator.values import GlobalOrder, IterationView


def merge(view: IterationView) -> GlobalOrder:
    """Return the order of one iteration; members that the plan leaves out are not missed."""
    table = tabled(view.events)
    match = matched(table)
    sequence = sequenced(table, match)
    found = corrections(table, match, sequence, view.clocks)
    if found:
        table = shifted(table, match, sequence, found, view.clocks)
        sequence = sequenced(table, match)
    gaps = gaps_of(table, view)
    missing = missing_members(table, match, sequence, gaps, view.excluded)
    absence = Absence.of(table, match, missing)
    findings = (
        *_conflict_findings(table),
        *gap_findings(gaps),
        *difference_findings(table, match, sequence),
        *absence_findings(table, match, absence, view),
        *cycle_findings(table, match, sequence, absence.circles),
        *program_findings(table, gaps, view),
    )
    return GlobalOrder(
        iteration=view.iteration,
        names=table.names,
        groups=table.groups,
        columns=placed(table, match, sequence),
        calls=ordered_calls(table, match, sequence, missing),
        findings=tuple(_dated(finding, view) for finding in findings),
        skews={clock: int(correction.levels[-1]) for clock, correction in found.items()},
    )


def _conflict_findings(table: Table) -> Iterator[Finding]:
    for rank, positions in table.conflicts.items():
        first, *others = positions
        more = f" and at {len(others)} more" if others else ""
        yield Finding(
            kind=FindingKind.CONFLICT,
            iteration=0,
            text=f"rank {rank}: two different events at position {first}{more}",
            ranks=(rank,),
            position=first,
        )


def _dated(finding: Finding, view: IterationView) -> Finding:
    return replace(
        finding,
        iteration=view.iteration,
        text=f"iteration {view.iteration}: {finding.text}",
        provisional=view.provisional,
    )
