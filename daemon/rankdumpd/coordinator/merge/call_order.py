"""Order of the collectives and messages of an iteration. Members are matched to calls and receives
to sends; then calls are ordered by rules first, and by time where the rules leave the order open.
Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump._core.events import EventColumn, EventKind
from rankdumpd.coordinator.merge.event_table import EventTable

_COLLECTIVE, _SEND, _RECEIVE = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class CallMatch:
    """Calls, numbered from 0; each call is a collective with all its members, a send or
    a receive.
    """

    members: EventColumn
    """Rows of the table's members, grouped by call; within a call in the order of their ranks."""
    bounds: EventColumn
    """The members of call i are the elements `bounds[i]` to `bounds[i + 1]`."""
    send_of: EventColumn
    """The send that a receive waits for; -1 for all other calls."""
    collective: EventColumn
    """Whether each call is a collective."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def first(self) -> EventColumn:
        """Member of each call on the lowest rank that took part in the call."""
        return self.members[self.bounds[:-1]]

    def list_members(self, call: int) -> list[int]:
        """Return the members of one call."""
        low, high = self.bounds[call : call + 2]
        return self.members[low:high].tolist()


def match_calls(table: EventTable) -> CallMatch:
    """Match the members of a table to calls.

    Members of a collective agree on group and sequence number; the two ends of a message on group,
    sender, receiver and sequence number. If a rank repeats a number, a new call begins.
    """
    role, key = _build_call_keys(table)
    order = _sort_by_keys([*key, role])
    # Number of times that a rank has used this key before; each repetition is a separate call.
    turn = _number_runs(mark_changes([each[order] for each in (*key, role, table.members["rank"])]))
    if turn.any():
        turn = turn[np.argsort(order)]
        order = _sort_by_keys([*key, turn, role])
        turn = turn[order]
    same_key = ~mark_changes([*(each[order] for each in key), turn])
    role = role[order]
    starts = np.flatnonzero(~same_key | mark_changes([role]))
    bounds = np.append(starts, len(role))
    # Sends are sorted before receives, so the send of a message is the call before its receive.
    answers = (role[starts] == _RECEIVE) & same_key[starts]
    send_of = np.where(answers, np.arange(len(starts)) - 1, -1)
    return CallMatch(order, bounds, send_of, role[starts] == _COLLECTIVE)


def _build_call_keys(table: EventTable) -> tuple[EventColumn, list[EventColumn]]:
    """Return the role of each member, and the columns in which all members of a call agree."""
    kind, rank = table.members["kind"], table.members["rank"]
    role = np.full(len(kind), _COLLECTIVE, "i1")
    role[kind == int(EventKind.SEND)] = _SEND
    role[kind == int(EventKind.RECV)] = _RECEIVE
    peer = table.members["peer"].astype("i8")
    sender = np.select([role == _SEND, role == _RECEIVE], [rank, peer], -1)
    receiver = np.select([role == _SEND, role == _RECEIVE], [peer, rank], -1)
    return role, [table.members["group"], sender, receiver, table.members["sequence"]]


def _sort_by_keys(keys: list[EventColumn]) -> EventColumn:
    """Return the stable order by these keys, of which the first one is the most significant."""
    return np.lexsort(keys[::-1])


def mark_changes(keys: Sequence[EventColumn]) -> EventColumn:
    """Return for each element whether it differs from the element before; true for the first
    element.
    """
    changes = np.ones(len(keys[0]), dtype=bool)
    if len(changes):
        changes[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return changes


def _number_runs(changes: EventColumn) -> EventColumn:
    """Return the position of each element within its run."""
    places = np.arange(len(changes))
    return places - np.maximum.accumulate(np.where(changes, places, 0)) if len(changes) else places


@dataclass(frozen=True, slots=True, eq=False)
class CallOrder:
    """Order of the calls, and the cycles that had to be broken for it."""

    calls: EventColumn
    """All calls, from first to last."""
    index: EventColumn
    """Place of each call in the order."""
    time_us: EventColumn
    """Time of each place, which is the latest time of its call and of all calls that must precede
    it; it never falls.
    """
    cycles: tuple[tuple[int, ...], ...]
    """Cycles of calls that wait for each other: each call waits for the next one, the last for the
    first. The oldest call of a cycle comes first in the order.
    """


def order_calls(table: EventTable, match: CallMatch) -> CallOrder:
    """Return the order of the calls of a table."""
    times = _compute_call_times(table, match)
    first = match.first
    keys = (times, table.members["rank"][first], table.members["position"][first])
    by_age = np.lexsort((*keys[::-1],))
    cycles: list[tuple[int, ...]] = []
    if _is_valid_order(table, match, by_age):
        # The sequencer picks the oldest call that is not blocked, so it would return the same
        # order.
        ordered = by_age
    else:
        lines = zip(*(key.tolist() for key in (*keys, np.arange(len(match)))), strict=True)
        order, cycles = _CallSequencer(table, match, list(lines)).run()
        ordered = np.array(order, dtype="i8")
    # All predecessors of a call come before it, so a running maximum gives the latest time.
    latest = np.maximum.accumulate(times[ordered])
    return CallOrder(ordered, _invert_order(ordered), latest, tuple(cycles))


def _invert_order(order: EventColumn) -> EventColumn:
    places = np.empty(len(order), dtype="i8")
    places[order] = np.arange(len(order))
    return places


def _compute_call_times(table: EventTable, match: CallMatch) -> EventColumn:
    """Return a time for each call: the latest start of the events that its members began before the
    call ended.
    """
    if not len(match):
        return np.empty(0, dtype="i8")
    ends, last = table.members["end_position"], np.empty(len(match.members), dtype="i8")
    for rank, own in table.member_ranks.items():
        rows = table.ranks[rank]
        before = np.searchsorted(table["position"][rows], ends[own], side="right")
        last[own] = rows.start + before - 1
    return np.maximum.reduceat(table["time_us"][last[match.members]], match.bounds[:-1])


def _is_valid_order(table: EventTable, match: CallMatch, order: EventColumn) -> bool:
    """Return whether no call comes before a call that it must follow."""
    place = _invert_order(order)
    answers = np.flatnonzero(match.send_of >= 0)
    if np.any(place[match.send_of[answers]] > place[answers]):
        return False
    place = place[map_members_to_calls(match)]
    members = table.members
    for own in table.member_ranks.values():
        ends, positions, places = members["end_position"][own], members["position"][own], place[own]
        by_end = np.argsort(ends, kind="stable")
        before = np.searchsorted(ends[by_end], positions, side="left")
        latest = np.maximum.accumulate(np.append(-1, places[by_end]))
        if np.any(latest[before] > places):
            return False
    return True


def map_members_to_calls(match: CallMatch) -> EventColumn:
    """Return the call that each member of the table belongs to."""
    calls = np.empty(len(match.members), dtype="i8")
    calls[match.members] = np.repeat(np.arange(len(match)), np.diff(match.bounds))
    return calls


class _RankLane:
    """Calls of one rank; a call is released once all calls that must precede it are done."""

    def __init__(self, calls: EventColumn, positions: EventColumn, ends: EventColumn) -> None:
        by_end = np.argsort(ends, kind="stable")
        self.calls: list[int] = calls.tolist()
        """Calls in the order of their starts."""
        self.by_end: list[int] = calls[by_end].tolist()
        """Calls in the order of their ends."""
        self.slots: list[int] = np.argsort(by_end).tolist()
        """Position in `by_end` of each element of `calls`."""
        self.needs: list[int] = np.searchsorted(ends[by_end], positions, side="left").tolist()
        """Number of calls that were complete before each call started, and that have to be done
        first.
        """
        self.done = bytearray(len(self.calls))
        """Whether each element of `by_end` is done."""
        self.done_count = 0
        """Number of leading elements of `by_end` that are all done."""
        self.released_count = 0
        """Number of leading elements of `calls` that have been released."""

    def iter_released(self) -> Iterator[int]:
        """Yield the calls that this rank does not block any longer."""
        while self.done_count < len(self.done) and self.done[self.done_count]:
            self.done_count += 1
        while (
            self.released_count < len(self.calls)
            and self.needs[self.released_count] <= self.done_count
        ):
            yield self.calls[self.released_count]
            self.released_count += 1


class _CallSequencer:
    """Orders the calls one by one; the oldest call that is not blocked comes next."""

    def __init__(
        self, table: EventTable, match: CallMatch, keys: list[tuple[int, int, int, int]]
    ) -> None:
        self._keys = keys
        self._send_of: list[int] = match.send_of.tolist()
        self._receive_of = {send: call for call, send in enumerate(self._send_of) if send >= 0}
        self._pending: list[int] = (np.diff(match.bounds) + (match.send_of >= 0)).tolist()
        self._done = bytearray(len(match))
        self._heap: list[tuple[int, int, int, int]] = []
        self._lanes, self._members = _build_lanes(table, match)

    def run(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return all calls in order, and the cycles that had to be broken."""
        order: list[int] = []
        cycles: list[tuple[int, ...]] = []
        for lane in self._lanes:
            self._release_all(lane.iter_released())
        while len(order) < len(self._keys):
            if self._heap:
                call = heapq.heappop(self._heap)[-1]
            else:
                cycles.append(self._find_cycle(self._done.index(0)))
                call = min(cycles[-1], key=self._keys.__getitem__)
            order.append(call)
            self._finish(call)
        return order, cycles

    def _release_all(self, calls: Iterator[int]) -> None:
        for call in calls:
            self._pending[call] -= 1
            if not self._pending[call] and not self._done[call]:
                heapq.heappush(self._heap, self._keys[call])

    def _finish(self, call: int) -> None:
        self._done[call] = True
        for lane, place in self._members[call]:
            lane.done[lane.slots[place]] = True
            self._release_all(lane.iter_released())
        if call in self._receive_of:
            self._release_all(iter((self._receive_of[call],)))

    def _find_cycle(self, call: int) -> tuple[int, ...]:
        """Follow blocking calls until one repeats; return the cycle, each call before the one it
        blocks.
        """
        path: dict[int, None] = {}
        while call not in path:
            path[call] = None
            call = self._find_blocking_call(call)
        cycle = list(path)
        return tuple(reversed(cycle[cycle.index(call) :]))

    def _find_blocking_call(self, call: int) -> int:
        """Return the first call that must be done before `call` on a rank that has not released
        `call` yet. If all ranks have released it, return the send that it waits for.
        """
        for lane, place in self._members[call]:
            if place >= lane.released_count:
                return lane.by_end[lane.done_count]
        return self._send_of[call]


def _build_lanes(
    table: EventTable, match: CallMatch
) -> tuple[list[_RankLane], list[list[tuple[_RankLane, int]]]]:
    """Return the lane of every rank, and for each call its lanes and its positions in them."""
    calls = map_members_to_calls(match)
    lanes: list[_RankLane] = []
    members: list[list[tuple[_RankLane, int]]] = [[] for _ in range(len(match))]
    for own in table.member_ranks.values():
        lane = _RankLane(
            calls[own], table.members["position"][own], table.members["end_position"][own]
        )
        for place, call in enumerate(lane.calls):
            members[call].append((lane, place))
        lanes.append(lane)
    return lanes, members
