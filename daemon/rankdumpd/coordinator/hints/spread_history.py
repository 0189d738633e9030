"""Spread of arrivals at each call, the part of it that dumping caused, and the history of both,
which a job keeps as hint state. Pure.

The job is modelled as a max-plus system: a rank continues after a call when the last member has
arrived. A second timeline models the job without dumping. In it, a rank arrives earlier by its
delay, which is the sum of its own stalls and of the waits that stalls caused, and leaves a call
when the last member would have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from rankdump._core.events import OPEN_END_POSITION, EventKind, ProcessGroup
from rankdump._core.json_values import make_plain, read_json
from rankdump.errors import CorruptedError
from rankdumpd.coordinator.fleet_views import GlobalOrder


@dataclass(frozen=True, slots=True)
class CallSpread:
    """Spread of one call: the first and the last rank, the time between them, and the part of the
    time that dumping caused.
    """

    call: int
    first_rank: int
    last_rank: int
    spread_us: int
    dump_us: int
    arrived: bool = True
    """Whether the last rank has arrived at all."""


@dataclass(slots=True)
class RankTimeline:
    """State of one rank while calls are processed, and the delay that dumping has caused so far."""

    stall_us: int = 0
    """Stall in microseconds at the call that the rank started last."""
    delay_us: int = 0
    now_us: int = 0
    """Time at which the rank last started a call or continued after one."""
    rows: Iterator[int] = field(default_factory=lambda: iter(()))
    """Remaining calls of the rank as rows of the members, in the order in which it started them."""
    completions: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Calls after which the rank has not continued yet: end position, arrival of the last member,
    and arrival of the last member without dumping.
    """

    def start_call(self, start_us: int, stall_us: int) -> int:
        """Start a call; return the time at which the rank would have started it without dumping."""
        if stall_us < self.stall_us:
            # The stall counts from zero again when a rank begins a new session.
            self.stall_us = self.delay_us = 0
        self.delay_us += stall_us - self.stall_us
        self.stall_us = stall_us
        self.now_us = start_us
        return start_us - self.delay_us

    def advance_to(self, position: int) -> None:
        """Continue after all calls that were complete before a position of the program."""
        open_calls = self.completions
        open_calls.sort(reverse=True)
        while open_calls and open_calls[-1][0] < position:
            _, complete_us, undumped_us = open_calls.pop()
            now_us = max(self.now_us, complete_us)
            self.delay_us = now_us - max(self.now_us - self.delay_us, undumped_us)
            self.now_us = now_us


def measure_call_spreads(
    order: GlobalOrder, timelines: dict[int, RankTimeline], stalls: Mapping[int, int]
) -> Iterator[CallSpread]:
    """Yield the spread of every call in order, and advance the timelines of the ranks.

    In a message only the receiver waits: a receive has the spread to its send, and the spread of a
    send is 0. If a member is missing, the spread is the wait that is known so far; `stalls` has the
    newest reported stall of each rank, from which the part of dumping is computed.
    """
    walk = _SpreadWalk(order, timelines, stalls)
    for call in range(len(order.calls)):
        yield walk.step(call)
    for timeline in timelines.values():
        timeline.advance_to(OPEN_END_POSITION)


