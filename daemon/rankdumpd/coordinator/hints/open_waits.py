"""Open waits: calls that have begun while a member has not arrived, the part of the wait that is
certain, and the causes that a longer timeout does not cure: a deadlock, members that call different
operations, a rank that has ended. Pure. An absence is claimed only up to the time up to which the
rank has reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumn,
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
)
from rankdump._core.status import RankWait, SessionState, SessionStatus
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_duration
from rankdumpd.coordinator.fleet_views import IterationView, JobFacts, RankCoverage, is_deadlock
from rankdumpd.coordinator.hints.assessment import (
    GroupWait,
    assess_wait,
    describe_hint_call,
    withdraw_settings,
)
from rankdumpd.coordinator.hints.spread_history import HintState, WidestSpread
from rankdumpd.coordinator.hints.timeout_limits import collect_group_limits

FRESH_REPORT_US = 10_000_000
"""A rank counts as current if its last report is at most this old, in microseconds; agents report
once a second.
"""


@dataclass(frozen=True, slots=True)
class WaitClaim:
    """The time for which a call is known to have waited for one rank."""

    rank: int
    known_us: int
    reason: str = ""
    """Why the wait may be longer; empty when the reports of the rank are current."""


def estimate_wait(
    rank: int, coverage: RankCoverage | None, *, start_us: int, now_us: int
) -> WaitClaim:
    """Return for how long a call that began at `start_us` is known to have waited for a rank."""
    if coverage is None:
        return WaitClaim(rank, 0, f"rank {rank} has reported nothing so far")
    known_us = max(0, min(now_us, coverage.until_us) - start_us)
    behind_us = now_us - coverage.until_us
    if behind_us <= FRESH_REPORT_US:
        return WaitClaim(rank, known_us)
    reason = f"what rank {rank} did in the last {format_duration(behind_us)} is not known"
    if coverage.agent:
        reason += f": {coverage.agent}"
    return WaitClaim(rank, known_us, reason)


def select_surest_claim(claims: Sequence[WaitClaim], stuck: set[int]) -> WaitClaim:
    """Return the claim that explains a wait best.

    A rank that itself waits in another call is named only when no other rank is known to be as
    late.
    """
    longest_us = max(claim.known_us for claim in claims)
    near = [claim for claim in claims if 2 * claim.known_us >= longest_us]
    return min(near, key=lambda claim: (claim.rank in stuck, claim.rank))


_NO_ACTIVITY = "has reported nothing of this iteration"


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call that has begun on a rank and is not complete."""

    rank: int
    position: int
    kind: EventKind
    name: str
    group: ProcessGroup
    sequence: int
    peer: int
    start_us: int
    stall_us: int
    source: str


_MAX_ABSENT_RANKS = 64


def find_rank_waits(view: IterationView, now_us: int) -> tuple[RankWait, ...]:
    """Return the call that each rank waits in, which is the rank's last event if it is not
    complete.
    """
    ranks = {rank: _RankCalls(rank, batches) for rank, batches in view.events.items()}
    waits: list[RankWait] = []
    for rank, calls in sorted(ranks.items()):
        call = calls.find_last_call()
        if call is None:
            continue
        absent = _find_absent_ranks(call, ranks, view.excluded)
        waits.append(
            RankWait(
                job_id=view.job_id,
                rank=rank,
                iteration=view.iteration,
                kind=call.kind.name.lower(),
                name=call.name,
                group=call.group.name,
                sequence=min(call.sequence, OPEN_END_POSITION),
                start_us=max(0, call.start_us),
                waited_us=max(0, now_us - call.start_us),
                source=call.source,
                absent=tuple(absent[:_MAX_ABSENT_RANKS]),
            )
        )
    return tuple(waits)


