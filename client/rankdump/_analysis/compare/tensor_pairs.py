"""Pairs of programs with the same rank and iteration, and the pairs of tensors in their paired
calls. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rankdump._analysis.compare.call_names import normalize_shape
from rankdump._analysis.compare.call_pairs import pair_calls
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    NOT_COMPARED,
    CallPair,
    ComparisonRow,
    ComparisonSettings,
    DumpedProgram,
    DumpedTensor,
    ProgramPlace,
    TensorPair,
)
from rankdump._analysis.reader.statistic_tables import is_layer_mark
from rankdump._layout.api_tree import parse_place

_MAX_LISTED_NUMBERS = 8


def pair_call_tensors(paired: CallPair) -> list[TensorPair]:
    """Return the tensors of a pair of calls in pairs: inputs first, each side in the order of slots
    of a.

    Tensors with the same keyword are paired first, then those with the same argument, then those
    with the same slot if an argument is unknown or the shapes agree, then those with the same shape
    in order, then the last tensor of each side. Tensors of b without a partner come last.
    """
    a, b = paired.a, paired.b
    return [
        *_pair_tensors(a.inputs if a else (), b.inputs if b else ()),
        *_pair_tensors(a.outputs if a else (), b.outputs if b else ()),
    ]


def _pair_tensors(a: Sequence[DumpedTensor], b: Sequence[DumpedTensor]) -> list[TensorPair]:
    if len(a) == len(b) == 1:
        return [TensorPair(a[0], b[0])]
    if not (a and b):
        return [TensorPair(own, None) for own in a] + [TensorPair(None, other) for other in b]
    left = list(b)
    partner: dict[int, DumpedTensor] = {}
    for same in (_get_keyword_key, _get_argument_key, _get_slot_key, _get_shape_key):
        _pair_by_key(a, left, partner, same)
    alone = [tensor for tensor in a if tensor.slot not in partner]
    if len(alone) == len(left) == 1:
        partner[alone[0].slot] = left.pop()
    paired = [TensorPair(tensor, partner.get(tensor.slot)) for tensor in a]
    return [*paired, *(TensorPair(None, tensor) for tensor in left)]


def _pair_by_key(
    a: Sequence[DumpedTensor],
    left: list[DumpedTensor],
    partner: dict[int, DumpedTensor],
    key: Callable[[DumpedTensor, bool], Hashable],
) -> None:
    """Pair each tensor of a with the first remaining tensor of b that has the same key, unless the
    key is None.
    """
    known = all(tensor.argument for tensor in (*a, *left))
    for tensor in a:
        own = key(tensor, known)
        if tensor.slot in partner or own is None:
            continue
        at = next((at for at, other in enumerate(left) if key(other, known) == own), None)
        if at is not None:
            partner[tensor.slot] = left.pop(at)


def _get_keyword_key(tensor: DumpedTensor, known: bool) -> Hashable:
    # Keyword arguments may be in any order, so their slots may differ.
    place = parse_place(tensor.argument)
    return None if place is None else place.word or None


def _get_argument_key(tensor: DumpedTensor, known: bool) -> Hashable:
    # The text after a colon only tells numbers, or marks recomputed tensors.
    return tensor.argument.partition(":")[0] or None if known else None


def _get_slot_key(tensor: DumpedTensor, known: bool) -> Hashable:
    # Different filters shift slots, so the shapes have to agree as well.
    return (tensor.slot, normalize_shape(tensor.shape)) if known else tensor.slot


def _get_shape_key(tensor: DumpedTensor, known: bool) -> Hashable:
    return normalize_shape(tensor.shape)


class _NumberedSide(NamedTuple):
    """Ranks of one of the two dumps, or iterations of one rank."""

    name: str
    numbers: list[int]
    gone: set[int]
    """Ranks or iterations that retention has removed."""


def pair_programs(
    a: Sequence[DumpedProgram],
    b: Sequence[DumpedProgram],
    notes: list[str],
    *,
    gone_a: Iterable[ProgramPlace] = (),
    gone_b: Iterable[ProgramPlace] = (),
) -> list[tuple[DumpedProgram, DumpedProgram]]:
    """Return the programs in pairs by rank and iteration; add a note for programs that only one
    side has.

    If each side has only one rank, these two are paired even if their numbers differ; the same
    applies to a rank with only one iteration on each side. Neither applies if one side has retired
    what the other side has.
    """
    ranks_a, ranks_b = _group_by_rank(a), _group_by_rank(b)
    lost_a, lost_b = _group_retired_by_rank(gone_a), _group_retired_by_rank(gone_b)
    found: list[tuple[DumpedProgram, DumpedProgram]] = []
    sides = (
        _NumberedSide("a", list(ranks_a), set(lost_a)),
        _NumberedSide("b", list(ranks_b), set(lost_b)),
    )
    for rank, other in _pair_numbers(*sides, "rank", "", notes):
        own, its = ranks_a[rank], ranks_b[other]
        one = _NumberedSide("a", sorted(set(own) - {CONSTANTS_ITERATION}), lost_a.get(rank, set()))
        two = _NumberedSide("b", sorted(set(its) - {CONSTANTS_ITERATION}), lost_b.get(other, set()))
        pairs = _pair_numbers(one, two, "iteration", f" of rank {rank}", notes)
        if CONSTANTS_ITERATION in own and CONSTANTS_ITERATION in its:
            pairs.insert(0, (CONSTANTS_ITERATION, CONSTANTS_ITERATION))
        elif CONSTANTS_ITERATION in own or CONSTANTS_ITERATION in its:
            which = "a" if CONSTANTS_ITERATION in own else "b"
            notes.append(f"only {which} has constants of rank {rank}")
        found.extend((own[step], its[other_step]) for step, other_step in pairs)
    return found


def pair_program_tensors(
    programs: Sequence[tuple[DumpedProgram, DumpedProgram]], settings: ComparisonSettings
) -> list[ComparisonRow]:
    """Return the rows for the tensors of paired programs, in execution order; they are not compared
    yet.

    A layer mark that only one side has is left out, because it computes nothing, and a dump with
    files has it only for the first call of the layer.
    """
    return [
        row
        for a, b in programs
        for position, calls in enumerate(pair_calls(a, b, settings))
        if (calls.a and calls.b) or not is_layer_mark(calls.either.op_name)
        for row in make_call_rows(a, position, calls)
    ]


def make_call_rows(
    program: DumpedProgram, position: int, paired: CallPair
) -> Iterator[ComparisonRow]:
    """Yield the rows for the tensors of a pair of calls; they are not compared yet."""
    a, b, either = paired.a, paired.b, paired.either
    names = a.op_name if a else "", b.op_name if b else ""
    facts = position, paired.rule, either.op_type, *names, either.backward
    for pair in pair_call_tensors(paired):
        yield ComparisonRow(program.rank, program.iteration, *facts, pair, NOT_COMPARED)


def _group_by_rank(programs: Sequence[DumpedProgram]) -> dict[int, dict[int, DumpedProgram]]:
    found: dict[int, dict[int, DumpedProgram]] = {}
    for program in programs:
        found.setdefault(program.rank, {})[program.iteration] = program
    return found


def _group_retired_by_rank(gone: Iterable[ProgramPlace]) -> dict[int, set[int]]:
    """Return the retired iterations of each rank."""
    found: dict[int, set[int]] = {}
    for rank, iteration in gone:
        found.setdefault(rank, set()).add(iteration)
    return found


def _pair_numbers(
    a: _NumberedSide, b: _NumberedSide, noun: str, where: str, notes: list[str]
) -> list[tuple[int, int]]:
    """Return numbers of both sides in pairs; add a note for numbers that only one side has."""
    met = sorted(set(a.numbers) & set(b.numbers))
    lost = a.gone.intersection(b.numbers) | b.gone.intersection(a.numbers)
    if len(a.numbers) == len(b.numbers) == 1 and (met or not lost):
        return [(a.numbers[0], b.numbers[0])]
    for own, other in ((a, b), (b, a)):
        alone = set(own.numbers) - set(other.numbers)
        if alone - other.gone:
            notes.append(f"only {own.name} has {_format_numbers(noun, alone - other.gone)}{where}")
        if alone & other.gone:
            retired = f"{_format_numbers(noun, alone & other.gone)}{where}, which {own.name} has"
            notes.append(f"{other.name} has retired {retired}")
    return [(number, number) for number in met]


def _format_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Return numbers as text: `iterations 1, 2`."""
    every = sorted(numbers)
    shown = ", ".join(map(str, every[:_MAX_LISTED_NUMBERS]))
    more = ", ..." if len(every) > _MAX_LISTED_NUMBERS else ""
    return f"{noun}{'s' if len(every) > 1 else ''} {shown}{more}"
