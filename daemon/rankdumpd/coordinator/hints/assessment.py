"""Assessment of a wait: its limit, the share of the limit that it used, the spread expected in the
last iteration, and the exact settings that allow for it. Pure.

Every limit that would end the job is raised to twice the expected wait and rounded as the runtime
rounds it. The limits keep the order that HCCL requires: those of the event and of the watchdog are
above the execution limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from rankdump._core.events import EventColumn, ProcessGroup
from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.selection import parse_iterations
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdump._core.units import format_duration, format_percentage
from rankdumpd.coordinator.fleet_views import JobFacts
from rankdumpd.coordinator.hints.rank_warnings import (
    HALF_SHARE,
    describe_limit,
    find_next_step,
)
from rankdumpd.coordinator.hints.spread_history import GroupSpreadHistory, HintState, WidestSpread
from rankdumpd.coordinator.hints.timeout_limits import (
    HCCL_CONNECT,
    HCCL_EVENT,
    HCCL_EVENT_MARGIN_S,
    HCCL_EXEC,
    HCCL_SESSION_EXEC,
    HCCL_STEP_S,
    MAX_HCCL_AIV_S,
    MAX_HCCL_CONNECT_S,
    MAX_HCCL_EXEC_S,
    SECOND_US,
    GroupScope,
    ProcessGroupLimits,
    collect_group_limits,
)

NO_LAST_ITERATION = -1
_CLAUSE_SEPARATOR = "; "
_SETTINGS_CLAUSE = "the suggested settings allow twice the expected wait"
_MIN_ITERATIONS = 5
"""Smallest number of iterations that a trend is fitted to."""
_MIN_SLOPE_ERRORS = 4.0
"""A slope counts as a rise if it exceeds its own standard error by this factor."""
_MIN_RISE_SHARE = 0.1
"""A slope counts as a rise if it raised the spread by at least this share of the mean spread."""
_MAX_ITERATION = (1 << 63) - 1
"""Largest signed 64-bit number; no job reaches an iteration beyond it."""


@dataclass(frozen=True, slots=True)
class SpreadTrend:
    """A straight line through the spreads of a process group."""

    slope_us: float
    """Rise in microseconds per iteration."""
    start_us: float
    """Spread in microseconds at iteration 0."""

    def spread_at(self, iteration: int) -> int:
        """Return the spread in microseconds that is expected in an iteration."""
        return min(max(0, round(self.start_us + self.slope_us * iteration)), _MAX_ITERATION)

    def find_iteration_reaching(self, spread_us: float) -> int:
        """Return the first iteration with at least this spread."""
        return max(0, int(np.ceil((spread_us - self.start_us) / self.slope_us)))


def fit_spread_trend(history: Sequence[tuple[int, int]]) -> SpreadTrend | None:
    """Return the line through the spreads of iterations; None unless the spreads clearly rise."""
    if len(history) < _MIN_ITERATIONS:
        return None
    iterations: EventColumn = np.array([iteration for iteration, _ in history], dtype="f8")
    spreads: EventColumn = np.array([spread for _, spread in history], dtype="f8")
    centred = iterations - iterations.mean()
    square = float(centred @ centred)
    if not square:
        return None
    slope = float(centred @ spreads) / square
    start = float(spreads.mean()) - slope * float(iterations.mean())
    left = spreads - (start + slope * iterations)
    error = float(np.sqrt((left @ left) / (len(history) - 2) / square))
    grown = slope * float(np.ptp(iterations))
    if (
        slope <= _MIN_SLOPE_ERRORS * error
        or grown < _MIN_RISE_SHARE * float(spreads.mean())
        or slope <= 0
    ):
        return None
    return SpreadTrend(slope, start)


def find_last_selected_iteration(selections: Iterable[str]) -> int:
    """Return the last iteration that any plan selects; NO_LAST_ITERATION if the plans
    have no end.
    """
    last = NO_LAST_ITERATION
    for text in set(selections):
        iterations = parse_iterations(text)
        if iterations is None or iterations.spans is None:
            return NO_LAST_ITERATION
        last = max([last, *(high for _, high in iterations.spans)])
    return last if last <= _MAX_ITERATION else NO_LAST_ITERATION


_SAFETY_FACTOR = 2
_SETTING_FORMS = {
    HCCL_EXEC: "export {name}={seconds}",
    HCCL_SESSION_EXEC: "NPURunConfig(..., {name}={seconds})",
    HCCL_EVENT: "export {name}={seconds}",
    HCCL_CONNECT: "export {name}={seconds}",
    GroupScope.WORLD.value: "init_process_group(..., timeout=timedelta(seconds={seconds}))",
    GroupScope.PART.value: "new_group(..., timeout=timedelta(seconds={seconds}))",
}
"""Text that sets each limit, in the order in which the settings are listed; other limits come after
these.
"""
_OTHER_FORM = "{name}={seconds}"
_MILLISECOND_FORM = "NPURunConfig(..., {name}={seconds}000)"
_MILLISECOND_SETTINGS = ("stream_sync_timeout", "event_sync_timeout")
"""Limits that TensorFlow expects in milliseconds."""


@dataclass(frozen=True, slots=True)
class SettingsAdvice:
    """Settings to change, and a remark where they do not suffice."""

    settings: tuple[str, ...] = ()
    remark: str = ""


def advise_settings(
    limits: ProcessGroupLimits, sequence: int, *, limit_us: int, expected_us: int
) -> SettingsAdvice:
    """Return the settings that allow for a wait of `expected_us` where the limit `limit_us` is
    near.
    """
    need_us = find_next_step(expected_us / limit_us) * limit_us
    target_s = ceil(_SAFETY_FACTOR * need_us / SECOND_US)
    raised = _RaisedLimits(limits, sequence, target_s)
    return SettingsAdvice(tuple(raised.list_settings()), raised.remark)


class _RaisedLimits:
    """The limits of one group, raised to a target."""

    def __init__(self, limits: ProcessGroupLimits, sequence: int, target_s: int) -> None:
        self._target_s = target_s
        self._lowest_us: dict[str, int] = {}
        for each in limits.list_covering(sequence):
            if not each.derived:
                name, limit_us = each.limit.name, each.limit.limit_us
                self._lowest_us[name] = min(limit_us, self._lowest_us.get(name, limit_us))
        self._aiv = limits.aiv
        self._exec_s = self._raise_execution_limit()
        self.remark = self._build_remark()

    def list_settings(self) -> Iterator[str]:
        """Yield a setting for each limit that is too low."""
        if self._aiv and self._exec_s > MAX_HCCL_AIV_S:
            # No device uses AIV mode by default, so without this variable AIV mode is off.
            yield "unset HCCL_OP_EXPANSION_MODE"
        for name in dict.fromkeys((*_SETTING_FORMS, *self._lowest_us)):
            least_s, seconds = self._raise_limit(name)
            if self._is_below(name, least_s):
                other = _MILLISECOND_FORM if name in _MILLISECOND_SETTINGS else _OTHER_FORM
                yield _SETTING_FORMS.get(name, other).format(name=name, seconds=seconds)

    def _raise_limit(self, name: str) -> tuple[int, int]:
        """Return the lowest value in seconds that a limit must have, and the value to raise it to
        if it is lower.
        """
        if name in (HCCL_EXEC, HCCL_SESSION_EXEC):
            return self._exec_s, self._exec_s
        if name == HCCL_CONNECT:
            connect_s = min(self._target_s, MAX_HCCL_CONNECT_S)
            return connect_s, connect_s
        if not self._exec_s:
            return self._target_s, self._target_s
        above_s = self._exec_s + HCCL_EVENT_MARGIN_S
        return max(self._target_s, self._exec_s + 1), max(self._target_s, above_s)

    def _is_below(self, name: str, seconds: int) -> bool:
        return name in self._lowest_us and self._lowest_us[name] < seconds * SECOND_US

    def _raise_execution_limit(self) -> int:
        """Return the execution limit in seconds, raised to the target; 0 when there is none."""
        for name in (HCCL_EXEC, HCCL_SESSION_EXEC):
            if self._is_below(name, self._target_s):
                if self._aiv and self._target_s <= MAX_HCCL_AIV_S:
                    return self._target_s
                return min(ceil(self._target_s / HCCL_STEP_S) * HCCL_STEP_S, MAX_HCCL_EXEC_S)
            if name in self._lowest_us:
                return self._lowest_us[name] // SECOND_US
        return 0

    def _build_remark(self) -> str:
        low = [n for n in self._lowest_us if self._is_below(n, self._target_s)]
        is_exec_low = HCCL_EXEC in low or HCCL_SESSION_EXEC in low
        if is_exec_low and self._target_s > MAX_HCCL_EXEC_S:
            return f"Ascend 910 and 310P accept at most {MAX_HCCL_EXEC_S} s"
        if HCCL_CONNECT in low and self._target_s > MAX_HCCL_CONNECT_S:
            return f"{HCCL_CONNECT} accepts at most {MAX_HCCL_CONNECT_S} s"
        return ""


@dataclass(frozen=True, slots=True)
class GroupWait:
    """A wait that is to be assessed, with its description."""

    group: ProcessGroup
    widest: WidestSpread
    description: str
    waiting: bool = False
    rise: SpreadTrend | None = None


def build_hints(state: HintState, facts: JobFacts) -> tuple[TimeoutHint, ...]:
    """Return a hint for every group with several members, the one nearest to its limit first."""
    hints: list[TimeoutHint] = []
    for group, history in state.groups.items():
        if len(group.ranks) == 1:
            continue
        limits = collect_group_limits(group, list_group_members(group, history), facts)
        wait = _find_nearest_wait(group, history, limits)
        if wait is not None:
            hints.append(assess_wait(wait, limits, facts))
    return tuple(sorted(hints, key=lambda hint: (-hint.share, -hint.spread_us)))


def list_group_members(group: ProcessGroup, history: GroupSpreadHistory) -> tuple[int, ...]:
    """Return the ranks of a group; if no rank has declared them, the ranks of its known spreads."""
    if group.ranks:
        return group.ranks
    seen = [each for each in (history.first, history.widest) if each]
    return tuple(sorted({rank for each in seen for rank in (each.first_rank, each.last_rank)}))


def assess_wait(wait: GroupWait, limits: ProcessGroupLimits, facts: JobFacts) -> TimeoutHint:
    """Return the hint of one wait."""
    widest, limit = wait.widest, limits.find_tightest(wait.widest.sequence)
    last = find_last_selected_iteration(
        each.selected for each in facts.sessions.values() if not each.excluded
    )
    expected = widest.spread_us
    if wait.rise is not None and last != NO_LAST_ITERATION:
        expected = max(expected, wait.rise.spread_at(last))
    level = _choose_level(limit, widest.spread_us, expected)
    advice = SettingsAdvice()
    if limit is not None and level is not HintLevel.OK:
        advice = advise_settings(
            limits, widest.sequence, limit_us=limit.limit_us, expected_us=expected
        )
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
        limits=limits.sorted_limits,
        projected_us=expected,
        projected_iteration=last,
        settings=advice.settings,
        reason=_CLAUSE_SEPARATOR.join(_list_clauses(wait, limit, level, (expected, last), advice)),
    )


def withdraw_settings(hint: TimeoutHint) -> TimeoutHint:
    """Return a hint without its suggested settings and without the clause about them in
    its reason.
    """
    clauses = hint.reason.split(_CLAUSE_SEPARATOR)
    kept = (clause for clause in clauses if clause != _SETTINGS_CLAUSE)
    return replace(hint, settings=(), reason=_CLAUSE_SEPARATOR.join(kept))


def _find_nearest_wait(
    group: ProcessGroup, history: GroupSpreadHistory, limits: ProcessGroupLimits
) -> GroupWait | None:
    """Return the wait with the largest share of its limit, among the widest spread and the first
    one.
    """
    known = [each for each in (history.widest, history.first) if each is not None]
    if not known:
        return None
    widest = max(known, key=lambda each: (_compute_share(each, limits), each.spread_us))
    rise = fit_spread_trend(history.history) if widest is history.widest else None
    return GroupWait(group, widest, _describe_wait(group, widest), rise=rise)


def _compute_share(widest: WidestSpread, limits: ProcessGroupLimits) -> float:
    limit = limits.find_tightest(widest.sequence)
    return widest.spread_us / limit.limit_us if limit else 0.0


def _choose_level(limit: TimeoutLimit | None, spread_us: int, expected_us: int) -> HintLevel:
    if limit is None:
        return HintLevel.OK
    if spread_us >= limit.limit_us:
        return HintLevel.EXCEEDED
    near = max(spread_us, expected_us) >= HALF_SHARE * limit.limit_us
    return HintLevel.WARNING if near else HintLevel.OK


def _describe_wait(group: ProcessGroup, widest: WidestSpread) -> str:
    call = describe_hint_call(group.name, widest)
    first, last, spread = widest.first_rank, widest.last_rank, format_duration(widest.spread_us)
    if not widest.arrived:
        return (
            f"rank {first} waited {spread} for rank {last}, which may not have arrived, in {call}"
        )
    if not widest.spread_us:
        return f"all members arrived at the same time at {call}"
    return f"rank {last} arrived {spread} after rank {first} at {call}"


def describe_hint_call(group: str, widest: WidestSpread) -> str:
    """Return the kind, name, sequence number, group and iteration of the call that had a spread."""
    where = f"number {widest.sequence} of group {group!r} in iteration {widest.iteration}"
    return f"{widest.kind} {widest.name!r}, {where}"


def _list_clauses(
    wait: GroupWait,
    limit: TimeoutLimit | None,
    level: HintLevel,
    expected: tuple[int, int],
    advice: SettingsAdvice,
) -> Iterator[str]:
    yield wait.description
    spread_us, dump_us = wait.widest.spread_us, wait.widest.dump_us
    if limit is None:
        yield "no limit that applies to this wait is known"
    else:
        share = format_percentage(spread_us / limit.limit_us)
        covers_all = set(limit.ranks) >= set(wait.group.ranks)
        holders = "" if covers_all else f" of {name_first_ranks(limit.ranks)}"
        yield f"that is {share} of {describe_limit(limit, holders)}"
    if spread_us:
        yield (
            f"dumping caused {format_duration(dump_us)} of it"
            if dump_us
            else "dumping caused none of it"
        )
    if wait.rise is not None:
        yield _describe_trend(wait.rise, limit, *expected)
    if advice.settings:
        yield _SETTINGS_CLAUSE
    if advice.remark:
        yield advice.remark
    if level is not HintLevel.OK and dump_us > spread_us / 2:
        yield (
            "to shorten it, dump less: set `saved_data` to `statistic`, select fewer `kernels`, or "
            "set `rankdump.max_step_overhead`, which keeps less before half of a timeout is used"
        )


def _describe_trend(
    rise: SpreadTrend, limit: TimeoutLimit | None, expected_us: int, last: int
) -> str:
    if last != NO_LAST_ITERATION:
        return f"the wait rises to {format_duration(expected_us)} by iteration {last}"
    if limit is None:
        return "the wait rises"
    half, whole = (
        rise.find_iteration_reaching(HALF_SHARE * limit.limit_us),
        rise.find_iteration_reaching(limit.limit_us),
    )
    return (
        f"the wait rises to half of the limit by iteration {half} and to all of it by iteration "
        f"{whole}"
    )
