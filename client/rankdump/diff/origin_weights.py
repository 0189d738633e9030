"""Whether a weight of the call where it starts differs as well. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankdump.contract.layout.mindspore_sync import PARAMETER
from rankdump.diff import origin_words as words
from rankdump.diff.origin import Found
from rankdump.diff.pairing.kinds import scope
from rankdump.diff.values import CONSTANTS, Row, Verdict


def weights(found: Found, rows: Iterable[Row]) -> str:
    """Return what is to be said of the weights of the likeliest call; empty when they agree.

    A tree holds parameters as they stood after the step. So those of the iteration before are the
    ones that were used; where they are not there, those of the same iteration are named as such.
    """
    first = found.first
    path = ".".join(scope(words.name_of(first)))
    if not path or first.op_type == PARAMETER or found.question.kind != "difference":
        return ""
    wanted = (first.iteration - 1, CONSTANTS, first.iteration)
    by_iteration: dict[int, list[Row]] = {}
    for row in rows:
        if row.rank == first.rank and row.iteration in wanted and _belongs(row, path):
            by_iteration.setdefault(row.iteration, []).append(row)
    for iteration in wanted:
        different = [row for row in by_iteration.get(iteration, []) if _differs(row)]
        if different:
            widest = _widest(different[0], rows)
            return words.also_differs(widest, after=iteration == first.iteration)
    return ""


def _widest(weight: Row, rows: Iterable[Row]) -> Row:
    """Return the row of a weight on the rank where it is apart the most."""
    what = weight.iteration, words.name_of(weight), weight.place
    same = [
        row
        for row in rows
        if row.op_type == PARAMETER
        and (row.iteration, words.name_of(row), row.place) == what
        and row.outcome.verdict is weight.outcome.verdict
    ]
    return max(
        same, key=lambda row: row.outcome.measures.max_absolute if row.outcome.measures else 0.0
    )


def _belongs(row: Row, path: str) -> bool:
    if row.op_type != PARAMETER or row.backward:
        return False
    return words.name_of(row).rpartition(".")[0] == path


def _differs(row: Row) -> bool:
    return row.outcome.verdict in (Verdict.DIFFERENT, Verdict.NAN, Verdict.SHAPE)
