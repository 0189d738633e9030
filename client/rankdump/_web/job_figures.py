"""Figures of a job that several pages show: what became of the tensors of each rank, and how much
of the timeout of each process group is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rankdump._analysis.reader.rank_tallies import RankTally, sum_iterations
from rankdump._analysis.tree_overview import find_budget_share
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_duration, format_percentage


class RankBalance(NamedTuple):
    """What became of the tensors of a rank, or of all."""

    rank: int
    """-1 for the sum of all."""
    attempt: int
    state: str
    iterations_complete: int
    iterations_seen: int
    expected: int
    stored: int
    linked: int
    degraded: int
    dropped: int
    bytes_in: int
    bytes_stored: int


def make_balance(tally: RankTally) -> RankBalance:
    """Return the balance of a rank in one attempt."""
    return _sum_tallies(tally.rank, tally.attempt, tally.described_state, [tally])


def sum_balances(tallies: Sequence[RankTally]) -> RankBalance:
    """Return the balance of all ranks."""
    return _sum_tallies(-1, 0, "", tallies)


def _sum_tallies(rank: int, attempt: int, state: str, tallies: Sequence[RankTally]) -> RankBalance:
    sums = sum_iterations(each for tally in tallies for each in tally.iterations)
    return RankBalance(
        *(rank, attempt, state),
        sum(tally.iterations_complete for tally in tallies),
        sum(tally.iterations_seen for tally in tallies),
        *(sums.expected, sums.stored, sums.linked, sums.degraded, sums.dropped),
        *(sums.bytes_in, sums.bytes_stored),
    )


class TimeoutBudget(NamedTuple):
    """How much of the timeout of a group is used."""

    group: str
    level: HintLevel
    share: float
    """From 0 to 1."""
    percentage: str
    limit: str
    """Duration; empty when none is known."""
    reason: str
    settings: tuple[str, ...]


def make_budgets(hints: Iterable[TimeoutHint]) -> tuple[TimeoutBudget, ...]:
    """Return the budgets of hints, in their order."""
    return tuple(map(_make_budget, hints))


def _make_budget(hint: TimeoutHint) -> TimeoutBudget:
    share = find_budget_share(hint)
    limit = format_duration(hint.limit.limit_us) if hint.limit is not None else ""
    return TimeoutBudget(
        *(hint.group, hint.level, share, format_percentage(share), limit),
        *(hint.reason, hint.settings),
    )
