"""The limits of HCCL, rounded as its runtime rounds them. Pure.

Facts: ascend-formats.md 6.1 and 6.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.timeouts import TimeoutLimit, Timeouts
from rankdumpd.coordinator.hints.reading import (
    SECOND_US,
    UNLIMITED_S,
    Covers,
    Limit,
    Reading,
    declared,
    seconds_of,
)

EXEC, EVENT, CONNECT = "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT", "HCCL_CONNECT_TIMEOUT"
SESSION_EXEC = "hccl_timeout"
"""What TF's session says instead of the environment."""
STEP_S = 68
"""On 910 and 310P the runtime rounds down to multiples of this."""
MOST_S = 17340
"""What 910 and 310P take at most."""
AIV_MOST_S = 1091
"""In AIV mode nothing above it works."""
CONNECT_MOST_S = 7200
EVENT_MARGIN_S = 30
"""By how much torch_npu sets the event's limit above that of execution."""

_EXEC_S, _EVENT_S, _CONNECT_S = 1836, 1868, 120


@dataclass(frozen=True, slots=True)
class ExecLimit:
    """How long HCCL waits for peers while it executes."""

    name: str
    read_s: float
    """As it was set."""
    limit_s: float
    """As it is in force; 0: never strikes."""
    source: str
    aiv: bool


def exec_limit(timeouts: Timeouts) -> ExecLimit:
    """Return the limit of execution; what TF's session says overrides the environment."""
    mode = timeouts.variables.get("HCCL_OP_EXPANSION_MODE", "").strip().upper()
    name, read = EXEC, _exec_reading(timeouts, aiv=mode == "AIV")
    session_s = declared(timeouts.limits, SESSION_EXEC)
    if session_s is not None:
        name, read = SESSION_EXEC, Reading(session_s, "session")
    if mode == "AIV":
        most = 0 < read.seconds <= AIV_MOST_S
        limit_s = read.seconds if most else AIV_MOST_S
        source = f"{read.source}; in AIV mode {AIV_MOST_S} s at most"
        return ExecLimit(name, read.seconds, limit_s, source, aiv=True)
    limit_s = _rounded(read.seconds)
    source = read.source
    if limit_s != read.seconds:
        source += f" says {read.seconds:g} s; in force on 910 and 310P, other devices keep it"
    return ExecLimit(name, read.seconds, limit_s, source, aiv=False)


def hccl_limits(timeouts: Timeouts, *, torch: bool) -> list[Limit]:
    """Return the limits of HCCL itself for one rank."""
    execution = exec_limit(timeouts)
    limits = [Limit(_limit(execution.name, execution.limit_s, execution.source))]
    variables = timeouts.variables
    if torch and not variables.get(EVENT, "").strip():
        event_s = execution.read_s + EVENT_MARGIN_S if execution.read_s else 0
        source = f"default of torch_npu: {EXEC} + {EVENT_MARGIN_S} s"
        limits.append(Limit(_limit(EVENT, event_s, source), derived=True))
    else:
        legal = (0, UNLIMITED_S)
        event = seconds_of(variables, EVENT, _EVENT_S, owner="CANN", legal=legal)
        limits.append(Limit(_limit(EVENT, event.seconds, event.source)))
    legal = (_CONNECT_S, CONNECT_MOST_S)
    connect = seconds_of(variables, CONNECT, _CONNECT_S, owner="CANN", legal=legal)
    source = f"{connect.source}; first collective of a group only"
    limits.append(Limit(_limit(CONNECT, connect.seconds, source), Covers.FIRST))
    return limits


def _exec_reading(timeouts: Timeouts, *, aiv: bool) -> Reading:
    default = AIV_MOST_S if aiv else _EXEC_S
    legal = (0, UNLIMITED_S)
    return seconds_of(timeouts.variables, EXEC, default, owner="CANN", legal=legal, whole=not aiv)


def _rounded(seconds: float) -> float:
    """Return what a 910 or 310P makes of it; other devices never make it less."""
    if not seconds:
        return 0
    return max(STEP_S, min(int(seconds), MOST_S) // STEP_S * STEP_S)


def _limit(name: str, seconds: float, source: str) -> TimeoutLimit:
    return TimeoutLimit(name, int(seconds * SECOND_US), source, ())
