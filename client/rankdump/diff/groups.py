"""Pairs in groups that are worth a message, and what comparing a group gives.

A process holds one pair of a group at a time, so the size of a group costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from rankdump.diff.outcomes import bytes_of, outcome_of
from rankdump.diff.values import Outcome, Settings, TensorPair, Verdict

Group: TypeAlias = "list[tuple[int, TensorPair]]"
"""Pairs, each with its place among all."""
Answers: TypeAlias = "list[tuple[int, Outcome]]"
"""Their outcomes, with the same places."""

_BYTES = 32 << 20
_PAIRS = 256
"""A group ends where it has either."""
_DIED = "the process that compared it died, perhaps for want of memory"


def groups_of(placed: Iterable[tuple[int, TensorPair]]) -> Iterator[Group]:
    """Yield neighbours in groups; a large pair is a group of its own."""
    group: Group = []
    held = 0
    for place, pair in placed:
        group.append((place, pair))
        held += pair_bytes(pair)
        if held >= _BYTES or len(group) >= _PAIRS:
            yield group
            group, held = [], 0
    if group:
        yield group


def pair_bytes(pair: TensorPair) -> int:
    """Return the bytes that a pair has to be read."""
    return bytes_of(pair.a) + bytes_of(pair.b)


def compare_group(group: Group, settings: Settings) -> Answers:
    """Return the outcome of each pair of a group."""
    return [(place, outcome_of(pair, settings)) for place, pair in group]


def given_up(group: Group) -> Answers:
    """Return the outcomes of pairs that ended the process they were compared in."""
    return [(place, Outcome(Verdict.UNREADABLE, (_DIED,))) for place, _ in group]
