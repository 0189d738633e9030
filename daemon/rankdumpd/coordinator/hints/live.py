"""Who waits now, and for whom: the calls that are open while a member has not come. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankdump.contract.events import OPEN, Column, EventColumns, EventKind, ProcessGroup
from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator.hints.assess import Wait, assessed, call_words
from rankdumpd.coordinator.hints.claim import Claim, claims_of, surest
from rankdumpd.coordinator.hints.limits import group_limits
from rankdumpd.coordinator.hints.state import HintState, Widest
from rankdumpd.coordinator.hints.wording import duration
from rankdumpd.coordinator.values import IterationView, JobFacts

_ANSWER = {EventKind.SEND: EventKind.RECV, EventKind.RECV: EventKind.SEND}


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


def waiting(
    view: IterationView, facts: JobFacts, now_us: int, state: HintState | None = None
) -> tuple[TimeoutHint, ...]:
    """Return a hint for every group whose members wait for another one now.

    A wait is claimed only as far as the late rank was heard: it may have come since. The state
    says how long dumping had held up ranks that made no call in this iteration yet.
    """
    ranks = {rank: _Rank(rank, batches) for rank, batches in view.events.items()}
    calls = [call for rank in ranks.values() for call in rank.open_calls()]
    stalls: Mapping[int, int] = state.stalls if state else {}
    found: dict[ProcessGroup, TimeoutHint] = {}
    stuck = {call.rank for call in calls}
    for call in _earliest(calls):
        absent = _absent(call, ranks, view.excluded)
        if not absent:
            continue
        claims = claims_of(absent, view.heard, start_us=call.start_us, now_us=now_us)
        claim = surest(claims, stuck)
        wait = _wait(call, ranks, claim, (now_us, view.iteration), (stalls, view.stalls))
        limits = group_limits(call.group, call.group.ranks or (call.rank, claim.rank), facts)
        hint = assessed(wait, limits, facts)
        known = found.get(call.group)
        if known is None or hint.share > known.share:
            found[call.group] = hint
    return tuple(found.values())


def _earliest(calls: Sequence[_OpenCall]) -> list[_OpenCall]:
    """Return of each collective the member that came first, and every message."""
    first: dict[object, _OpenCall] = {}
    for call in sorted(calls, key=lambda call: (call.start_us, call.rank)):
        ends = (call.rank, call.peer) if call.kind in _ANSWER else None
        first.setdefault((call.group, call.sequence, ends), call)
    return list(first.values())


def _absent(call: _OpenCall, ranks: Mapping[int, _Rank], excluded: frozenset[int]) -> list[int]:
    """Return who has not come to a call."""
    if call.kind in _ANSWER:
        answer = int(_ANSWER[call.kind])
        others, kinds = [call.peer], (answer, answer)
    else:
        others = [rank for rank in call.group.ranks if rank != call.rank]
        kinds = (int(EventKind.ALL_REDUCE), int(EventKind.BARRIER))
    return [
        rank
        for rank in others
        if rank >= 0
        and rank not in excluded
        and not (rank in ranks and ranks[rank].came_to(call, kinds))
    ]


def _wait(
    call: _OpenCall,
    ranks: Mapping[int, _Rank],
    claim: Claim,
    now: tuple[int, int],
    stalls: tuple[Mapping[int, int], Mapping[int, int]],
) -> Wait:
    """Return what a call has come to; the stalls are those at the last merged calls, and now."""
    (now_us, iteration), (merged, newest) = now, stalls
    last, spread = claim.rank, claim.known_us
    own = ranks[call.rank].stall_before(call.position, merged)
    before = merged.get(last, 0)
    if last in ranks:
        before = ranks[last].stall_before(float("inf"), merged)
    at_last = newest.get(last, 0)
    # A new session counts anew.
    other = at_last - before if at_last >= before else at_last
    # Dumping held up both: the part is what it held up the late one more.
    dumped = other - max(0, call.stall_us - own)
    widest = Widest(
        iteration=iteration,
        sequence=min(call.sequence, OPEN),
        kind=call.kind.name.lower(),
        name=call.name,
        first_rank=call.rank,
        last_rank=last,
        spread_us=spread,
        dump_us=min(max(0, dumped), spread),
        arrived=False,
    )
    doing = ranks[last].doing(now_us) if last in ranks else "has reported nothing of this iteration"
    told = _told(call, claim, call_words(call.group.name, widest))
    return Wait(call.group, widest, f"{told}; rank {last} {doing}", waiting=True)


def _told(call: _OpenCall, claim: Claim, where: str) -> str:
    """Say how long a call has waited for whom, or that this is not known."""
    waited = f"rank {call.rank} has waited {duration(claim.known_us)}"
    if not claim.reason:
        return f"{waited} for rank {claim.rank} in {where}"
    if claim.known_us:
        return f"{waited} or more for rank {claim.rank} in {where}; {claim.reason}"
    return f"rank {call.rank} is in {where}, and rank {claim.rank} may have come; {claim.reason}"


class _Rank:
    """The events of one rank."""

    def __init__(self, rank: int, batches: Sequence[EventColumns]) -> None:
        self._rank = rank
        self._batches = batches
        self._calls: dict[int, tuple[Column, dict[str, int]]] = {}

    def open_calls(self) -> Iterator[_OpenCall]:
        """Yield what has begun and is not complete."""
        pending: dict[int, tuple[EventColumns, int]] = {}
        for batch in self._batches:
            columns = batch.columns
            for row in np.flatnonzero(columns["end_position"] == OPEN).tolist():
                if columns["kind"][row] != int(EventKind.OPERATOR):
                    pending[int(columns["position"][row])] = (batch, row)
        for position, (batch, row) in pending.items():
            if not self._completed(position):
                yield self._open_call(batch, row)

    def _completed(self, position: int) -> bool:
        """Return whether the call at a position was reported again, as complete."""
        return any(
            (batch.columns["end_position"][batch.columns["position"] == position] != OPEN).any()
            for batch in self._batches
        )

    def came_to(self, call: _OpenCall, kinds: tuple[int, int]) -> bool:
        """Return whether this rank has begun its part of a call."""
        # The newest first: who waits for long has its call at the end.
        for at in reversed(range(len(self._batches))):
            rows, places = self._indexed(at)
            place = places.get(call.group.name)
            if place is None:
                continue
            columns = self._batches[at].columns
            fits = (columns["group"][rows] == place) & (columns["sequence"][rows] == call.sequence)
            kind = columns["kind"][rows]
            fits &= (kind >= kinds[0]) & (kind <= kinds[1])
            if call.kind in _ANSWER:
                fits &= columns["peer"][rows] == call.rank
            if fits.any():
                return True
        return False

    def stall_before(self, position: float, stalls: Mapping[int, int]) -> int:
        """Return the stall at the last call before a position; else at the last one merged."""
        found = (-1, stalls.get(self._rank, 0))
        for at, batch in enumerate(self._batches):
            rows, _ = self._indexed(at)
            positions = batch.columns["position"]
            before = rows[positions[rows] < position]
            if len(before):
                row = before[positions[before].argmax()]
                found = max(found, (int(positions[row]), int(batch.columns["stall_us"][row])))
        return found[1]

    def doing(self, now_us: int) -> str:
        """Say what it completed last."""
        ended, name = None, ""
        for batch in self._batches:
            if len(batch):
                row = int(batch.columns["end_us"].argmax())
                end = int(batch.columns["end_us"][row])
                if ended is None or end > ended:
                    ended, name = end, batch.names[int(batch.columns["name"][row])]
        if ended is None:
            return "has reported nothing of this iteration"
        return f"was last heard of in {name!r}, {duration(max(0, now_us - ended))} ago"

    def _indexed(self, at: int) -> tuple[Column, dict[str, int]]:
        """Return the rows of a batch that are calls, and the places of their groups' names."""
        if at not in self._calls:
            batch = self._batches[at]
            rows = np.flatnonzero(batch.columns["kind"] != int(EventKind.OPERATOR))
            used: set[int] = set(batch.columns["group"][rows].tolist())
            self._calls[at] = rows, {batch.names[place]: place for place in used}
        return self._calls[at]

    def _open_call(self, batch: EventColumns, row: int) -> _OpenCall:
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
        )
