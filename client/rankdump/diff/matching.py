"""Two lists of programs to programs in pairs, and these to pairs of tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from rankdump.diff.pairing import pair
from rankdump.diff.pairing.kinds import marks_layer
from rankdump.diff.places import tensor_pairs
from rankdump.diff.values import CONSTANTS, Outcome, PairedCalls, Program, Row, Settings, TensorPair

Place: TypeAlias = "tuple[int, int]"
"""Rank and iteration."""
_MOST_SHOWN = 8


class _Side(NamedTuple):
    """What one of the two dumps has: ranks, or iterations of a rank."""

    name: str
    numbers: list[int]
    gone: set[int]
    """Of which anything was removed on purpose."""


class Matched(NamedTuple):
    """A pair of tensors, and the pair of calls that it belongs to."""

    rank: int
    iteration: int
    position: int
    calls: PairedCalls
    pair: TensorPair

    def row(self, outcome: Outcome) -> Row:
        """Return the line that a report has of it."""
        call, other = self.calls.a, self.calls.b
        named = call or other
        return Row(
            self.rank,
            self.iteration,
            self.position,
            self.calls.rule,
            named.op_type if named else "",
            call.op_name if call else "",
            other.op_name if other else "",
            named is not None and named.backward,
            self.pair,
            outcome,
        )


def programs_in_pairs(
    a: Sequence[Program],
    b: Sequence[Program],
    notes: list[str],
    *,
    gone_a: Iterable[Place] = (),
    gone_b: Iterable[Place] = (),
) -> list[tuple[Program, Program]]:
    """Return the programs of one rank and iteration; what only one side has is noted.

    Where each side has a single rank, these two belong together whatever their numbers, and where
    a rank has a single iteration on each side, these two; unless one side had the other's, and has
    retired it.
    """
    ranks_a, ranks_b = _by_rank(a), _by_rank(b)
    lost_a, lost_b = _lost(gone_a), _lost(gone_b)
    found: list[tuple[Program, Program]] = []
    sides = _Side("a", list(ranks_a), set(lost_a)), _Side("b", list(ranks_b), set(lost_b))
    for rank, other in _numbers(*sides, "rank", "", notes):
        own, its = ranks_a[rank], ranks_b[other]
        one = _Side("a", sorted(set(own) - {CONSTANTS}), lost_a.get(rank, set()))
        two = _Side("b", sorted(set(its) - {CONSTANTS}), lost_b.get(other, set()))
        pairs = _numbers(one, two, "iteration", f" of rank {rank}", notes)
        if CONSTANTS in own and CONSTANTS in its:
            pairs.insert(0, (CONSTANTS, CONSTANTS))
        elif CONSTANTS in own or CONSTANTS in its:
            which = "a" if CONSTANTS in own else "b"
            notes.append(f"only {which} has constants of rank {rank}")
        found.extend((own[step], its[other_step]) for step, other_step in pairs)
    return found


def matched(
    programs: Sequence[tuple[Program, Program]], settings: Settings
) -> Iterator[list[Matched]]:
    """Yield the pairs of tensors of each pair of programs, in execution order.

    The mark of a layer that only one side has is left out: it computes nothing, and a dump with
    files has it only the first time that the layer is called.
    """
    for a, b in programs:
        yield [
            Matched(a.rank, a.iteration, position, calls, each)
            for position, calls in enumerate(pair(a, b, settings))
            if not _lonely_mark(calls)
            for each in tensor_pairs(calls)
        ]


def _lonely_mark(calls: PairedCalls) -> bool:
    if calls.a and calls.b:
        return False
    alone = calls.a or calls.b
    return alone is not None and marks_layer(alone.op_name)


def _by_rank(programs: Sequence[Program]) -> dict[int, dict[int, Program]]:
    found: dict[int, dict[int, Program]] = {}
    for program in programs:
        found.setdefault(program.rank, {})[program.iteration] = program
    return found


def _lost(gone: Iterable[Place]) -> dict[int, set[int]]:
    """Return iterations that were retired, by rank."""
    found: dict[int, set[int]] = {}
    for rank, iteration in gone:
        found.setdefault(rank, set()).add(iteration)
    return found


def _numbers(a: _Side, b: _Side, noun: str, where: str, notes: list[str]) -> list[tuple[int, int]]:
    """Return the numbers that belong together; those of one side alone are noted."""
    met = sorted(set(a.numbers) & set(b.numbers))
    lost = a.gone.intersection(b.numbers) | b.gone.intersection(a.numbers)
    if len(a.numbers) == len(b.numbers) == 1 and (met or not lost):
        return [(a.numbers[0], b.numbers[0])]
    for own, other in ((a, b), (b, a)):
        alone = set(own.numbers) - set(other.numbers)
        if alone - other.gone:
            notes.append(f"only {own.name} has {_counted(noun, alone - other.gone)}{where}")
        if alone & other.gone:
            which = f"{_counted(noun, alone & other.gone)}{where}, which {own.name} has"
            notes.append(f"{other.name} has retired {which}")
    return [(number, number) for number in met]


def _counted(noun: str, numbers: Iterable[int]) -> str:
    """Return some numbers in words: `iterations 1, 2`."""
    every = sorted(numbers)
    shown = ", ".join(map(str, every[:_MOST_SHOWN]))
    more = ", ..." if len(every) > _MOST_SHOWN else ""
    return f"{noun}{'s' if len(every) > 1 else ''} {shown}{more}"
