"""Makes a hint of a wait: its limit, its share, what is to be expected, what to set. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankdump.contract.events import ProcessGroup
from rankdump.contract.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdumpd.coordinator.hints.advice import Advice, advice
from rankdumpd.coordinator.hints.limits import GroupLimits, group_limits
from rankdumpd.coordinator.hints.projection import ENDLESS, Rise, last_selected, rise_of
from rankdumpd.coordinator.hints.state import GroupHistory, HintState, Widest
from rankdumpd.coordinator.hints.steps import HALF
from rankdumpd.coordinator.hints.wording import duration, named, percent
from rankdumpd.coordinator.values import JobFacts


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait to be judged, and what to say of it before its share."""

    group: ProcessGroup
    widest: Widest
    told: str
    waiting: bool = False
    rise: Rise | None = None


def hints_of(state: HintState, facts: JobFacts) -> tuple[TimeoutHint, ...]:
    """Return a hint for every group of several members that was seen, the nearest first."""
    hints: list[TimeoutHint] = []
    for group, history in state.groups.items():
        if len(group.ranks) == 1:
            continue
        limits = group_limits(group, members_of(group, history), facts)
        wait = _nearest(group, history, limits)
        if wait is not None:
            hints.append(assessed(wait, limits, facts))
    return tuple(sorted(hints, key=lambda hint: (-hint.share, -hint.spread_us)))


def members_of(group: ProcessGroup, history: GroupHistory) -> tuple[int, ...]:
    """Return the ranks of a group; of one that nobody declared those that were seen in it."""
    if group.ranks:
        return group.ranks
    seen = [each for each in (history.first, history.widest) if each]
    return tuple(sorted({rank for each in seen for rank in (each.first_rank, each.last_rank)}))


def assessed(wait: Wait, limits: GroupLimits, facts: JobFacts) -> TimeoutHint:
    """Return the hint of one wait."""
    widest, limit = wait.widest, limits.budget(wait.widest.sequence)
    last = last_selected(each.selected for each in facts.sessions.values() if not each.excluded)
    expected = widest.spread_us
    if wait.rise is not None and last != ENDLESS:
        expected = max(expected, wait.rise.at(last))
    level = _level(limit, widest.spread_us, expected)
    given = Advice()
    if limit is not None and level is not HintLevel.OK:
        given = advice(limits, widest.sequence, limit_us=limit.limit_us, expected_us=expected)
    return TimeoutHint(
        job_id=facts.job_id,
        group=wait.group.name,
        backend=limits.backend,
        level=level,
        waiting=wait.waiting,
        kind=widest.kind,
        name=widest.name,
        iteration=widest.iteration,
        sequence=widest.sequence,
        first_rank=widest.first_rank,
        last_rank=widest.last_rank,
        spread_us=widest.spread_us,
        dump_us=widest.dump_us,
        limit=limit,
        limits=limits.listed,
        projected_us=expected,
        projected_iteration=last,
        settings=given.settings,
        reason="; ".join(_clauses(wait, limit, level, (expected, last), given)),
    )


def _nearest(group: ProcessGroup, history: GroupHistory, limits: GroupLimits) -> Wait | None:
    """Return the wait that used most of its budget: the widest, or the one of the first call."""
    known = [each for each in (history.widest, history.first) if each is not None]
    if not known:
        return None
    widest = max(known, key=lambda each: (_share(each, limits), each.spread_us))
    rise = rise_of(history.history) if widest is history.widest else None
    return Wait(group, widest, _told(group, widest), rise=rise)


def _share(widest: Widest, limits: GroupLimits) -> float:
    limit = limits.budget(widest.sequence)
    return widest.spread_us / limit.limit_us if limit else 0.0


def _level(limit: TimeoutLimit | None, spread_us: int, expected_us: int) -> HintLevel:
    if limit is None:
        return HintLevel.OK
    if spread_us >= limit.limit_us:
        return HintLevel.EXCEEDED
    near = max(spread_us, expected_us) >= HALF * limit.limit_us
    return HintLevel.WARNING if near else HintLevel.OK


def _told(group: ProcessGroup, widest: Widest) -> str:
    call = call_words(group.name, widest)
    first, last, spread = widest.first_rank, widest.last_rank, duration(widest.spread_us)
    if not widest.arrived:
        return f"rank {first} waited {spread} for rank {last}, not known to have come, in {call}"
    if not widest.spread_us:
        return f"the members came to {call} at once"
    return f"rank {last} came {spread} after rank {first} to {call}"


def call_words(group: str, widest: Widest) -> str:
    """Return which call that is."""
    where = f"number {widest.sequence} of group {group!r} in iteration {widest.iteration}"
    return f"{widest.kind} {widest.name!r}, {where}"


def _clauses(
    wait: Wait,
    limit: TimeoutLimit | None,
    level: HintLevel,
    expected: tuple[int, int],
    given: Advice,
) -> Iterator[str]:
    yield wait.told
    spread_us, dump_us = wait.widest.spread_us, wait.widest.dump_us
    if limit is None:
        yield "no limit is known that would strike"
    else:
        share = percent(spread_us / limit.limit_us)
        holders = "" if set(limit.ranks) >= set(wait.group.ranks) else f" of {named(limit.ranks)}"
        yield f"that is {share} of the {duration(limit.limit_us)} of {limit.name}{holders}"
    if spread_us:
        yield (
            f"dumping caused {duration(dump_us)} of it" if dump_us else "dumping caused none of it"
        )
    if wait.rise is not None:
        yield _risen(wait.rise, limit, *expected)
    if given.settings:
        yield "the settings give twice what is to be expected"
    if given.remark:
        yield given.remark
    if level is not HintLevel.OK and dump_us > spread_us / 2:
        yield "dumping less shortens it: `saved_data` `statistic` or fewer `kernels`"


def _risen(rise: Rise, limit: TimeoutLimit | None, expected_us: int, last: int) -> str:
    if last != ENDLESS:
        return f"it rises, to {duration(expected_us)} by iteration {last}"
    if limit is None:
        return "it rises"
    half, whole = rise.reaches(HALF * limit.limit_us), rise.reaches(limit.limit_us)
    return f"it rises, to half of the limit by iteration {half} and all of it by iteration {whole}"
