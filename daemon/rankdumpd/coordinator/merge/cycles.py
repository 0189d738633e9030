"""Says which collectives and messages wait for each other in a circle. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import call_finding, call_words


def cycle_findings(
    table: Table, match: Match, sequence: CallOrder, standing: Sequence[tuple[int, ...]]
) -> Iterator[Finding]:
    """Say which calls form each circle: those that came to an end, and those still `standing`.

    Of the former also which one the order puts first.
    """
    for cycle in sequence.cycles:
        yield _finding(table, match, sequence, cycle, "by time goes first: ")
    for cycle in standing:
        yield _finding(table, match, sequence, cycle, "nobody gets any further; the oldest is ")


def _finding(
    table: Table, match: Match, sequence: CallOrder, cycle: tuple[int, ...], oldest: str
) -> Finding:
    circle = "; then ".join(call_words(table, match, call).text for call in (*cycle, cycle[0]))
    first = call_words(table, match, min(cycle, key=sequence.index.__getitem__))
    members = [member for call in cycle for member in match.of(call)]
    return call_finding(
        FindingKind.CYCLE,
        f"ranks wait for each other in a circle: {circle}; {oldest}{first.text}",
        first,
        ranks=tuple(sorted(set(table.members["rank"][members].tolist()))),
    )
