"""Two lists of programs to programs in pairs, and these to pairs of tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rankdump.diff.pairing import pair
from rankdump.diff.pairing.kinds import marks_layer
from rankdump.diff.places import tensor_pairs
from rankdump.diff.values import CONSTANTS, Outcome, PairedCalls, Program, Row, Settings, TensorPair


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
    a: Sequence[Program], b: Sequence[Program], notes: list[str]
) -> list[tuple[Program, Program]]:
    """Return the programs of one rank and iteration; what only one side has is noted.

    Where each side has a single rank, these two belong together whatever their numbers, and where
    a rank has a single iteration on each side, these two.
    """
    ranks_a, ranks_b = _by_rank(a), _by_rank(b)
    found: list[tuple[Program, Program]] = []
    for rank, other in _numbers(list(ranks_a), list(ranks_b), "rank", "", notes):
        own, its = ranks_a[rank], ranks_b[other]
        steps_a, steps_b = (sorted(set(each) - {CONSTANTS}) for each in (own, its))
        pairs = _numbers(steps_a, steps_b, "iteration", f" of rank {rank}", notes)
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


def _numbers(
    a: list[int], b: list[int], noun: str, where: str, notes: list[str]
) -> list[tuple[int, int]]:
    """Return the numbers that belong together; those of one side alone are noted."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    for which, own, others in (("a", a, b), ("b", b, a)):
        alone = sorted(set(own) - set(others))
        if alone:
            shown = ", ".join(map(str, alone[:8])) + (", ..." if len(alone) > 8 else "")
            notes.append(f"only {which} has {noun}{'s' if len(alone) > 1 else ''} {shown}{where}")
    return [(number, number) for number in sorted(set(a) & set(b))]