class _SpreadWalk:
    """The state of one pass over the calls of an iteration."""

    def __init__(
        self, order: GlobalOrder, timelines: dict[int, RankTimeline], stalls: Mapping[int, int]
    ) -> None:
        calls = order.calls
        self._newest = stalls
        self._calls = calls
        self._bounds: list[int] = calls.bounds.tolist()
        self._kinds: list[int] = calls.columns["kind"].tolist()
        self._groups: list[int] = calls.columns["group"].tolist()
        self._sequences: list[int] = calls.columns["sequence"].tolist()
        members = calls.members
        self._ranks: list[int] = members["rank"].tolist()
        self._starts: list[int] = members["start_us"].tolist()
        self._positions: list[int] = members["position"].tolist()
        self._ends: list[int] = members["end_position"].tolist()
        self._stalls: list[int] = members["stall_us"].tolist()
        self._peers: list[int] = members["peer"].tolist()
        self._undumped: list[int | None] = [None] * len(self._ranks)
        """Arrival of each member without dumping; None before it has arrived."""
        self._sent: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        self._timelines = timelines
        by_rank = np.lexsort((members["position"], members["rank"])).tolist()
        self._last_start: dict[int, int] = {}
        for rank, grouped in groupby(by_rank, key=self._ranks.__getitem__):
            rows = list(grouped)
            self._last_start[rank] = self._starts[rows[-1]]
            timelines.setdefault(rank, RankTimeline()).rows = iter(rows)

    def step(self, call: int) -> CallSpread:
        """Advance the members of a call past the call; return the spread of the call."""
        low, high = self._bounds[call], self._bounds[call + 1]
        undumped = [self._arrive(row) for row in range(low, high)]
        kind = self._kinds[call]
        if kind == int(EventKind.SEND):
            return self._measure_send(call, low, undumped[0])
        if kind == int(EventKind.RECV):
            return self._measure_receive(call, low, undumped[0])
        starts = self._starts[low:high]
        first, last = min(starts), max(starts)
        undumped_last = max(undumped)
        for row in range(low, high):
            self._complete(row, last, undumped_last)
        first_rank = self._ranks[low + starts.index(first)]
        missing = self._calls.missing.get(call)
        if missing:
            waited = max(0, int(self._calls.columns["end_us"][call]) - first)
            # If several are missing, take the rank whose last call is oldest, because the others
            # may wait for it.
            late = min(missing, key=lambda rank: (self._last_start.get(rank, 0), rank))
            dumped = min(self._measure_stall(late), waited)
            return CallSpread(call, first_rank, late, waited, dumped, arrived=False)
        spread = last - first
        last_rank = self._ranks[low + starts.index(last)]
        dumped = spread - (undumped_last - min(undumped))
        return CallSpread(call, first_rank, last_rank, spread, min(max(0, dumped), spread))

    def _measure_stall(self, rank: int) -> int:
        """Return the stall of a rank by dumping since its last call."""
        newest, before = self._newest.get(rank, 0), 0
        if rank in self._timelines:
            before = self._timelines[rank].stall_us
        return newest - before if newest >= before else newest

    def _measure_send(self, call: int, row: int, undumped: int) -> CallSpread:
        rank, peer = self._ranks[row], self._peers[row]
        key = (self._groups[call], rank, peer, self._sequences[call])
        self._sent[key] = (self._starts[row], undumped)
        return CallSpread(call, rank, rank, 0, 0)

    def _measure_receive(self, call: int, row: int, undumped: int) -> CallSpread:
        rank, peer = self._ranks[row], self._peers[row]
        arrival = self._starts[row]
        key = (self._groups[call], peer, rank, self._sequences[call])
        if key not in self._sent:
            return CallSpread(call, rank, rank, 0, 0)
        sent, undumped_sent = self._sent[key]
        self._complete(row, max(arrival, sent), max(undumped, undumped_sent))
        spread = max(0, sent - arrival)
        dumped = spread - max(0, undumped_sent - undumped)
        return CallSpread(call, rank, peer, spread, min(max(0, dumped), spread))

    def _arrive(self, wanted: int) -> int:
        """Advance the rank of a member to its call; return the arrival without dumping."""
        found = self._undumped[wanted]
        if found is not None:
            return found
        timeline = self._timelines[self._ranks[wanted]]
        for row in timeline.rows:
            if timeline.completions:
                timeline.advance_to(self._positions[row])
            found = self._undumped[row] = timeline.start_call(self._starts[row], self._stalls[row])
            if row == wanted:
                return found
        raise AssertionError("a member is not in the timeline of its rank")

    def _complete(self, row: int, complete_us: int, undumped_us: int) -> None:
        end, timeline = self._ends[row], self._timelines[self._ranks[row]]
        if end == self._positions[row] and not timeline.completions:
            # The call blocked the rank until its end, so the rank left it together with the others.
            timeline.now_us, timeline.delay_us = complete_us, complete_us - undumped_us
        elif end < OPEN_END_POSITION:
            timeline.completions.append((end, complete_us, undumped_us))


MAX_SPREAD_HISTORY = 64
MAX_HINT_GROUPS = 4096
_STATE_VERSION = 1
_MAX_SEQUENCE = (1 << 63) - 1
"""Limit of sequence numbers, because hints store the number of a collective as a signed 64-bit
number.
"""


@dataclass(frozen=True, slots=True)
class WidestSpread:
    """The widest spread of a group, with its call."""

    iteration: int
    sequence: int
    kind: str
    name: str
    first_rank: int
    last_rank: int
    spread_us: int
    dump_us: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class GroupSpreadHistory:
    """Spreads of one group so far."""

    first: WidestSpread | None = None
    """Spread of the first collective, in which the members connect; a separate limit
    applies to it.
    """
    widest: WidestSpread | None = None
    """Widest spread of all later calls."""
    history: tuple[tuple[int, int], ...] = ()
    """The newest iterations, each with its widest spread after the first collective."""


