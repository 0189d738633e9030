"""Random programs with one fault, which is the only finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.order_jobs import GROUPS, STEPS, Program, program_view, simulated, skipped, spans_of
from support.order_rules import disagreeing

from rankdump._core.events import EventKind, FindingKind, RankEvent
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration

Found: TypeAlias = tuple[FindingKind, tuple[int, ...], str, int]
"""Kind, ranks, group and number of a finding."""
Fault: TypeAlias = Callable[[Program, Any], tuple[Program, list[Found]]]
"""Puts a fault into a program; returns what has to be found."""


def pick(
    program: Program, random: Any, wanted: Callable[[RankEvent], bool]
) -> tuple[int, RankEvent]:
    """Return an event for a fault."""
    fitting = [(rank, event) for rank, own in program.items() for event in own if wanted(event)]
    assume(fitting)
    return random.choice(fitting)


def members(program: Program, rank: int, event: RankEvent) -> tuple[int, ...]:
    """Return the ranks of a collective."""
    return next(tuple(sorted(g.ranks)) for g in GROUPS if g.name == event.group and rank in g.ranks)


def changed(program: Program, rank: int, event: RankEvent, **to: Any) -> Program:
    """Return a program with another event in the place of one."""
    own = [replace(each, **to) if each is event else each for each in program[rank]]
    return {**program, rank: own}


def mismatch(found_as: FindingKind, **to: Any) -> Fault:
    """Return the fault of a member with another size, type or kind than the others."""

    def inject(program: Program, random: Any) -> tuple[Program, list[Found]]:
        rank, event = pick(
            program, random, lambda e: e.kind.is_collective and e.kind is not EventKind.ALL_TO_ALL
        )
        ranks = members(program, rank, event)
        # Of two it is the one after the first that differs.
        odd = (rank,) if len(ranks) > 2 else ranks[1:]
        found = (found_as, odd, event.group, event.sequence)
        return changed(program, rank, event, **to), [found]

    return inject


def missing_member(program: Program, random: Any) -> tuple[Program, list[Found]]:
    """A rank skips a collective."""
    rank, event = pick(program, random, lambda e: e.kind.is_collective)
    found = (FindingKind.MISSING_MEMBER, (rank,), event.group, event.sequence)
    # One that did nothing else is silent.
    assume(len(program[rank]) > 1)
    return {**program, rank: skipped(program[rank], event.position)}, [found]


def silent_rank(program: Program, random: Any) -> tuple[Program, list[Found]]:
    """A rank reports nothing."""
    rank, event = pick(program, random, lambda e: e.kind is not EventKind.OPERATOR)
    rest = {each: own for each, own in program.items() if each != rank}
    needed = event.kind.is_collective or event.peer != rank
    assume(needed)
    return rest, [(FindingKind.SILENT_RANK, (rank,), "", -1)]


def lone(gone: EventKind) -> Fault:
    """Return the fault of a message with one end only."""

    def inject(program: Program, random: Any) -> tuple[Program, list[Found]]:
        rank, event = pick(program, random, lambda e: e.kind is gone)
        assume(len(program[rank]) > 1)
        rest = {**program, rank: skipped(program[rank], event.position)}
        return rest, [(FindingKind.LONE_MESSAGE, (rank,), event.group, event.sequence)]

    return inject


def circle(program: Program, random: Any) -> tuple[Program, list[Found]]:
    """Two ranks enter two groups in opposite order."""
    assume({0, 1, 2, 3} <= set(program))
    one, other, both = random.choice([("world", "tp", (2, 3)), ("world", "dp", (0, 2))])
    numbers = {}
    program = {rank: list(own) for rank, own in program.items()}
    for name in (one, other):
        own = [
            e.sequence for r in both for e in program[r] if e.group == name and e.kind.is_collective
        ]
        numbers[name] = max(own, default=-1) + 1
    for rank in range(4):
        names = [name for name in (one, other) if name == one or rank in both]
        for name in names[::-1] if rank == both[1] else names:
            at = max(event.position for event in program[rank]) + 1
            program[rank].append(
                RankEvent(0, 7, at, at, "Circle", EventKind.BARRIER, 10**6, 10**6, group=name,
                      sequence=numbers[name])
            )  # fmt: skip
    return program, [(FindingKind.CYCLE, (0, 1, 2, 3), "", -1)]


def dropped(program: Program, random: Any) -> tuple[Program, list[Found]]:
    """Some consecutive events of a rank are lost."""
    assume(program)
    rank = random.choice(sorted(program))
    own = sorted(program[rank], key=lambda event: event.position)
    low = random.randrange(len(own))
    high = random.randint(low + 1, len(own))
    rest = {**program, rank: [*own[:low], *own[high:]]}
    rest = {each: events for each, events in rest.items() if events}
    return rest, [(FindingKind.GAP, (rank,), "", -1)]


FAULTS: dict[str, Fault] = {
    "operation": mismatch(FindingKind.OPERATION_MISMATCH, kind=EventKind.REDUCE_SCATTER),
    "size": mismatch(FindingKind.SIZE_MISMATCH, element_count=6),
    "dtype": mismatch(FindingKind.DTYPE_MISMATCH, dtype="int8"),
    "missing": missing_member,
    "silent": silent_rank,
    "lone send": lone(EventKind.RECV),
    "lone receive": lone(EventKind.SEND),
    "circle": circle,
    "dropped": dropped,
}


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=60, deadline=None)
@given(st.data(), STEPS, st.randoms(use_true_random=False))
def test_injected_fault_is_the_only_finding(fault, data, steps, random) -> None:
    """The finding has kind, rank, group and sequence of the fault."""
    whole = simulated(steps)
    program, expected = FAULTS[fault](whole, random)
    # Of what was lost only the rank itself knows that it was there.
    spans = spans_of(whole if fault == "dropped" else program)
    result = merge_iteration(program_view(program, data.draw(st.integers(0, 20)), spans=spans))
    found = [f for f in result.findings if f.kind is not FindingKind.SEQUENCE_DIFFERENCE]
    for finding, (kind, ranks, group, sequence) in zip(found, expected, strict=True):
        assert (finding.kind, finding.ranks) == (kind, ranks)
        assert not group or (finding.group, finding.sequence) == (group, sequence)
        assert finding.text.startswith("iteration 7: ")
    lost = [rank for rank in whole if fault == "dropped" and program.get(rank) != whole[rank]]
    differing = [f for f in result.findings if f not in found]
    ignored = [rank for rank in lost if len(program.get(rank, ())) < len(whole[rank])]
    assert {r for f in differing for r in f.ranks} == disagreeing(program, ignored=ignored)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["everywhere", "collective"]), min_size=1, max_size=30),
       st.randoms(use_true_random=False))  # fmt: skip
def test_injected_operator_is_found_on_its_rank(what, random) -> None:
    """All ranks run the same program, one of them with another operator."""
    program = simulated([(each, 0, 0, False, 1) for each in [*what, "everywhere", "collective"]])
    rank, event = pick(program, random, lambda e: e.kind is EventKind.OPERATOR)
    other = changed(program, rank, event, name="Other")
    (finding,) = merge_iteration(program_view(other, spans=spans_of(other))).findings
    assert (finding.kind, finding.ranks) == (FindingKind.SEQUENCE_DIFFERENCE, (rank,))
    assert (finding.name, finding.position) == ("Other", event.position)
