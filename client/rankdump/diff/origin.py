"""Where it starts on one rank: the first call that turned good inputs into bad outputs. Pure.

What is bad: for `difference` a tensor that does not agree with its partner, for `nonfinite` one
that holds NaN or infinity. The first bad tensor in the order in which tensors were seen decides.
It belongs to a call that was open then, whose inputs are good and whose outputs are bad; of
several inside each other to the one that ended first, the innermost. When no such call was open it
came from outside what was dumped, or through a call that only one side made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from rankdump.contract.key import Side
from rankdump.diff import origin_words as words
from rankdump.diff.origin_rows import Question, bad, seen, tensor_of
from rankdump.diff.summary import error, severity
from rankdump.diff.values import CONSTANTS, Row

_Place: TypeAlias = "tuple[int, int]"
_MOST_ASKED = 2
"""Most calls that are looked into to tell a mask from data that are not finite."""
_MOST_ALONE = 8
"""Most calls of one side alone that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A pair of calls with the rows of its tensors; one is equal to itself alone."""

    rows: tuple[Row, ...]

    @property
    def row(self) -> Row:
        """Any of them: names and places are those of the pair."""
        return self.rows[0]

    def on(self, side: Side) -> tuple[Row, ...]:
        """Return the rows of its inputs, or of its outputs."""
        return tuple(row for row in self.rows if _side(row) is side)


@dataclass(frozen=True, slots=True)
class Found:
    """Where it starts on one rank."""

    question: Question
    steps: tuple[Step, ...]
    """Who may have done it, the likeliest first."""
    reasons: tuple[str, ...]
    """Of each."""
    why: str = ""
    """Why it is not certain."""
    outside: bool = False
    """The inputs are bad already, and nothing that was dumped made them so."""
    unknown: tuple[Row, ...] = ()
    """Inputs of the first that nobody has looked into."""

    @property
    def first(self) -> Row:
        """The likeliest."""
        return self.steps[0].row

    @property
    def amount(self) -> tuple[int, float]:
        """How bad is what its reason speaks of: the verdict, then the error."""
        wrong = [row for row in self.steps[0].rows if bad(row, self.question)]
        outputs = [row for row in wrong if _side(row) is Side.OUTPUT]
        told = (outputs or wrong or self.steps[0].rows)[0]
        known = error(told)
        return -severity(told), 0.0 if math.isnan(known) else known

    @property
    def place(self) -> tuple[bool, int]:
        """Iteration, for sorting: constants belong to none, and come last."""
        return self.first.iteration == CONSTANTS, self.first.iteration


def found_on_ranks(rows: Sequence[Row], question: Question) -> list[Found]:
    """Return where it starts on each rank where it does: in its first iteration with it."""
    if not any(bad(row, question) for row in rows):
        return []
    programs = _programs(rows)
    found: dict[int, Found] = {}
    for rank, iteration in sorted(programs, key=lambda place: (place[1] == CONSTANTS, place[1])):
        if rank not in found:
            answer = found_in(programs[rank, iteration], question)
            if answer is not None:
                found[rank] = answer
    return [found[rank] for rank in sorted(found)]


def found_in(steps: Sequence[Step], question: Question) -> Found | None:
    """Return where it starts in one program; None when nothing is bad.

    An infinite mask that comes from outside is passed over when a call that read it wrote nothing
    but finite numbers.
    """
    found = _search(steps, question)
    while found is not None and found.outside and question.kind == "nonfinite":
        mask = next(row for row in found.steps[0].on(Side.INPUT) if bad(row, question))
        tensor = tensor_of(mask, question)
        digest = tensor.digest if tensor is not None else ""
        readers = _readers(steps, digest, question) if digest else []
        if not any(_finite(step, question) for step in readers):
            outputs = (row for step in readers[:_MOST_ASKED] for row in step.on(Side.OUTPUT))
            unknown = tuple(row for row in outputs if bad(row, question) is None)
            return replace(found, unknown=unknown)
        question = replace(question, harmless=question.harmless | {digest})
        found = _search(steps, question)
    return found


def _readers(steps: Sequence[Step], digest: str, question: Question) -> list[Step]:
    """Return the calls that read a tensor, those that ended first in front."""
    found = [
        step
        for step in steps
        if step.on(Side.OUTPUT)
        and any(
            t and t.digest == digest for t in (tensor_of(r, question) for r in step.on(Side.INPUT))
        )
    ]
    return sorted(found, key=lambda step: max(seen(row, question) for row in step.rows))


def _finite(step: Step, question: Question) -> bool:
    return all(bad(row, question) is False for row in step.on(Side.OUTPUT))


def _search(steps: Sequence[Step], question: Question) -> Found | None:
    wrong = [
        (seen(row, question), step, row)
        for step in steps
        for row in step.rows
        if bad(row, question)
    ]
    if not wrong:
        return None
    when, step, row = min(wrong, key=lambda each: each[0])
    maker = _maker([step for _, step, _ in wrong], when, question)
    if _side(row) is Side.INPUT or maker is None:
        alone = _alone_before(steps, step, row)
        if alone:
            return _alone(alone, row, question)
    if maker is None:
        return _outside(steps, step, row, question)
    return _made(steps, maker, step, question)


def _programs(rows: Iterable[Row]) -> dict[_Place, list[Step]]:
    """Return the steps of each program, in execution order."""
    found: defaultdict[_Place, defaultdict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row.rank, row.iteration][row.position].append(row)
    return {
        place: [Step(tuple(program[at])) for at in sorted(program)]
        for place, program in found.items()
    }


def _side(row: Row) -> Side | None:
    tensor = row.pair.a or row.pair.b
    return tensor.side if tensor is not None else None


def _maker(wrong: Iterable[Step], when: int, question: Question) -> Step | None:
    """Return the call open at that time that has good inputs and was the first to end badly."""
    best: tuple[int, Step] | None = None
    for step in wrong:
        ends = [seen(row, question) for row in step.on(Side.OUTPUT) if bad(row, question)]
        if not ends or any(bad(row, question) for row in step.on(Side.INPUT)):
            continue
        begin = min(seen(row, question) for row in step.rows if tensor_of(row, question))
        if begin <= when and (best is None or min(ends) < best[0]):
            best = min(ends), step
    return best[1] if best is not None else None


def _alone_before(steps: Sequence[Step], step: Step, row: Row) -> list[Step]:
    """Return the calls of one side alone that stand nearest before a call, the last first.

    Where calls that agree stand between, one of them must have made a tensor of that shape.
    """
    before = steps[: steps.index(step)][::-1]
    agreeing = list(takewhile(lambda each: each.row.rule, before))
    alone = list(takewhile(lambda each: not each.row.rule, before[len(agreeing) :]))
    return alone if not agreeing or any(_fits(each, row) for each in alone) else []


def _fits(alone: Step, row: Row) -> bool:
    """Return whether a call of one side alone made what might be that side's input."""
    wanted = row.pair.a if alone.row.name_a else row.pair.b
    made = [each.pair.a or each.pair.b for each in alone.on(Side.OUTPUT)]
    return wanted is not None and any(each and each.shape == wanted.shape for each in made)


