"""Rules of the merged order, checked one by one, independently of the merge."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from support.order_jobs import GROUPS, Program

from rankdump._core.events import EventKind, RankEvent
from rankdumpd.coordinator.fleet_views import GlobalOrder

Key: TypeAlias = tuple[Any, ...]
"""What stands as one entry: an operator, an end of a message, a whole collective."""


def identity(rank: int, event: RankEvent) -> Key:
    """Return the entry of an event."""
    if not event.kind.is_collective:
        return (rank, event.position)
    ranks = next(
        tuple(sorted(g.ranks)) for g in GROUPS if g.name == event.group and rank in g.ranks
    )
    return (event.group, ranks, event.sequence)


def lines_of(order: GlobalOrder) -> list[Key]:
    """Return the entries in their order, from the columns."""
    calls, keys = order.calls, []
    lines = (order.columns[field].tolist() for field in ("call", "rank", "position"))
    for call, rank, position in zip(*lines, strict=True):
        if call < 0 or not EventKind(int(calls.columns["kind"][call])).is_collective:
            keys.append((rank, position))
        else:
            group = order.groups[int(calls.columns["group"][call])]
            keys.append((group.name, group.ranks, int(calls.columns["sequence"][call])))
    return keys


def as_corrected(program: Program, order: GlobalOrder) -> Program:
    """Return a program with the starts that the order says."""
    starts: dict[tuple[int, int], int] = {}
    for columns, kept in ((order.columns, order.columns["call"] < 0), (order.calls.members, ...)):
        said = (columns[field][kept].tolist() for field in ("rank", "position", "start_us"))
        starts |= {(rank, position): start for rank, position, start in zip(*said, strict=True)}
    return {
        rank: [replace(event, start_us=starts[rank, event.position]) for event in own]
        for rank, own in program.items()
    }


def constraints(program: Program) -> set[tuple[Key, Key]]:
    """Return every pair (a, b) where rules 1 to 3 put a before b."""
    pairs: set[tuple[Key, Key]] = set()
    for rank, events in program.items():
        for a, b in itertools.permutations(events, 2):
            operator = a.kind is EventKind.OPERATOR
            if (a.position if operator else a.end_position) < b.position:
                pairs.add((identity(rank, a), identity(rank, b)))
    for sender, events in program.items():
        for a in events:
            if a.kind is not EventKind.SEND:
                continue
            for b in program.get(a.peer, []):
                if b.kind is EventKind.RECV and (b.peer, b.sequence) == (sender, a.sequence):
                    pairs.add((identity(sender, a), identity(a.peer, b)))
    return pairs


def times(program: Program) -> dict[Key, int]:
    """Rule 4: the latest start so far; of a collective or message, so far when it completes."""
    out: dict[Key, int] = {}
    for rank, events in program.items():
        for event in events:
            upto = event.position if event.kind is EventKind.OPERATOR else event.end_position
            latest = max(e.start_us for e in events if e.position <= upto)
            key = identity(rank, event)
            out[key] = max(latest, out.get(key, latest))
    return out


def check(order: GlobalOrder, program: Program) -> None:
    """Fail unless the order of a program without circles keeps every rule."""
    keys = lines_of(order)
    place = {key: index for index, key in enumerate(keys)}
    wanted = {identity(rank, event) for rank, events in program.items() for event in events}
    assert len(place) == len(keys)
    assert set(place) == wanted
    program = as_corrected(program, order)
    pairs = constraints(program)
    for a, b in pairs:
        assert place[a] < place[b], (a, b)
    effective = times(program)
    before: dict[Key, list[Key]] = {}
    for a, b in pairs:
        before.setdefault(b, []).append(a)
    for key in keys:  # causes first, so one pass is enough
        effective[key] = max([effective[key], *(effective[a] for a in before.get(key, ()))])
    ages = [effective[key] for key in keys]
    assert ages == sorted(ages)
    # Ties between neighbouring operators go by rank, then position.
    operators = {
        (rank, event.position)
        for rank, events in program.items()
        for event in events
        if event.kind is EventKind.OPERATOR
    }
    for a, b in itertools.pairwise(keys):
        if a in operators and b in operators and effective[a] == effective[b]:
            assert a < b


def disagreeing(program: Program, *, ignored: Iterable[int] = ()) -> set[int]:
    """Return the ranks that execute other operators than most of those that run their program."""
    found: set[int] = set()
    for ranks in _connected(_equals(program), set(program)):
        alike: dict[Key, list[int]] = {}
        for rank in sorted(ranks - set(ignored)):
            calls = [e for e in _in_order(program[rank]) if e.kind is not EventKind.OPERATOR]
            said = tuple((e.kind, e.element_count, e.dtype) for e in calls)
            alike.setdefault(said, []).append(rank)
        for same in alike.values():
            operators = {rank: _operators(program[rank]) for rank in same}
            ((usual, _),) = Counter(operators.values()).most_common(1)
            found |= {rank for rank in same if operators[rank] != usual}
    return found


def _in_order(events: list[RankEvent]) -> list[RankEvent]:
    return sorted(events, key=lambda event: event.position)


def _operators(events: list[RankEvent]) -> Key:
    own = [event for event in _in_order(events) if event.kind is EventKind.OPERATOR]
    return tuple((e.graph, e.name) for e in sorted(own, key=lambda event: event.graph))


def _equals(program: Program) -> list[set[int]]:
    """Return who meets in a collective without two of them being stages of one pipeline."""
    events = [(rank, event) for rank, own in program.items() for event in own]
    stages = _connected([{rank, e.peer} for rank, e in events if e.peer >= 0], set(program))
    met: dict[Key, set[int]] = {}
    for rank, event in events:
        if event.kind.is_collective:
            met.setdefault(identity(rank, event)[:2], set()).add(rank)
    return [ranks for ranks in met.values() if all(len(ranks & stage) <= 1 for stage in stages)]


def _connected(links: Iterable[set[int]], all_of_them: set[int]) -> list[set[int]]:
    parts = [{rank} for rank in sorted(all_of_them)]
    for link in links:
        touched = [part for part in parts if part & link]
        parts = [part for part in parts if not part & link]
        parts.append(set(link).union(*touched))
    return [part & all_of_them for part in parts]
