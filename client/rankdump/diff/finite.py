"""Looks into the few tensors on which it depends where NaN or infinity starts.

Tensors of one digest are equal without anybody reading them, so nobody knows whether they are
finite. Only the inputs of the suspected call are read, and what has the same digest is as they
are; when one of them is not finite, the search begins again there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.diff.origin import found_on_ranks
from rankdump.diff.origin_rows import NONFINITE, Question, bad, tensor_of
from rankdump.diff.values import Row, Tensor
from rankdump.reader import load, statistics

_ROUNDS = 64
"""Most steps back: each of them reads the inputs of one call of each rank."""


def looked_into(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with what had to be known of both sides."""
    known = list(rows)
    for question in NONFINITE:
        if any(bad(row, question) for row in known):
            _decide(known, question)
    return known


def _decide(rows: list[Row], question: Question) -> None:
    alike = _Alike(rows, question)
    for at, row in enumerate(rows):
        if bad(row, question):
            alike.say(at, finite=False)
    for _ in range(_ROUNDS):
        places = {id(row): at for at, row in enumerate(rows)}
        asked = [row for found in found_on_ranks(rows, question) for row in found.unknown]
        answers = [(places[id(row)], _finite(tensor_of(row, question))) for row in asked]
        known = [(at, finite) for at, finite in answers if finite is not None]
        for at, finite in known:
            alike.say(at, finite=finite)
        if not known:
            return


class _Alike:
    """Rows whose tensors have the same bytes on the side that is asked about."""

    def __init__(self, rows: list[Row], question: Question) -> None:
        self._rows, self._question = rows, question
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        for at in range(len(rows)):
            self._places[self._digest(at)].append(at)

    def say(self, at: int, *, finite: bool) -> None:
        """Say it of a tensor, and of all that are as it is and of which nothing is known."""
        digest = self._digest(at)
        for each in self._places[digest] if digest else [at]:
            row = self._rows[each]
            if bad(row, self._question) is None:
                outcome = row.outcome
                if self._question.side == "b":
                    outcome = replace(outcome, nonfinite_b=not finite)
                else:
                    outcome = replace(outcome, nonfinite_a=not finite)
                self._rows[each] = row._replace(outcome=outcome)

    def _digest(self, at: int) -> str:
        tensor = tensor_of(self._rows[at], self._question)
        return tensor.digest if tensor is not None else ""


def _finite(tensor: Tensor | None) -> bool | None:
    """Return whether all elements are; None when that cannot be told."""
    if tensor is None or tensor.entry is None:
        return None
    try:
        figures = statistics(load(tensor.entry))
    except (DamagedError, UnsupportedError):
        return None
    return figures.nans + figures.infinities == 0
