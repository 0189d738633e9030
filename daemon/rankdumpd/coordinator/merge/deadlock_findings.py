"""Findings about deadlocks: calls that wait for each other in a circle and cannot end, one sentence
for each circle, with the call of each rank and the line of the script that made it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankdump._core.events import EventKind, Finding, FindingKind
from rankdumpd.coordinator.fleet_views import DEADLOCK_TEXT
from rankdumpd.coordinator.merge.absence_findings import (
    CallAbsences,
    build_call_finding,
    describe_call,
    describe_ranks,
)
from rankdumpd.coordinator.merge.call_order import CallMatch
from rankdumpd.coordinator.merge.event_table import EventTable

_SHOWN_PATH_PARTS = 2


def build_deadlock_findings(
    table: EventTable, match: CallMatch, absence: CallAbsences
) -> Iterator[Finding]:
    """Yield a finding for each circle of calls that cannot end."""
    for cycle in absence.cycles:
        after = (*cycle[1:], cycle[0])
        late = [
            _find_late_ranks(absence, call, following)
            for call, following in zip(cycle, after, strict=True)
        ]
        waiting = [late[-1], *late[:-1]]
        # The sentence begins with the lowest rank, so that it stays the same.
        start = min(range(len(cycle)), key=lambda at: waiting[at])
        order = [*range(start, len(cycle)), *range(start)]
        steps = [_describe_wait(table, match, cycle[at], waiting[at]) for at in order]
        waited_for = ", which ".join(
            f"{verb} for {describe_ranks(late[at])}" for at, verb in zip(order, steps, strict=True)
        )
        first = describe_call(table, match, cycle[start])
        ranks = tuple(sorted({rank for each in waiting for rank in each}))
        who = describe_ranks(waiting[start])
        text = f"{DEADLOCK_TEXT}{who} {waited_for}; none of them can continue"
        yield build_call_finding(FindingKind.CYCLE, text, first, ranks=ranks)


def _find_late_ranks(absence: CallAbsences, call: int, following: int) -> tuple[int, ...]:
    """Return the ranks missing in a call that wait in the following one."""
    return tuple(r for r in absence.missing[call] if absence.waiting.get(r) == following)


def _describe_wait(table: EventTable, match: CallMatch, call: int, ranks: tuple[int, ...]) -> str:
    """Return the predicate of a sentence on the wait of these ranks in a call."""
    members = match.list_members(call)
    own = [at for at in members if int(table.members["rank"][at]) in ranks]
    sources = (table.names[int(table.members["source"][at])] for at in own)
    lines = dict.fromkeys(map(shorten_source, sources))
    described = describe_call(table, match, call)
    kind = EventKind(int(table.members["kind"][members[0]])).name.lower()
    where = ", ".join(filter(None, (f"{kind} number {described.sequence}", *lines)))
    return f"wait{'s' * (len(ranks) == 1)} in group {described.group.name!r} ({where})"


def shorten_source(source: str) -> str:
    """Return the last parts of the path of a `file:line`.

    >>> shorten_source("/home/me/jobs/train.py:24")
    'jobs/train.py:24'
    """
    return "/".join(source.split("/")[-_SHOWN_PATH_PARTS:])
