"""Timeout limits of the members of a process group, each with its source: torch, NCCL, and HCCL as
its runtime rounds limits. Pure.

Sources: environment variables of CANN 8 (HCCL), of torch_npu and of torch's ProcessGroupNCCL. The
class of an Ascend device is not known here. Where classes differ, the smaller value is used, and
the source text of the limit says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rankdump._core.events import ProcessGroup
from rankdump._core.status import SessionStatus
from rankdump._core.timeouts import GroupTimeout, RankTimeouts, TimeoutLimit
from rankdumpd.coordinator.fleet_views import JobFacts

SECOND_US = 1_000_000
UNLIMITED_TIMEOUT_S = 2147483647
"""The largest limit in seconds that any of the settings accepts."""
_MAX_SHOWN_CHARACTERS = 40
_TRUE_TEXTS = ("1", "y", "yes", "t", "true")
_FALSE_TEXTS = ("0", "n", "no", "f", "false")


class LimitCoverage(Enum):
    """Which waits a limit applies to."""

    WAITS = "waits"
    FIRST = "first"
    """The limit applies only to the wait in the first collective of a group, in which members
    connect.
    """
    NOTHING = "nothing"
    """The limit applies to no wait for a rank: it is in force for something else."""


@dataclass(frozen=True, slots=True)
class WaitLimit:
    """A limit, and the waits that it applies to."""

    limit: TimeoutLimit
    coverage: LimitCoverage = LimitCoverage.WAITS
    derived: bool = False
    """Whether the runtime computes the limit from another one."""


@dataclass(frozen=True, slots=True)
class TimeoutSetting:
    """A number of seconds with its source."""

    seconds: float
    source: str


def read_timeout_setting(
    variables: Mapping[str, str],
    name: str,
    default: float,
    *,
    owner: str,
    legal: tuple[float, float],
    whole: bool = True,
) -> TimeoutSetting:
    """Return the value of a variable; if it is invalid, the default with the reason."""
    usual = f"default of {owner}"
    text = variables.get(name, "").strip()
    if not text:
        return TimeoutSetting(default, usual)
    seconds = _parse_number(text, whole)
    if seconds is None:
        return TimeoutSetting(
            default, f"{usual}: {text[:_MAX_SHOWN_CHARACTERS]!r} in the environment is not a number"
        )
    low, high = legal
    if not low <= seconds <= high:
        shown = f"{text[:_MAX_SHOWN_CHARACTERS]} in the environment"
        return TimeoutSetting(default, f"{usual}: {shown} is not between {low:g} and {high:.0f}")
    return TimeoutSetting(seconds, "environment")


def read_declared_limit(limits: Mapping[str, float], name: str) -> float | None:
    """Return the seconds that a script has declared; None for a negative number or NaN."""
    seconds = limits.get(name, math.nan)
    return min(seconds, UNLIMITED_TIMEOUT_S) if seconds >= 0 else None


def read_count_variable(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number in a variable, or the default."""
    number = _parse_number(variables.get(name, "").strip(), whole=True)
    return default if number is None else int(number)


