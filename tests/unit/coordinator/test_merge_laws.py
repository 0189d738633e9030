"""The laws of the merged order, over random programs, by a checker that shares nothing with it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.status import OrderEntry
from rankdumpd.coordinator.merge import merge

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


class Rank:
    """One simulated rank: its program counter, its clock, what it has begun and completed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 10 * rank
        self.clock = 1000
        self.done: list[Event] = []
        self.flying: list[Event] = []
        self.modules: list[Event] = []

    def begin(self, name: str, kind: EventKind, **more: Any) -> Event:
        self.position += 1
        return Event(
            graph=self.position % 2,
            iteration=ITERATION,
            position=self.position,
            end_position=self.position,
            name=name if kind.collective else f"{name}@{self.rank}.{self.position}",
            kind=kind,
            start_us=self.clock,
            end_us=self.clock,
            **more,
        )

    def complete(self, event: Event) -> None:
        self.done.append(replace(event, end_position=self.position, end_us=self.clock))


class Job:
    """Runs a script of steps the way a job without a fault would."""

    def __init__(self) -> None:
        self.ranks = [Rank(rank) for rank in range(WORLD)]
        self.sequences = [0] * len(GROUPS)
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}

    def step(self, what: str, a: int, b: int, delay: bool, jump: int) -> None:
        rank = self.ranks[a % WORLD]
        rank.clock += jump
        getattr(self, what)(rank, b, delay)

    def operator(self, rank: Rank, _: int, delay: bool) -> None:
        event = rank.begin("Op", EventKind.OPERATOR)
        if delay:
            rank.modules.append(event)
        else:
            rank.complete(event)

    def leave(self, rank: Rank, _: int, __: bool) -> None:
        if rank.modules:
            rank.complete(rank.modules.pop())

    def collective(self, rank: Rank, which: int, delay: bool) -> None:
        which %= len(GROUPS)
        group, kind = GROUPS[which], KINDS[rank.position % len(KINDS)]
        sequence = self.sequences[which]
        self.sequences[which] += 1
        for member in sorted(group.ranks):
            it = self.ranks[member]
            event = it.begin(
                "Coll", kind, group=group.name, sequence=sequence, element_count=5, dtype="float32"
            )
            # Not every member has to treat it as asynchronous.
            if delay and (member + sequence) % 3:
                it.flying.append(event)
            else:
                it.complete(event)

    def send(self, rank: Rank, to: int, delay: bool) -> None:
        to %= WORLD
        number = self.sent.get((rank.rank, to), 0)
        self.sent[rank.rank, to] = number + 1
        event = rank.begin("Send", EventKind.SEND, group="world", sequence=number, peer=to)
        if delay:
            rank.flying.append(event)
        else:
            rank.complete(event)

    def receive(self, rank: Rank, sender: int, delay: bool) -> None:
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

    def wait(self, rank: Rank, which: int, _: bool) -> None:
        if rank.flying and self.may_end(rank, event := rank.flying[which % len(rank.flying)]):
            rank.flying.remove(event)
            rank.complete(event)

    def may_end(self, rank: Rank, event: Event) -> bool:
        arrived = self.sent.get((event.peer, rank.rank), 0)
        return event.kind is not EventKind.RECV or event.sequence < arrived

    def finish(self) -> dict[int, list[Event]]:
        for sender, receiver in itertools.product(range(WORLD), repeat=2):
            while self.sent.get((sender, receiver), 0) < self.received.get((sender, receiver), 0):
                self.send(self.ranks[sender], receiver, False)
            while self.received.get((sender, receiver), 0) < self.sent.get((sender, receiver), 0):
                self.receive(self.ranks[receiver], sender, False)
        for rank in self.ranks:
            for event in rank.flying + rank.modules[::-1]:
                rank.complete(event)
        return {rank.rank: rank.done for rank in self.ranks if rank.done}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["operator", "operator", "leave", "collective", "send", "receive", "wait"]),
        st.integers(0, 11),
        st.integers(0, 11),
        st.booleans(),
        # Mostly forwards, sometimes not at all, sometimes a step back.
        st.sampled_from([0, 1, 1, 5, 20, 400, -3, -300]),
    ),
    max_size=45,
)


