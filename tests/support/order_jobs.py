"""Simulated jobs: random programs of a few ranks on arbitrary clocks, as columns to merge."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from hypothesis import strategies as st

from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
)
from rankdumpd.coordinator.fleet_views import IterationView

WORLD = 4
ITERATION = 7
GROUPS = [
    ProcessGroup("world", (0, 1, 2, 3)),
    ProcessGroup("tp", (0, 1)),
    # Another communicator of the same name, and one whose members are listed differently.
    ProcessGroup("tp", (2, 3)),
    ProcessGroup("dp", (2, 0)),
    ProcessGroup("pp", (1, 2, 3)),
]
KINDS = [EventKind.ALL_REDUCE, EventKind.BROADCAST, EventKind.BARRIER, EventKind.ALL_TO_ALL]

Program: TypeAlias = dict[int, list[RankEvent]]
Step: TypeAlias = tuple[str, int, int, bool, int]


def view_of(
    events: Mapping[int, Iterable[EventColumns]], *, iteration: int = ITERATION, **more: Any
) -> IterationView:
    """Return what is gathered of an iteration."""
    defaults: dict[str, Any] = {"excluded": frozenset(), "late": (), "late_count": 0}
    batches = {rank: tuple(columns) for rank, columns in events.items()}
    return IterationView(
        job_id="job", iteration=iteration, root="", events=batches, **(defaults | more)
    )


def batches(rank: int, events: Sequence[RankEvent], cut: int) -> list[EventColumns]:
    """Return the batches of a rank, with the groups it is in."""
    own = tuple(group for group in GROUPS if rank in group.ranks)
    return [EventColumns.from_events(list(part), own) for part in (events[:cut], events[cut:])]


def program_view(program: Program, cut: int = 5, **more: Any) -> IterationView:
    """Return a program as it is gathered."""
    return view_of({rank: batches(rank, own, cut) for rank, own in program.items()}, **more)


def spans_of(program: Program) -> dict[int, tuple[int, int]]:
    """Return first and last position of each rank."""
    positions = {rank: [event.position for event in own] for rank, own in program.items()}
    return {rank: (min(own), max(own)) for rank, own in positions.items() if own}


def skipped(events: Sequence[RankEvent], position: int) -> list[RankEvent]:
    """Return what a rank does that never executes the event at a position."""

    def moved(at: int) -> int:
        return at - 1 if position <= at < OPEN_END_POSITION else at

    return [
        replace(
            event,
            position=moved(event.position),
            # What was complete right at its start is complete right before it now.
            end_position=max(moved(event.end_position), moved(event.position)),
        )
        for event in events
        if event.position != position
    ]


def on_clocks(program: Program, clock: Callable[[int, int], int]) -> Program:
    """Return a program with its times as the ranks' clocks say them: `clock(rank, true_us)`."""
    return {
        rank: [
            replace(event, start_us=clock(rank, event.start_us), end_us=clock(rank, event.end_us))
            for event in own
        ]
        for rank, own in program.items()
    }