def is_variable_on(variables: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return whether a variable has one of the texts that torch reads as true."""
    text = variables.get(name, "").strip().lower()
    if text in _TRUE_TEXTS:
        return True
    return False if text in _FALSE_TEXTS else default


def _parse_number(text: str, whole: bool) -> float | None:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


HCCL_EXEC, HCCL_EVENT, HCCL_CONNECT = (
    "HCCL_EXEC_TIMEOUT",
    "HCCL_EVENT_TIMEOUT",
    "HCCL_CONNECT_TIMEOUT",
)
HCCL_SESSION_EXEC = "hccl_timeout"
"""Option of a TensorFlow session, which overrides the environment variable."""
HCCL_STEP_S = 68
"""On Ascend 910 and 310P the runtime rounds limits down to a multiple of this many seconds."""
MAX_HCCL_EXEC_S = 17340
"""Largest limit in seconds that Ascend 910 and 310P accept."""
MAX_HCCL_AIV_S = 1091
"""Largest limit in seconds that works in AIV mode."""
MAX_HCCL_CONNECT_S = 7200
HCCL_EVENT_MARGIN_S = 30
"""Seconds by which torch_npu sets the event limit above the execution limit."""

_DEFAULT_EXEC_S, _DEFAULT_EVENT_S, _DEFAULT_CONNECT_S = 1836, 1868, 120


@dataclass(frozen=True, slots=True)
class HcclExecLimit:
    """Longest time in seconds that HCCL waits for peers during execution."""

    name: str
    read_s: float
    """The limit as it was set."""
    limit_s: float
    """The limit in force; 0 when it never applies."""
    source: str
    aiv: bool


def read_exec_limit(timeouts: RankTimeouts) -> HcclExecLimit:
    """Return the execution limit; an option of the TensorFlow session overrides the environment."""
    aiv = timeouts.variables.get("HCCL_OP_EXPANSION_MODE", "").strip().upper() == "AIV"
    name, read = (
        HCCL_EXEC,
        _read_cann_setting(
            timeouts, HCCL_EXEC, MAX_HCCL_AIV_S if aiv else _DEFAULT_EXEC_S, whole=not aiv
        ),
    )
    session_s = read_declared_limit(timeouts.limits, HCCL_SESSION_EXEC)
    if session_s is not None:
        name, read = HCCL_SESSION_EXEC, TimeoutSetting(session_s, "session")
    source = read.source
    if aiv:
        limit_s = read.seconds if 0 < read.seconds <= MAX_HCCL_AIV_S else MAX_HCCL_AIV_S
        source += f"; at most {MAX_HCCL_AIV_S} s in AIV mode"
    else:
        limit_s = _round_exec_limit(read.seconds)
        if limit_s != read.seconds:
            source += f": {read.seconds:g} s; Ascend 910 and 310P round it, other devices do not"
    return HcclExecLimit(name, read.seconds, limit_s, source, aiv)


def list_hccl_limits(timeouts: RankTimeouts, *, torch: bool) -> list[WaitLimit]:
    """Return the limits of HCCL itself for one rank."""
    execution = read_exec_limit(timeouts)
    limits = [WaitLimit(_build_limit(execution.name, execution.limit_s, execution.source))]
    if torch and not timeouts.variables.get(HCCL_EVENT, "").strip():
        event_s = execution.read_s + HCCL_EVENT_MARGIN_S if execution.read_s else 0
        source = f"default of torch_npu: {HCCL_EXEC} + {HCCL_EVENT_MARGIN_S} s"
        limits.append(WaitLimit(_build_limit(HCCL_EVENT, event_s, source), derived=True))
    else:
        event = _read_cann_setting(timeouts, HCCL_EVENT, _DEFAULT_EVENT_S)
        limits.append(WaitLimit(_build_limit(HCCL_EVENT, event.seconds, event.source)))
    legal = (_DEFAULT_CONNECT_S, MAX_HCCL_CONNECT_S)
    connect = _read_cann_setting(timeouts, HCCL_CONNECT, _DEFAULT_CONNECT_S, legal=legal)
    source = f"{connect.source}; applies to the first collective of a group only"
    first = _build_limit(HCCL_CONNECT, connect.seconds, source)
    return [*limits, WaitLimit(first, LimitCoverage.FIRST)]


def _read_cann_setting(
    timeouts: RankTimeouts,
    name: str,
    default: float,
    *,
    legal: tuple[float, float] = (0, UNLIMITED_TIMEOUT_S),
    whole: bool = True,
) -> TimeoutSetting:
    return read_timeout_setting(
        timeouts.variables, name, default, owner="CANN", legal=legal, whole=whole
    )


def _round_exec_limit(seconds: float) -> float:
    """Return the limit as Ascend 910 and 310P round it; on other devices it is not smaller."""
    if not seconds:
        return 0
    return max(HCCL_STEP_S, min(int(seconds), MAX_HCCL_EXEC_S) // HCCL_STEP_S * HCCL_STEP_S)


def _build_limit(name: str, seconds: float, source: str) -> TimeoutLimit:
    return TimeoutLimit(name, int(seconds * SECOND_US), source, ())


_HALF_HOUR_S = 1800
_NEVER = "never applies: "


class GroupScope(Enum):
    """Whether a group has all ranks of its job, which determines the call that creates
    the group.
    """

    WORLD = "timeout of init_process_group"
    PART = "timeout of new_group"


@dataclass(frozen=True, slots=True)
class ProcessGroupLimits:
    """All limits that apply to the members of one group."""

    backend: str = ""
    limits: tuple[WaitLimit, ...] = ()
    aiv: bool = False
    """Whether a member runs HCCL in AIV mode, in which no limit above 1091 s works."""

    @property
    def sorted_limits(self) -> tuple[TimeoutLimit, ...]:
        """Every limit, the tightest first; limits that never apply are last."""
        found = (each.limit for each in self.limits)
        return tuple(sorted(found, key=lambda limit: (not limit.limit_us, limit.limit_us)))

    def list_covering(self, sequence: int) -> list[WaitLimit]:
        """Return the limits that apply to a wait in the collective with this sequence number."""
        first = sequence == 0
        return [
            each
            for each in self.limits
            if each.limit.limit_us
            and (
                each.coverage is LimitCoverage.WAITS
                or (first and each.coverage is LimitCoverage.FIRST)
            )
        ]

    def find_tightest(self, sequence: int) -> TimeoutLimit | None:
        """Return the tightest limit that covers a wait in the collective with this
        sequence number.
        """
        covering = (each.limit for each in self.list_covering(sequence))
        return min(covering, key=lambda limit: limit.limit_us, default=None)


def collect_group_limits(
    group: ProcessGroup, ranks: Iterable[int], facts: JobFacts
) -> ProcessGroupLimits:
    """Return the limits of a group whose members are these ranks, as far as they are known."""
    known: dict[WaitLimit, list[int]] = {}
    backend, aiv = "", False
    for rank in ranks:
        session, timeouts = facts.sessions.get(rank), facts.timeouts.get(rank, RankTimeouts())
        if session is None and rank not in facts.timeouts:
            continue
        own = next((each for each in timeouts.groups if each.group == group.name), None)
        own_backend = own.backend if own else _find_default_backend(session)
        backend = backend or own_backend
        # A job that was restarted with fewer ranks still has the group of all ranks of before.
        is_world = session is None or len(group.ranks) >= session.world_size
        scope = GroupScope.WORLD if is_world else GroupScope.PART
        for limit in _list_rank_limits(timeouts, own_backend, own, session, scope):
            known.setdefault(limit, []).append(rank)
        aiv = aiv or read_exec_limit(timeouts).aiv
    limits = (
        replace(each, limit=replace(each.limit, ranks=tuple(holders)))
        for each, holders in known.items()
    )
    return ProcessGroupLimits(backend, tuple(limits), aiv and backend == "hccl")


def _list_rank_limits(
    timeouts: RankTimeouts,
    backend: str,
    own: GroupTimeout | None,
    session: SessionStatus | None,
    scope: GroupScope,
) -> list[WaitLimit]:
    torch = own is not None or (session is not None and session.framework.startswith("torch"))
    limits: list[WaitLimit] = []
    if backend == "hccl":
        limits += list_hccl_limits(timeouts, torch=torch)
    if torch and backend:
        limits += _list_torch_limits(timeouts, backend, own, session, scope)
    return limits + _list_session_limits(timeouts, backend)


def _list_torch_limits(
    timeouts: RankTimeouts,
    backend: str,
    own: GroupTimeout | None,
    session: SessionStatus | None,
    scope: GroupScope,
) -> list[WaitLimit]:
    version = _parse_torch_version(session)
    limit_us, source = own.timeout_us if own else 0, "process group"
    if not limit_us:
        seconds = 600 if backend == "nccl" and version >= (2, 2) else _HALF_HOUR_S
        limit_us, source = seconds * SECOND_US, "default of torch"
    given = WaitLimit(TimeoutLimit(scope.value, limit_us, source, ()))
    if backend == "nccl":
        usual_s = 480 if version >= (2, 5) else 600
        beat = _build_heartbeat(timeouts, "NCCL", usual_s, is_monitored=True)
        return [_apply_error_handling(given, timeouts.variables), beat]
    if backend == "hccl":
        beat = _build_heartbeat(timeouts, "HCCL", 600, is_monitored=False)
        return [_build_hccl_watchdog(given, timeouts), beat]
    return [given]


def _apply_error_handling(given: WaitLimit, variables: Mapping[str, str]) -> WaitLimit:
    """Return the timeout of an NCCL group, which applies only if torch handles errors or waits
    block.
    """
    handling = read_count_variable(variables, "TORCH_NCCL_ASYNC_ERROR_HANDLING", 3)
    if handling or is_variable_on(variables, "TORCH_NCCL_BLOCKING_WAIT", default=False):
        return given
    why = "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 and TORCH_NCCL_BLOCKING_WAIT is off"
    return _disable_limit(given, why)


def _build_hccl_watchdog(given: WaitLimit, timeouts: RankTimeouts) -> WaitLimit:
    variables = timeouts.variables
    if is_variable_on(variables, "TORCH_HCCL_BLOCKING_WAIT", default=False):
        return given
    handling = read_count_variable(variables, "TORCH_HCCL_ASYNC_ERROR_HANDLING", 1)
    if not handling:
        return _disable_limit(given, "TORCH_HCCL_ASYNC_ERROR_HANDLING is 0")
    if handling != 1 or given.limit.limit_us != _HALF_HOUR_S * SECOND_US:
        return given
    # At the default, torch_npu raises the limit of its watchdog above the limit of HCCL.
    seconds = read_exec_limit(timeouts).read_s
    if not seconds:
        return replace(_disable_limit(given, "HCCL_EXEC_TIMEOUT is 0"), derived=True)
    source = "default of torch_npu: HCCL_EXEC_TIMEOUT + 1800 s"
    raised = _build_limit(given.limit.name, seconds + _HALF_HOUR_S, source)
    return WaitLimit(raised, derived=True)


def _build_heartbeat(
    timeouts: RankTimeouts, library: str, usual_s: int, *, is_monitored: bool
) -> WaitLimit:
    """Return the limit of a watchdog's heartbeat; `is_monitored` is the default of its variable."""
    name, legal = f"TORCH_{library}_HEARTBEAT_TIMEOUT_SEC", (1, UNLIMITED_TIMEOUT_S)
    read = read_timeout_setting(timeouts.variables, name, usual_s, owner="torch", legal=legal)
    source = f"{read.source}; detects a stuck watchdog, not a late rank"
    beat = WaitLimit(_build_limit(name, read.seconds, source), LimitCoverage.NOTHING)
    switch = f"TORCH_{library}_ENABLE_MONITORING"
    is_on = is_variable_on(timeouts.variables, switch, default=is_monitored)
    return beat if is_on else _disable_limit(beat, "monitoring is off")


def _list_session_limits(timeouts: RankTimeouts, backend: str) -> list[WaitLimit]:
    """Return the limits that scripts have declared, except for HCCL's, which `read_exec_limit`
    reads.
    """
    limits: list[WaitLimit] = []
    for name in timeouts.limits:
        seconds = read_declared_limit(timeouts.limits, name)
        if seconds is None or (name == HCCL_SESSION_EXEC and backend == "hccl"):
            continue
        # The execution of an operator begins only after all members have arrived.
        covers = LimitCoverage.NOTHING if name == "op_execute_timeout" else LimitCoverage.WAITS
        limits.append(WaitLimit(_build_limit(name, seconds, "session"), covers))
    return limits


def _disable_limit(limit: WaitLimit, why: str) -> WaitLimit:
    source = f"{limit.limit.source}; {_NEVER}{why}"
    return replace(limit, limit=replace(limit.limit, limit_us=0, source=source))


def _find_default_backend(session: SessionStatus | None) -> str:
    if session is None:
        return ""
    torch = session.framework.startswith("torch")
    return {"Ascend": "hccl", "GPU": "nccl", "CPU": "gloo" if torch else ""}.get(
        session.device_target, ""
    )


def _parse_torch_version(session: SessionStatus | None) -> tuple[int, ...]:
    version = session.framework.partition(" ")[2] if session else ""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal()) or (2, 5)
