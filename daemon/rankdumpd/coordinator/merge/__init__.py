"""Merges what the ranks of a job executed in one iteration into one order. Pure: no clock, no I/O.

The order keeps what is known and guesses nothing else:

1. the operators of a rank stand in the order in which they started;
2. a collective or message stands after everything that its members started before it, and
   before everything that they started after it was complete; what starts in between is free.
   Of two collectives on one rank the first comes first only when it was complete before the
   other started;
3. a send stands before its receive;
4. what is still free goes by time: `start_us`, on each rank never falling. A collective counts
   as old as the last event that a member started before it was complete.

Rule 4 is exact: if the time of an entry is the latest among itself and all that must stand before
it, the entries are sorted by that time; operators of one time by (rank, position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankdump.contract.events import EventColumns
from rankdumpd.coordinator.merge.absences import absence_findings, missing_members
from rankdumpd.coordinator.merge.cycles import cycle_findings
from rankdumpd.coordinator.merge.differences import difference_findings
from rankdumpd.coordinator.merge.match import matched
from rankdumpd.coordinator.merge.place import ordered_calls, placed
from rankdumpd.coordinator.merge.sequence import sequenced
from rankdumpd.coordinator.merge.table import tabled
from rankdumpd.coordinator.values import GlobalOrder


def merge(
    events: Mapping[int, Sequence[EventColumns]],
    *,
    iteration: int,
    excluded: frozenset[int] = frozenset(),
) -> GlobalOrder:
    """Return the order of one iteration, given the batches of each rank.

    Members in `excluded` are not missed: the plan leaves them out.
    """
    table = tabled(events)
    match = matched(table)
    sequence = sequenced(table, match)
    missing = missing_members(table, match, sequence, excluded)
    findings = (
        *table.findings,
        *difference_findings(table, match, sequence),
        *absence_findings(table, match, missing),
        *cycle_findings(table, match, sequence),
    )
    return GlobalOrder(
        iteration=iteration,
        names=table.names,
        groups=table.groups,
        columns=placed(table, match, sequence),
        calls=ordered_calls(table, match, sequence, missing),
        findings=tuple(f"iteration {iteration}: {finding}" for finding in findings),
    )