class SimulatedRank:
    """One simulated rank: its program counter, its clock, what it has begun and completed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 10 * rank
        self.clock = 1000
        self.operators = 0
        self.done: list[RankEvent] = []
        self.flying: list[RankEvent] = []
        self.modules: list[RankEvent] = []

    def begin(self, name: str, kind: EventKind, **more: Any) -> RankEvent:
        """Start an event."""
        self.position += 1
        return RankEvent(
            graph=more.pop("graph", self.position % 2),
            iteration=ITERATION,
            position=self.position,
            end_position=self.position,
            name=name,
            kind=kind,
            start_us=self.clock,
            end_us=self.clock,
            **more,
        )

    def complete(self, event: RankEvent) -> None:
        """Complete an event that was begun."""
        self.done.append(replace(event, end_position=self.position, end_us=self.clock))


class SimulatedJob:
    """Runs a script of steps the way a job without a fault would.

    In lockstep its ranks leave a blocking collective in the same microsecond.
    """

    def __init__(self, *, lockstep: bool = False) -> None:
        self.lockstep = lockstep
        self.ranks = [SimulatedRank(rank) for rank in range(WORLD)]
        self.sequences = [0] * len(GROUPS)
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}

    def step(self, what: str, a: int, b: int, delay: bool, jump: int) -> None:
        """Let one rank, or the members of a group, do something."""
        rank = self.ranks[a % WORLD]
        rank.clock += abs(jump) if self.lockstep else jump
        getattr(self, what)(rank, b, delay)

    def operator(self, rank: SimulatedRank, _: int, delay: bool) -> None:
        rank.operators += 1
        event = rank.begin(f"Op{rank.operators}", EventKind.OPERATOR)
        if delay:
            rank.modules.append(event)
        else:
            rank.complete(event)

    def everywhere(self, _: SimulatedRank, which: int, __: bool) -> None:
        for rank in self.ranks:
            rank.complete(rank.begin(f"Layer{which}", EventKind.OPERATOR, graph=0))

    def leave(self, rank: SimulatedRank, _: int, __: bool) -> None:
        if rank.modules:
            rank.complete(rank.modules.pop())

    def collective(self, rank: SimulatedRank, which: int, delay: bool) -> None:
        which %= len(GROUPS)
        group, kind = GROUPS[which], KINDS[rank.position % len(KINDS)]
        sequence = self.sequences[which]
        self.sequences[which] += 1
        said = {"group": group.name, "sequence": sequence, "element_count": 5, "dtype": "float32"}
        begun = [self.ranks[member].begin("Coll", kind, **said) for member in sorted(group.ranks)]
        if self.lockstep and not delay:
            together = max(self.ranks[member].clock for member in group.ranks) + 1
            for member in group.ranks:
                self.ranks[member].clock = together
        for member, event in zip(sorted(group.ranks), begun, strict=True):
            it = self.ranks[member]
            # Not every member has to treat it as asynchronous.
            if delay and (member + sequence) % 3:
                it.flying.append(event)
            else:
                it.complete(event)

    def send(self, rank: SimulatedRank, to: int, delay: bool) -> None:
        to %= WORLD
        number = self.sent.get((rank.rank, to), 0)
        self.sent[rank.rank, to] = number + 1
        event = rank.begin("Send", EventKind.SEND, group="world", sequence=number, peer=to)
        if delay:
            rank.flying.append(event)
        else:
            rank.complete(event)

    def receive(self, rank: SimulatedRank, sender: int, delay: bool) -> None:
        sender %= WORLD
        number = self.received.get((sender, rank.rank), 0)
        there = number < self.sent.get((sender, rank.rank), 0)
        if not there and (not delay or sender == rank.rank):
            return
        self.received[sender, rank.rank] = number + 1
        event = rank.begin("Recv", EventKind.RECV, group="world", sequence=number, peer=sender)
        if delay:
            rank.flying.append(event)
        else:
            rank.complete(event)

    def wait(self, rank: SimulatedRank, which: int, _: bool) -> None:
        if rank.flying and self.may_end(rank, event := rank.flying[which % len(rank.flying)]):
            rank.flying.remove(event)
            rank.complete(event)

    def may_end(self, rank: SimulatedRank, event: RankEvent) -> bool:
        arrived = self.sent.get((event.peer, rank.rank), 0)
        return event.kind is not EventKind.RECV or event.sequence < arrived

    def finish(self, *, waiting: bool = False) -> Program:
        """Return what all ranks did; calls that are not complete are completed, or still open."""
        for sender, receiver in itertools.product(range(WORLD), repeat=2):
            while self.sent.get((sender, receiver), 0) < self.received.get((sender, receiver), 0):
                self.send(self.ranks[sender], receiver, False)
            while self.received.get((sender, receiver), 0) < self.sent.get((sender, receiver), 0):
                self.receive(self.ranks[receiver], sender, False)
        for rank in self.ranks:
            for event in rank.flying:
                if waiting:
                    rank.done.append(replace(event, end_position=OPEN_END_POSITION))
                else:
                    rank.complete(event)
            for event in rank.modules[::-1]:
                rank.complete(event)
        return {rank.rank: rank.done for rank in self.ranks if rank.done}


WHAT = ["operator", "operator", "leave", "collective", "send", "receive", "wait", "everywhere"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WHAT),
        st.integers(0, 11),
        st.integers(0, 11),
        st.booleans(),
        # Mostly forwards, sometimes not at all, sometimes a step back.
        st.sampled_from([0, 1, 1, 5, 20, 400, -3, -300]),
    ),
    max_size=45,
)


def simulated(steps: Sequence[Step], *, lockstep: bool = False, waiting: bool = False) -> Program:
    """Return what the ranks of a job did that followed a script."""
    job = SimulatedJob(lockstep=lockstep)
    for step in steps:
        job.step(*step)
    return job.finish(waiting=waiting)
