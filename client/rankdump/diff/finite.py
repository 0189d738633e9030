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
from rankdump.diff.origin import Found, found_on_ranks
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
    places = {id(row): at for at, row in enumerate(rows)}
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        tensor = tensor_of(row, question)
        if tensor is not None and tensor.digest:
            alike[tensor.digest].append(at)
    for at, row in enumerate(rows):
        if bad(row, question):
            _spread(rows, at, alike, question, finite=False)
            places[id(rows[at])] = at
    for _ in range(_ROUNDS):
        places = {id(row): at for at, row in enumerate(rows)}
        if not _round(rows, found_on_ranks(rows, question), places, alike, question):
            return


def _round(
    rows: list[Row],
    found: Sequence[Found],
    places: dict[int, int],
    alike: defaultdict[str, list[int]],
    question: Question,
) -> bool:
    """Read what the answers depend on; return whether anything new is known."""
    learned = False
    for row in (row for each in found for row in each.unknown):
        tensor = tensor_of(row, question)
        finite = _finite(tensor) if tensor is not None else None
        if finite is not None:
            learned = True
            _spread(rows, places[id(row)], alike, question, finite=finite)
    return learned


def _spread(
    rows: list[Row],
    at: int,
    alike: defaultdict[str, list[int]],
    question: Question,
    *,
    finite: bool,
) -> None:
    """Say it of a tensor and of all that have the same bytes."""
    tensor = tensor_of(rows[at], question)
    digest = tensor.digest if tensor is not None else ""
    for each in alike[digest] if digest else [at]:
        row = rows[each]
        if bad(row, question) is None:
            outcome = row.outcome
            if question.side == "b":
                outcome = replace(outcome, nonfinite_b=not finite)
            else:
                outcome = replace(outcome, nonfinite_a=not finite)
            rows[each] = replace(row, outcome=outcome)


def _finite(tensor: Tensor) -> bool | None:
    """Return whether all elements are; None when that cannot be told."""
    if tensor.entry is None:
        return None
    try:
        figures = statistics(load(tensor.entry))
    except (DamagedError, UnsupportedError):
        return None
    return figures.nans + figures.infinities == 0