def simulated(steps: list[tuple[str, int, int, bool, int]]) -> dict[int, list[Event]]:
    job = Job()
    for step in steps:
        job.step(*step)
    return job.finish()


def batches(rank: int, events: list[Event], cut: int) -> list[EventColumns]:
    own = tuple(group for group in GROUPS if rank in group.ranks)
    return [EventColumns.of(part, own) for part in (events[:cut], events[cut:])]


# --- the checker, straight from the rules ---------------------------------------------------


Key: TypeAlias = tuple[Any, ...]


def identity(rank: int, event: Event) -> Key:
    """What stands as one entry: an operator, an end of a message, a whole collective."""
    if not event.kind.collective:
        return (rank, event.position)
    ranks = next(
        tuple(sorted(g.ranks)) for g in GROUPS if g.name == event.group and rank in g.ranks
    )
    return (event.group, ranks, event.sequence)


def entry_identity(entry: OrderEntry, program: dict[int, list[Event]]) -> Key:
    if entry.kind.collective:
        return (entry.group, entry.ranks, entry.sequence)
    (rank,) = entry.ranks
    (event,) = [event for event in program[rank] if event.name == entry.name]
    return identity(rank, event)


def constraints(program: dict[int, list[Event]]) -> set[tuple[Key, Key]]:
    """Every pair (a, b) where rules 1 to 3 put a before b."""
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


def times(program: dict[int, list[Event]]) -> dict[Key, int]:
    """Rule 4: the latest start so far; of a collective or message, so far when it completes."""
    out: dict[Key, int] = {}
    for rank, events in program.items():
        for event in events:
            upto = event.position if event.kind is EventKind.OPERATOR else event.end_position
            latest = max(e.start_us for e in events if e.position <= upto)
            key = identity(rank, event)
            out[key] = max(latest, out.get(key, latest))
    return out


def check(order: list[OrderEntry], program: dict[int, list[Event]]) -> None:
    keys = [entry_identity(entry, program) for entry in order]
    place = {key: index for index, key in enumerate(keys)}
    wanted = {identity(rank, event) for rank, events in program.items() for event in events}
    assert len(place) == len(keys)
    assert set(place) == wanted
    assert [entry.position for entry in order] == list(range(len(order)))
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
    # Ties between neighbours that nothing binds go by rank, then position.
    for (a, one), (b, two) in itertools.pairwise(zip(keys, order, strict=True)):
        both = one.kind is two.kind is EventKind.OPERATOR
        if both and effective[a] == effective[b]:
            assert a < b


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 20))
def test_a_run_without_fault_keeps_every_rule_and_reports_nothing(steps, cut) -> None:
    """Whatever the program and the clocks, rules 1 to 4 hold and there is nothing to find."""
    program = simulated(steps)
    result = merge(
        {rank: batches(rank, events, cut) for rank, events in program.items()}, iteration=ITERATION
    )
    check(list(result.entries()), program)
    assert result.findings == ()
    assert not result.calls.missing


@settings(max_examples=60, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_events_come(steps, random) -> None:
    """Batches cut and shuffled in any way, and sent twice, give the same order."""
    program = simulated(steps)
    once = {rank: batches(rank, events, 3) for rank, events in program.items()}
    again = {}
    for rank, events in program.items():
        mixed = random.sample(events, len(events))
        again[rank] = [*batches(rank, mixed, len(mixed) // 2), *once[rank]]
    one, two = merge(once, iteration=ITERATION), merge(again, iteration=ITERATION)
    assert list(one.entries()) == list(two.entries())
    assert two.findings == ()


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_without_a_rank_what_is_left_still_keeps_the_rules(steps, lost) -> None:
    """A rank that reported nothing is named as missing, and the others stay in order."""
    program = simulated(steps)
    program.pop(lost, None)
    result = merge(
        {rank: batches(rank, events, 5) for rank, events in program.items()}, iteration=ITERATION
    )
    order = list(result.entries())
    for rank in program:
        names = [e.name for e in order if e.kind is EventKind.OPERATOR and e.ranks == (rank,)]
        own = sorted(program[rank], key=lambda event: event.position)
        assert names == [event.name for event in own if event.kind is EventKind.OPERATOR]
    assert all(entry.missing in ((), (lost,)) for entry in order)
    assert len(result.findings) == any(entry.missing for entry in order)
