"""Warnings that ranks print in their logs, one line for each hint whose level is not OK, and the
texts that describe limits. Pure.

Each text is printed once on a host. So the text about a growing wait stays the same until its share
reaches the next step, even if another rank then waits longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdump._core.units import format_duration, format_percentage


def describe_limit(limit: TimeoutLimit, holders: str = "") -> str:
    """Return a text such as `the 20 s limit (HCCL_EXEC_TIMEOUT)`; `holders` follows the name."""
    return f"the {format_duration(limit.limit_us)} limit ({limit.name}{holders})"


HALF_SHARE = 0.5
_SHARE_STEPS = (
    *(tenth / 10 for tenth in range(10)),
    *(1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
    *(float(1 << power) for power in range(5, 64)),
)


def find_reached_step(share: float) -> float:
    """Return the last step that a share of a limit has reached."""
    return _SHARE_STEPS[bisect_right(_SHARE_STEPS, max(0.0, share)) - 1]


def find_next_step(share: float) -> float:
    """Return the next step above a share; it changes only when `find_reached_step` does."""
    return _SHARE_STEPS[min(bisect_right(_SHARE_STEPS, max(0.0, share)), len(_SHARE_STEPS) - 1)]


_MAX_WARNINGS = 8
"""Largest number of warnings for a job, which may have thousands of groups; the groups nearest to
their limits get one.
"""

WarningKey: TypeAlias = tuple[str, str, int, float]
"""Group, state of the wait, late rank and step of the share; there is one warning for each key.

For a wait that does not end, the key has its cause in place of the group.
"""
_NO_WARNINGS: Mapping[WarningKey, str] = MappingProxyType({})


def build_warnings(
    hints: Iterable[TimeoutHint],
    known: Mapping[WarningKey, str] = _NO_WARNINGS,
    *,
    causes: Iterable[str] = (),
) -> dict[WarningKey, str]:
    """Return a line for each cause of waits that do not end, and for each other hint whose limit is
    half used or will be, the nearest first. `causes` contains causes that are known besides the
    hints.

    A key that is in `known` keeps its text.
    """
    nearest = sorted(
        hints, key=lambda hint: (-find_reached_step(hint.share), hint.job_id, hint.group)
    )
    warnings: dict[WarningKey, str] = {}
    for cause in dict.fromkeys((*causes, *(hint.cause for hint in nearest if hint.cause))):
        if len(warnings) < _MAX_WARNINGS:
            warnings[cause, "stuck", 0, 0.0] = f"{cause}; a longer timeout does not help"
    for hint in nearest:
        if (
            not hint.cause
            and hint.level is not HintLevel.OK
            and hint.limit is not None
            and len(warnings) < _MAX_WARNINGS
        ):
            key = _build_key(hint, hint.limit)
            text = known.get(key) or warnings.get(key) or _format_warning(hint, hint.limit)
            warnings[key] = text
    return warnings


def _build_key(hint: TimeoutHint, limit: TimeoutLimit) -> WarningKey:
    if hint.share < HALF_SHARE:
        return (
            hint.group,
            "rises",
            hint.last_rank,
            find_reached_step(hint.projected_us / limit.limit_us),
        )
    state = "waits" if hint.waiting else "waited"
    return hint.group, state, hint.last_rank, find_reached_step(hint.share)


def _format_warning(hint: TimeoutHint, limit: TimeoutLimit) -> str:
    budget = describe_limit(limit)
    settings = f"; set {' and '.join(hint.settings)}" if hint.settings else ""
    return (
        f"group {hint.group!r}: {_format_wait(hint, limit, budget)}; "
        f"{_format_dump_part(hint)}{settings}"
    )


def _format_wait(hint: TimeoutHint, limit: TimeoutLimit, budget: str) -> str:
    first, last = hint.first_rank, hint.last_rank
    if hint.share < HALF_SHARE:
        share = format_percentage(find_reached_step(hint.projected_us / limit.limit_us))
        by = f"by iteration {hint.projected_iteration}"
        return f"rank {last} is late, and the wait of the others rises to {share} of {budget} {by}"
    step = find_reached_step(hint.share)
    waited = format_duration(step * limit.limit_us)
    used = f"at least {waited}, {format_percentage(step)} of {budget}"
    if hint.waiting:
        return f"rank {last} is late: rank {first} has waited {used}"
    return f"rank {last} was late: rank {first} waited {used}"


def _format_dump_part(hint: TimeoutHint) -> str:
    if not hint.dump_us:
        return "dumping causes none of it"
    return f"dumping causes {'most' if hint.dump_us > hint.spread_us / 2 else 'a part'} of it"