def find_open_waits(
    view: IterationView, facts: JobFacts, now_us: int, state: HintState | None = None
) -> tuple[TimeoutHint, ...]:
    """Return a hint for every group whose members now wait for another member.

    A wait is claimed only up to the time up to which the late rank has reported, because the rank
    may have arrived since. `state` has the stalls of ranks without a call in this iteration.
    """
    ranks = {rank: _RankCalls(rank, batches) for rank, batches in view.events.items()}
    calls = [call for rank in ranks.values() for call in rank.iter_open_calls()]
    stalls: Mapping[int, int] = state.stalls if state else {}
    hints: dict[ProcessGroup, TimeoutHint] = {}
    stuck = {call.rank for call in calls}
    for call in _select_earliest_calls(calls):
        absent = _find_absent_ranks(call, ranks, view.excluded)
        if not absent:
            continue
        claims = [
            estimate_wait(rank, view.coverage.get(rank), start_us=call.start_us, now_us=now_us)
            for rank in absent
        ]
        claim = select_surest_claim(claims, stuck)
        wait = _build_wait(call, claim, ranks, view, now_us=now_us, merged=stalls)
        limits = collect_group_limits(
            call.group, call.group.ranks or (call.rank, claim.rank), facts
        )
        hint = assess_wait(wait, limits, facts)
        known = hints.get(call.group)
        if known is None or hint.share > known.share:
            hints[call.group] = hint
    return tuple(hints.values())


def _select_earliest_calls(calls: Sequence[_OpenCall]) -> list[_OpenCall]:
    """Return the earliest open call of each collective, and the open calls of all messages."""
    first: dict[object, _OpenCall] = {}
    for call in sorted(calls, key=lambda call: (call.start_us, call.rank)):
        ends = (call.rank, call.peer) if call.kind.other_end else None
        first.setdefault((call.group, call.sequence, ends), call)
    return list(first.values())


def _find_absent_ranks(
    call: _OpenCall, ranks: Mapping[int, _RankCalls], excluded: frozenset[int]
) -> list[int]:
    """Return the ranks that have not arrived at a call."""
    if call.kind.other_end:
        answer = int(call.kind.other_end)
        others, kinds = [call.peer], (answer, answer)
    else:
        others = [rank for rank in call.group.ranks if rank != call.rank]
        kinds = (int(EventKind.ALL_REDUCE), int(EventKind.BARRIER))
    return [
        rank
        for rank in others
        if rank >= 0
        and rank not in excluded
        and not (rank in ranks and ranks[rank].has_started(call, kinds))
    ]


def _build_wait(
    call: _OpenCall,
    claim: WaitClaim,
    ranks: Mapping[int, _RankCalls],
    view: IterationView,
    *,
    now_us: int,
    merged: Mapping[int, int],
) -> GroupWait:
    """Return the wait of a call; `merged` contains the stall of each rank at its last
    merged call.
    """
    last, spread = claim.rank, claim.known_us
    own = ranks[call.rank].find_stall_before(call.position, merged)
    before = merged.get(last, 0)
    if last in ranks:
        before = ranks[last].find_stall_before(float("inf"), merged)
    at_last = view.stalls.get(last, 0)
    # The stall counts from zero again when a rank begins a new session.
    other = at_last - before if at_last >= before else at_last
    # Dumping stalled both ranks, so only the additional stall of the late rank counts.
    dumped = other - max(0, call.stall_us - own)
    widest = WidestSpread(
        iteration=view.iteration,
        sequence=min(call.sequence, OPEN_END_POSITION),
        kind=call.kind.name.lower(),
        name=call.name,
        first_rank=call.rank,
        last_rank=last,
        spread_us=spread,
        dump_us=min(max(0, dumped), spread),
        arrived=False,
    )
    activity = ranks[last].describe_activity(now_us) if last in ranks else _NO_ACTIVITY
    text = _describe_open_wait(call, claim, describe_hint_call(call.group.name, widest))
    return GroupWait(call.group, widest, f"{text}; rank {last} {activity}", waiting=True)


def _describe_open_wait(call: _OpenCall, claim: WaitClaim, where: str) -> str:
    """Return a sentence on the time for which a call is known to have waited for a rank."""
    waited = f"rank {call.rank} has waited {format_duration(claim.known_us)}"
    if not claim.reason:
        return f"{waited} for rank {claim.rank} in {where}"
    if claim.known_us:
        return f"{waited} or more for rank {claim.rank} in {where}; {claim.reason}"
    return f"rank {call.rank} is in {where}, and rank {claim.rank} may have arrived; {claim.reason}"