def _alone(alone: list[Step], row: Row, question: Question) -> Found:
    why = "" if len(alone) == 1 else words.several_alone(len(alone), row)
    return Found(
        question,
        steps=tuple(alone[:_MOST_ALONE]),
        reasons=tuple(words.only_one_side(s.row, row, question) for s in alone[:_MOST_ALONE]),
        why=why,
    )


def _outside(steps: Sequence[Step], step: Step, row: Row, question: Question) -> Found:
    if _side(row) is Side.OUTPUT:
        reason, why = words.both_sides(step.rows, question), words.LATER_INPUTS
        return Found(question, (step,), (reason,), why)
    reason = words.from_outside(row, question)
    if any(each.on(Side.OUTPUT) for each in steps):
        return Found(question, (step,), (reason,), outside=True)
    at = steps.index(step)
    before = steps[max(at - 1, 0) : at]
    reasons = (*(words.right_before(each.row, row) for each in before), reason)
    return Found(question, (*before, step), reasons, words.NO_OUTPUTS, outside=not before)


def _made(steps: Sequence[Step], maker: Step, step: Step, question: Question) -> Found:
    inputs = maker.on(Side.INPUT)
    unknown = tuple(row for row in inputs if bad(row, question) is None)
    reason = words.made(maker.rows, step.row if step is not maker else None, question)
    reason += words.in_layer(maker.row, steps[steps.index(maker) - 1].row)
    why = ""
    if unknown:
        why = words.unknown_inputs(unknown, question)
    elif not inputs and not any(each.on(Side.INPUT) for each in steps):
        why = words.NO_INPUTS
    return Found(question, (maker,), (reason,), why, unknown=unknown)
