"""What a report comes to, before anybody shows it: counts, operators, one's rows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.diff.values import Origin, Report, Row, Suspect, Verdict

SEVERITY = (
    Verdict.NAN,
    Verdict.SHAPE,
    Verdict.DIFFERENT,
    Verdict.UNREADABLE,
    Verdict.UNMATCHED,
    Verdict.UNKNOWN,
    Verdict.CLOSE,
    Verdict.EQUAL,
)
"""Worst first."""
_EXTREMES = ("max", "min", "avg")
_ORDER = {verdict: at for at, verdict in enumerate(SEVERITY)}
CallKey: TypeAlias = "tuple[int, int, int, str, str]"
"""Rank, iteration, position and both names: one pair of calls of a report."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A pair of calls, with what all its tensors came to."""

    worst: Row
    """The row of the worst verdict; of several the largest error."""
    tensors: int
    differing: int
    error: float
    """Largest over its tensors; NaN where none is known, or that of the worst is no number."""
    cosine: float
    """Lowest over its tensors; NaN where none has one."""
    close_share: float
    """Lowest over its tensors; NaN where none was measured."""


def counts(rows: Iterable[Row]) -> dict[Verdict, int]:
    """Return how many rows have each verdict, worst first, those with none left out."""
    found = Counter(row.outcome.verdict for row in rows)
    return {verdict: found[verdict] for verdict in SEVERITY if found[verdict]}


def severity(row: Row) -> int:
    """Return where the verdict of a row stands among all: 0 is the worst."""
    return _ORDER[row.outcome.verdict]


def operators(rows: Iterable[Row]) -> list[Operator]:
    """Return the pairs of calls in the order in which their first rows stand."""
    groups: dict[CallKey, list[Row]] = {}
    for row in rows:
        groups.setdefault(call_key(row), []).append(row)
    return [_operator(group) for group in groups.values()]


def call_key(called: Row | Suspect) -> CallKey:
    """Return what tells a pair of calls from all others of a report."""
    return called.rank, called.iteration, called.position, called.name_a, called.name_b


def lonely(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """Return the first row of each call without a partner, by the side that has it."""
    found: dict[str, dict[CallKey, Row]] = {"a": {}, "b": {}}
    for row in rows:
        if bool(row.name_a) != bool(row.name_b):
            found["a" if row.name_a else "b"].setdefault(call_key(row), row)
    return {side: list(calls.values()) for side, calls in found.items()}


def max_absolute(row: Row) -> float:
    """Return the largest absolute error of a row: 0 for equal tensors, NaN where none is known."""
    if row.outcome.measures is not None:
        return row.outcome.measures.max_absolute
    return 0.0 if row.outcome.verdict is Verdict.EQUAL else math.nan


def error(row: Row) -> float:
    """Return how far a row is apart: by elements, else by extremes and mean; NaN if unknown."""
    known = max_absolute(row)
    if not math.isnan(known):
        return known
    apart = row.outcome.figures
    return max((abs(apart[item]) for item in _EXTREMES if item in apart), default=math.nan)


def ranks_alike(origin: Origin, report: Report) -> list[int]:
    """Return the ranks on which it starts at the same operator, the origin's own among them."""
    first = origin.suspects[0]
    same = (
        each.suspects[0].rank
        for each in report.rank_origins
        if each.certain and each.suspects and _alike(each, origin)
    )
    return sorted({first.rank, *same})


def other_origins(report: Report) -> list[Origin]:
    """Return the origins of ranks that say something else than those of the whole."""
    said = [origin for origin in report.origins if origin.suspects]
    return [
        each
        for each in report.rank_origins
        if not any(_alike(each, origin) or _contains(origin, each) for origin in said)
    ]


def accused(report: Report) -> set[CallKey]:
    """Return the calls where it may start, in the whole or on a rank."""
    origins = (*report.origins, *report.rank_origins)
    return {call_key(each) for origin in origins for each in origin.suspects}


def excerpt(report: Report, limit: int | None, *, everything: bool = False) -> list[Row]:
    """Return the rows to look at first: suspects whole, and what does not agree, in order.

    Of more than the limit, a stretch that has the earliest suspect in its first half.
    """
    suspects = accused(report)
    kept = [row for row in report.rows if everything or call_key(row) in suspects or _matters(row)]
    if limit is None or len(kept) <= limit:
        return kept
    at = next((at for at, row in enumerate(kept) if call_key(row) in suspects), 0)
    begin = 0 if at < limit // 2 else min(at - limit // 4, len(kept) - limit)
    return kept[begin : begin + limit]


def worst_first(rows: Sequence[Row], most: int) -> list[Row]:
    """Return as many rows, in their order: those that disagree before those that agree."""
    if len(rows) <= most:
        return list(rows)
    bad = [at for at, row in enumerate(rows) if not row.outcome.verdict.agrees][:most]
    good = [at for at, row in enumerate(rows) if row.outcome.verdict.agrees]
    room = most - len(bad)
    thinned = [good[at * len(good) // room] for at in range(min(room, len(good)))]
    return [rows[at] for at in sorted((*bad, *thinned))]


def _operator(group: list[Row]) -> Operator:
    measured = [row.outcome.measures for row in group if row.outcome.measures is not None]
    worst = min(group, key=lambda row: (severity(row), -_or_zero(row)))
    return Operator(
        worst=worst,
        tensors=len(group),
        differing=sum(not row.outcome.verdict.agrees for row in group),
        error=_largest(group, worst),
        cosine=min(_numbers(each.cosine for each in measured), default=math.nan),
        close_share=min((each.close_share for each in measured), default=math.nan),
    )


def _largest(group: list[Row], worst: Row) -> float:
    # Beside NaN an error of 0 would say that nothing is wrong.
    if not worst.outcome.verdict.agrees and math.isnan(error(worst)):
        return math.nan
    return max(_numbers(error(row) for row in group), default=math.nan)


def _numbers(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _or_zero(row: Row) -> float:
    known = error(row)
    return 0.0 if math.isnan(known) else known


def _matters(row: Row) -> bool:
    # Calls without a partner have a list of their own.
    return not row.outcome.verdict.agrees and bool(row.name_a and row.name_b)


def _alike(one: Origin, other: Origin) -> bool:
    return _likeliest(one) == _likeliest(other)


def _likeliest(origin: Origin) -> tuple[object, ...]:
    calls = [(s.iteration, s.name_a, s.name_b, s.backward) for s in origin.suspects[:1]]
    return origin.kind, origin.side, *calls


def _contains(origin: Origin, each: Origin) -> bool:
    return (origin.kind, origin.side) == (each.kind, each.side) and set(
        map(call_key, each.suspects)
    ) <= set(map(call_key, origin.suspects))