class _RankCalls:
    """The events of one rank, searched for calls."""

    def __init__(self, rank: int, batches: Sequence[EventColumns]) -> None:
        self._rank = rank
        self._batches = batches
        self._calls: dict[int, tuple[EventColumn, dict[str, int]]] = {}

    def iter_open_calls(self) -> Iterator[_OpenCall]:
        """Yield the calls that have begun and are not complete."""
        pending: dict[int, tuple[EventColumns, int]] = {}
        for batch in self._batches:
            columns = batch.columns
            for row in np.flatnonzero(columns["end_position"] == OPEN_END_POSITION).tolist():
                if columns["kind"][row] != int(EventKind.OPERATOR):
                    pending[int(columns["position"][row])] = (batch, row)
        for position, (batch, row) in pending.items():
            if not self._is_over(position):
                yield self._build_open_call(batch, row)

    def find_last_call(self) -> _OpenCall | None:
        """Return the open call that is the last event of this rank; None if the last
        event is none.
        """
        last = max((int(b.columns["position"].max(initial=0)) for b in self._batches), default=0)
        return next((call for call in self.iter_open_calls() if call.position == last), None)

    def _is_over(self, position: int) -> bool:
        """Return whether the call at a position was reported again as complete or as failed."""
        for batch in self._batches:
            columns = batch.columns
            own = np.flatnonzero(columns["position"] == position)
            complete = columns["end_position"][own] != OPEN_END_POSITION
            if (complete | (columns["end_us"][own] > columns["start_us"][own])).any():
                return True
        return False

    def has_started(self, call: _OpenCall, kinds: tuple[int, int]) -> bool:
        """Return whether this rank has begun its part of a call."""
        # The newest batch is searched first, because the call is most likely among the last events.
        for at in reversed(range(len(self._batches))):
            rows, places = self._index_batch(at)
            place = places.get(call.group.name)
            if place is None:
                continue
            columns = self._batches[at].columns
            fits = (columns["group"][rows] == place) & (columns["sequence"][rows] == call.sequence)
            kind = columns["kind"][rows]
            fits &= (kind >= kinds[0]) & (kind <= kinds[1])
            if call.kind.other_end:
                fits &= columns["peer"][rows] == call.rank
            if fits.any():
                return True
        return False

    def find_stall_before(self, position: float, stalls: Mapping[int, int]) -> int:
        """Return the stall at the last call before a position; if there is none, at the last merged
        call.
        """
        found = (-1, stalls.get(self._rank, 0))
        for at, batch in enumerate(self._batches):
            rows, _ = self._index_batch(at)
            positions = batch.columns["position"]
            before = rows[positions[rows] < position]
            if len(before):
                row = before[positions[before].argmax()]
                found = max(found, (int(positions[row]), int(batch.columns["stall_us"][row])))
        return found[1]

    def describe_activity(self, now_us: int) -> str:
        """Return the predicate of a sentence on what this rank did last."""
        ended, name = None, ""
        for batch in self._batches:
            if len(batch):
                row = int(batch.columns["end_us"].argmax())
                end = int(batch.columns["end_us"][row])
                if ended is None or end > ended:
                    ended, name = end, batch.names[int(batch.columns["name"][row])]
        if ended is None:
            return _NO_ACTIVITY
        return f"was last seen in {name!r}, {format_duration(max(0, now_us - ended))} ago"

    def _index_batch(self, at: int) -> tuple[EventColumn, dict[str, int]]:
        """Return the rows of a batch that are calls, and the indexes of the group names in the
        batch.
        """
        if at not in self._calls:
            batch = self._batches[at]
            rows = np.flatnonzero(batch.columns["kind"] != int(EventKind.OPERATOR))
            used: set[int] = set(batch.columns["group"][rows].tolist())
            self._calls[at] = rows, {batch.names[place]: place for place in used}
        return self._calls[at]

    def _build_open_call(self, batch: EventColumns, row: int) -> _OpenCall:
        columns = {name: column[row] for name, column in batch.columns.items()}
        group = batch.names[int(columns["group"])]
        declared = (each for each in batch.groups if each.name == group)
        members = next(declared, ProcessGroup(group, ()))
        return _OpenCall(
            rank=self._rank,
            position=int(columns["position"]),
            kind=EventKind(int(columns["kind"])),
            name=batch.names[int(columns["name"])],
            group=replace(members, ranks=tuple(sorted(set(members.ranks)))),
            sequence=int(columns["sequence"]),
            peer=int(columns["peer"]),
            start_us=int(columns["start_us"]),
            stall_us=int(columns["stall_us"]),
            source=batch.names[int(columns["source"])],
        )


