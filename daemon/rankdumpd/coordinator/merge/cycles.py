"""Says which collectives and messages wait for each other in a circle. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import call_finding, call_words


def cycle_findings(table: Table, match: Match, sequence: CallOrder) -> Iterator[Finding]:
    """Say which calls form each circle, and which one the order puts first."""
    for cycle in sequence.cycles:
        circle = "; then ".join(call_words(table, match, call).text for call in (*cycle, cycle[0]))
        first = call_words(table, match, min(cycle, key=sequence.index.__getitem__))
        members = [member for call in cycle for member in match.of(call)]
        yield call_finding(
            FindingKind.CYCLE,
            f"ranks wait for each other in a circle: {circle}; by time goes first: {first.text}",
            first,
            ranks=tuple(sorted(set(table.members["rank"][members].tolist()))),
        )
