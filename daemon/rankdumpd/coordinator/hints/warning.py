"""What ranks should say in their logs: a line for each hint that is no longer fine. Pure.

The ranks of a host say every text once. So the text of a wait that grows is the same until the next
step of its share, whoever is known by then to have come before the late one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from rankdump.contract.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdumpd.coordinator.hints.steps import HALF, step_of
from rankdumpd.coordinator.hints.wording import duration, percent

_MAX_LINES = 8
"""Of a job with thousands of groups only the nearest are said."""


Thing: TypeAlias = tuple[str, str, int, float]
"""Group, what becomes of it, late rank and step: what is said once."""
_NOTHING: Mapping[Thing, str] = MappingProxyType({})


def warnings(
    hints: Iterable[TimeoutHint], said: Mapping[Thing, str] = _NOTHING
) -> dict[Thing, str]:
    """Return a line for each hint of a budget that is half used, or will be; nearest first.

    What was said of a thing before stays as it was.
    """
    nearest = sorted(hints, key=lambda hint: (-step_of(hint.share), hint.job_id, hint.group))
    found: dict[Thing, str] = {}
    for hint in nearest:
        if hint.level is not HintLevel.OK and hint.limit is not None and len(found) < _MAX_LINES:
            thing = _thing(hint, hint.limit)
            found[thing] = said.get(thing) or found.get(thing) or _line(hint, hint.limit)
    return found


def _thing(hint: TimeoutHint, limit: TimeoutLimit) -> Thing:
    if hint.share < HALF:
        return hint.group, "rises", hint.last_rank, step_of(hint.projected_us / limit.limit_us)
    what = "waits" if hint.waiting else "waited"
    return hint.group, what, hint.last_rank, step_of(hint.share)


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