MIN_STUCK_US = 5_000_000
"""Microseconds after which ranks count as waiting in a call that they have entered. Before that, an
asynchronous call may only have been started, with the wait to follow.
"""
_MISMATCHES = (
    FindingKind.OPERATION_MISMATCH,
    FindingKind.SIZE_MISMATCH,
    FindingKind.DTYPE_MISMATCH,
)
STANDING_KINDS = (FindingKind.CYCLE, *_MISMATCHES)
"""Kinds of findings about calls that do not end."""


def may_be_stuck(waits: Iterable[RankWait]) -> bool:
    """Return whether the waits may be a deadlock or a mismatch; a cheap test before a merge."""
    long = [each for each in waits if each.waited_us >= MIN_STUCK_US]
    ranks = {each.rank for each in long}
    if any(ranks.intersection(each.absent) for each in long):
        return True
    calls = [(each.group, each.sequence) for each in long if each.sequence >= 0]
    return len(set(calls)) < len(calls) and any(not each.absent for each in long)


def select_standing_findings(
    findings: Iterable[Finding], waits: Iterable[RankWait]
) -> tuple[Finding, ...]:
    """Return the findings about calls in which all their ranks have waited for long."""
    long = {each.rank for each in waits if each.waited_us >= MIN_STUCK_US}
    return tuple(
        finding
        for finding in findings
        if finding.kind in STANDING_KINDS and long.issuperset(finding.ranks)
    )


def mark_stuck_waits(
    waits: Iterable[RankWait], findings: Sequence[Finding]
) -> tuple[RankWait, ...]:
    """Return the waits, with a mark on those that cannot end because of a finding."""
    return tuple(
        replace(each, stuck=any(_is_about_wait(finding, each) for finding in findings))
        for each in waits
    )


def _is_about_wait(finding: Finding, wait: RankWait) -> bool:
    if finding.iteration != wait.iteration:
        return False
    same_call = (finding.group, finding.sequence) == (wait.group, wait.sequence)
    if finding.kind in _MISMATCHES:
        return same_call
    return wait.rank in finding.ranks or bool(set(finding.ranks).intersection(wait.absent))


def explain_hint(
    hint: TimeoutHint, findings: Iterable[Finding], sessions: Mapping[int, SessionStatus]
) -> TimeoutHint:
    """Return a hint; if a longer timeout does not help, with the cause in place of settings."""
    cause = next((each.text for each in findings if _is_about_hint(each, hint)), "")
    late = sessions.get(hint.last_rank)
    if not cause and hint.waiting and late is not None and late.state is SessionState.CLOSED:
        cause = (
            f"iteration {hint.iteration}: rank {hint.last_rank} has ended, and rank "
            f"{hint.first_rank} waits for it in {hint.kind} number {hint.sequence} of group "
            f"{hint.group!r}"
        )
    if not cause:
        return hint
    return replace(withdraw_settings(hint), cause=cause)


def _is_about_hint(finding: Finding, hint: TimeoutHint) -> bool:
    """Return whether a finding explains a wait that never ends; a finding about a long wait does
    not.
    """
    if finding.kind not in STANDING_KINDS or finding.iteration != hint.iteration:
        return False
    if finding.kind in _MISMATCHES:
        return (finding.group, finding.sequence) == (hint.group, hint.sequence)
    unended = hint.waiting or hint.level is not HintLevel.OK
    return unended and hint.last_rank in finding.ranks and is_deadlock(finding)
