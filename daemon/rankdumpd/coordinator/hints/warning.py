"""What ranks should say in their logs: a line for each hint that is no longer fine. Pure.

A client says every text once. So the text of a wait that grows is the same until the next step
of its share, and has no figure in it that changes before.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankdump.contract.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdumpd.coordinator.hints.steps import HALF, step_of
from rankdumpd.coordinator.hints.wording import duration, percent

_MAX_LINES = 8
"""Of a job with thousands of groups only the nearest are said."""


def warnings(hints: Iterable[TimeoutHint]) -> tuple[str, ...]:
    """Return one line for each hint of a budget that is half used, or will be; nearest first."""
    nearest = sorted(hints, key=lambda hint: (-step_of(hint.share), hint.job_id, hint.group))
    lines = (
        _line(hint, hint.limit)
        for hint in nearest
        if hint.level is not HintLevel.OK and hint.limit is not None
    )
    return tuple(dict.fromkeys(lines))[:_MAX_LINES]


def _line(hint: TimeoutHint, limit: TimeoutLimit) -> str:
    budget = f"the {duration(limit.limit_us)} of {limit.name}"
    settings = f"; set {' and '.join(hint.settings)}" if hint.settings else ""
    return f"group {hint.group!r}: {_wait(hint, limit, budget)}; {_part(hint)}{settings}"


def _wait(hint: TimeoutHint, limit: TimeoutLimit, budget: str) -> str:
    first, last = hint.first_rank, hint.last_rank
    if hint.share < HALF:
        share = percent(step_of(hint.projected_us / limit.limit_us))
        by = f"by iteration {hint.projected_iteration}"
        return f"rank {last} is late, and the wait of the others rises to {share} of {budget} {by}"
    step = step_of(hint.share)
    used = f"{duration(step * limit.limit_us)} or more, {percent(step)} of {budget}"
    if hint.waiting:
        return f"rank {last} is late: rank {first} has waited {used}"
    return f"rank {last} was late: rank {first} waited {used}"


def _part(hint: TimeoutHint) -> str:
    if not hint.dump_us:
        return "dumping causes none of it"
    return f"dumping causes {'most' if hint.dump_us > hint.spread_us / 2 else 'a part'} of it"
