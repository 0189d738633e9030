"""Waits in calls past half of their timeout: they freeze the job while it hangs. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence

from rankdump._core.black_box import FaultKind
from rankdump._core.freeze_record import FrozenCause, JobFreeze
from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.status import RankWait
from rankdump._core.timeouts import TimeoutHint
from rankdump._core.units import format_duration, format_percentage
from rankdumpd.coordinator.fleet_views import IterationView
from rankdumpd.coordinator.hints.open_waits import find_rank_waits
from rankdumpd.coordinator.hints.rank_warnings import HALF_SHARE, describe_limit


def find_wait_alarms(
    view: IterationView, hints: Iterable[TimeoutHint], now_us: int
) -> Iterator[JobFreeze]:
    """Yield a freeze for each open wait of an iteration that is certain to be so long.

    A wait grows and its text with it, but it is one freeze: that of its iteration.
    """
    long = [hint for hint in hints if _is_long(hint)]
    waits = find_rank_waits(view, now_us) if long else ()
    for hint in long:
        text = describe_long_wait(hint, waits)
        cause = FrozenCause(FaultKind.WAIT, view.iteration, text, now_us)
        yield JobFreeze(view.job_id, view.attempt, view.iteration, cause)


def _is_long(hint: TimeoutHint) -> bool:
    limit_us = hint.limit.limit_us if hint.limit else 0
    return hint.waiting and limit_us > 0 and hint.spread_us >= HALF_SHARE * limit_us


def describe_long_wait(hint: TimeoutHint, waits: Sequence[RankWait]) -> str:
    """Return the call, who has arrived in it and who has not, since when, and its limit."""
    call = hint.group, hint.sequence, hint.kind
    own = [each for each in waits if (each.group, each.sequence, each.kind) == call]
    arrived = sorted({each.rank for each in own} | {hint.first_rank})
    absent = {rank for each in own for rank in each.absent} | {hint.last_rank}
    missing = sorted(absent.difference(arrived))
    text = (
        f"{hint.kind} {hint.name!r}, number {hint.sequence} of group {hint.group!r}, has waited "
        f"{format_duration(hint.spread_us)}{_format_since(own)}; "
        f"arrived: {name_first_ranks(arrived)}; missing: {name_first_ranks(missing)}"
    )
    if hint.limit is None:
        return text
    share = format_percentage(hint.spread_us / hint.limit.limit_us)
    return f"{text}; that is {share} of {describe_limit(hint.limit)}"


def _format_since(waits: Sequence[RankWait]) -> str:
    start_us = min((each.start_us for each in waits), default=0)
    if not start_us:
        return ""
    start = datetime.datetime.fromtimestamp(start_us / 1e6, datetime.timezone.utc)
    return f" since {start:%Y-%m-%d %H:%M:%S} UTC"
