"""How much of the timeout of each process group is used, as pages show it in bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rankdump._analysis.tree_overview import find_budget_share
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_duration, format_percentage


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