@dataclass(frozen=True, slots=True)
class HintState:
    """Data from which the hints of a job are computed."""

    iteration: int = -1
    """The iteration that was merged last."""
    stalls: Mapping[int, int] = field(default_factory=dict[int, int])
    """Stall of each rank by dumping, in microseconds, at the start of its last call."""
    delays: Mapping[int, int] = field(default_factory=dict[int, int])
    """Delay of each rank by dumping, in microseconds, after its last call."""
    groups: Mapping[ProcessGroup, GroupSpreadHistory] = field(
        default_factory=dict[ProcessGroup, GroupSpreadHistory]
    )

    def to_json(self) -> str:
        """Return the state as one line of text."""
        groups = [make_plain(group) | make_plain(history) for group, history in self.groups.items()]
        whole = {
            "version": _STATE_VERSION,
            "iteration": self.iteration,
            "ranks": [[rank, self.stalls[rank], self.delays.get(rank, 0)] for rank in self.stalls],
            "groups": groups,
        }
        return json.dumps(whole, separators=(",", ":"), default=make_plain)

    @staticmethod
    def from_json(text: str) -> HintState:
        """Return the state that a text contains; CorruptedError when the text is not a state."""
        try:
            whole: Any = json.loads(text)
            if whole["version"] != _STATE_VERSION:
                raise ValueError(f"version {whole['version']!r}")
            ranks: list[list[int]] = whole["ranks"]
            return HintState(
                iteration=int(whole["iteration"]),
                stalls={int(rank): int(stall) for rank, stall, _ in ranks},
                delays={int(rank): int(delay) for rank, _, delay in ranks},
                groups=dict(map(_parse_group, whole["groups"])),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptedError(f"not a valid state of timeout hints: {error!r}") from None


def update_hint_state(
    state: HintState, order: GlobalOrder, stalls: Mapping[int, int] | None = None
) -> HintState:
    """Return the state after one more iteration; `stalls` contains the newest reported stalls."""
    # Between two iterations that do not follow each other, collectives that were not dumped have
    # evened out the delays.
    follows = order.iteration - state.iteration in (0, 1)
    delays: Mapping[int, int] = state.delays if follows else {}
    timelines = {
        rank: RankTimeline(stall, delays.get(rank, 0)) for rank, stall in state.stalls.items()
    }
    groups = dict(state.groups)
    for (group, first), spread in _find_widest_spreads(order, timelines, stalls or {}).items():
        history = groups.get(group, GroupSpreadHistory())
        groups[group] = _add_spread(history, _describe_spread(order, spread), first=first)
    return HintState(
        iteration=order.iteration,
        stalls={rank: timeline.stall_us for rank, timeline in timelines.items()},
        delays={rank: timeline.delay_us for rank, timeline in timelines.items()},
        groups=_limit_groups(groups),
    )


def _find_widest_spreads(
    order: GlobalOrder, timelines: dict[int, RankTimeline], stalls: Mapping[int, int]
) -> dict[tuple[ProcessGroup, bool], CallSpread]:
    """Return the widest spread of each group, separately for its first collective and for later
    calls.
    """
    columns = order.calls.columns
    groups: list[int] = columns["group"].tolist()
    first: list[bool] = (
        (columns["sequence"] == 0) & (columns["kind"] < _FIRST_MESSAGE_KIND)
    ).tolist()
    widest: dict[tuple[int, bool], CallSpread] = {}
    for spread in measure_call_spreads(order, timelines, stalls):
        key = (groups[spread.call], first[spread.call])
        known = widest.get(key)
        if known is None or spread.spread_us > known.spread_us:
            widest[key] = spread
    return {(order.groups[group], start): spread for (group, start), spread in widest.items()}


_FIRST_MESSAGE_KIND = int(EventKind.SEND)
"""The kinds from this number on are messages."""


def _describe_spread(order: GlobalOrder, spread: CallSpread) -> WidestSpread:
    columns, call = order.calls.columns, spread.call
    return WidestSpread(
        iteration=order.iteration,
        sequence=min(int(columns["sequence"][call]), _MAX_SEQUENCE),
        kind=EventKind(int(columns["kind"][call])).name.lower(),
        name=order.names[int(columns["name"][call])],
        first_rank=spread.first_rank,
        last_rank=spread.last_rank,
        spread_us=spread.spread_us,
        dump_us=spread.dump_us,
        arrived=spread.arrived,
    )


def _add_spread(
    history: GroupSpreadHistory, new: WidestSpread, *, first: bool
) -> GroupSpreadHistory:
    if first:
        return replace(history, first=_select_wider(history.first, new))
    earlier = tuple(point for point in history.history if point[0] != new.iteration)
    points = (*earlier, (new.iteration, new.spread_us))[-MAX_SPREAD_HISTORY:]
    return replace(history, widest=_select_wider(history.widest, new), history=points)


def _select_wider(known: WidestSpread | None, new: WidestSpread) -> WidestSpread:
    """Return the wider one of two spreads; the known one when both are equal."""
    return new if known is None or new.spread_us > known.spread_us else known


def _limit_groups(
    groups: dict[ProcessGroup, GroupSpreadHistory],
) -> dict[ProcessGroup, GroupSpreadHistory]:
    """Return at most MAX_HINT_GROUPS groups, because a job may create any number of groups."""
    if len(groups) <= MAX_HINT_GROUPS:
        return groups
    by_spread = sorted(groups.items(), key=lambda item: _find_max_spread_us(item[1]), reverse=True)
    return dict(by_spread[:MAX_HINT_GROUPS])


def _find_max_spread_us(history: GroupSpreadHistory) -> int:
    return max(each.spread_us if each else 0 for each in (history.first, history.widest))


def _parse_group(value: Any) -> tuple[ProcessGroup, GroupSpreadHistory]:
    group = read_json(ProcessGroup, value, unknown=True)
    return group, read_json(GroupSpreadHistory, value, unknown=True)
