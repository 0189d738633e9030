"""Which limits hold for the members of a process group, and where each was read. Pure.

Facts: ascend-formats.md 6. The class of an Ascend device is not known here: where classes differ
the smaller value counts, and the source of the limit says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rankdump.contract.events import ProcessGroup
from rankdump.contract.status import SessionStatus
from rankdump.contract.timeouts import GroupTimeout, TimeoutLimit, Timeouts
from rankdumpd.coordinator.hints.hccl import SESSION_EXEC, exec_limit, hccl_limits
from rankdumpd.coordinator.hints.reading import (
    SECOND_US,
    UNLIMITED_S,
    Covers,
    Limit,
    count_of,
    declared,
    is_on,
    seconds_of,
)
from rankdumpd.coordinator.values import JobFacts

_HALF_HOUR_S = 1800
_NEVER = "never strikes: "


class Grade(Enum):
    """Whether a group has all ranks of its job: that decides how it is made."""

    WORLD = "timeout of init_process_group"
    PART = "timeout of new_group"


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """All limits that hold for members of one group."""

    backend: str = ""
    limits: tuple[Limit, ...] = ()
    aiv: bool = False
    """A member has HCCL in AIV mode, where no limit above 1091 s works."""

    @property
    def listed(self) -> tuple[TimeoutLimit, ...]:
        """Every limit, the tightest first; those that never strike last."""
        found = (each.limit for each in self.limits)
        return tuple(sorted(found, key=lambda limit: (not limit.limit_us, limit.limit_us)))

    def covering(self, sequence: int) -> list[Limit]:
        """Return the limits that strike a wait in the collective of that number."""
        first = sequence == 0
        return [
            each
            for each in self.limits
            if each.limit.limit_us
            and (each.covers is Covers.WAITS or (first and each.covers is Covers.FIRST))
        ]

    def budget(self, sequence: int) -> TimeoutLimit | None:
        """Return the tightest limit that covers such a wait."""
        covering = (each.limit for each in self.covering(sequence))
        return min(covering, key=lambda limit: limit.limit_us, default=None)


def group_limits(group: ProcessGroup, ranks: Iterable[int], facts: JobFacts) -> GroupLimits:
    """Return what holds for a group, of which these ranks are known."""
    known: dict[Limit, list[int]] = {}
    backend, aiv = "", False
    for rank in ranks:
        session, timeouts = facts.sessions.get(rank), facts.timeouts.get(rank, Timeouts())
        if session is None and rank not in facts.timeouts:
            continue
        own = next((each for each in timeouts.groups if each.group == group.name), None)
        backend = backend or (own.backend if own else _usual_backend(session))
        grade = Grade.WORLD if _is_world(group, session) else Grade.PART
        for limit in _rank_limits(timeouts, own, session, grade):
            known.setdefault(limit, []).append(rank)
        aiv = aiv or _aiv(timeouts)
    limits = (
        replace(each, limit=replace(each.limit, ranks=tuple(holders)))
        for each, holders in known.items()
    )
    return GroupLimits(backend, tuple(limits), aiv and backend == "hccl")


def _rank_limits(
    timeouts: Timeouts, own: GroupTimeout | None, session: SessionStatus | None, grade: Grade
) -> list[Limit]:
    backend = own.backend if own else _usual_backend(session)
    torch = own is not None or (session is not None and session.framework.startswith("torch"))
    limits: list[Limit] = []
    if backend == "hccl":
        limits += hccl_limits(timeouts, torch=torch)
    if torch and backend:
        limits += _torch_limits(timeouts, backend, own, session, grade)
    return limits + _session_limits(timeouts, backend)


def _torch_limits(
    timeouts: Timeouts,
    backend: str,
    own: GroupTimeout | None,
    session: SessionStatus | None,
    grade: Grade,
) -> list[Limit]:
    source = "process group"
    limit_us = own.timeout_us if own else 0
    if not limit_us:
        limit_us = _default_s(backend, session) * SECOND_US
        source = "default of torch"
    given = Limit(TimeoutLimit(grade.value, limit_us, source, ()))
    if backend == "nccl":
        return [_with_handling(given, timeouts.variables), _nccl_heartbeat(timeouts, session)]
    if backend == "hccl":
        return [_hccl_watchdog(given, timeouts), _hccl_heartbeat(timeouts)]
    return [given]


def _with_handling(given: Limit, variables: Mapping[str, str]) -> Limit:
    """Return the timeout of an nccl group: it strikes only where somebody looks at it."""
    handling = count_of(variables, "TORCH_NCCL_ASYNC_ERROR_HANDLING", 3)
    if handling or is_on(variables, "TORCH_NCCL_BLOCKING_WAIT", default=False):
        return given
    why = "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 and TORCH_NCCL_BLOCKING_WAIT is off"
    return _never(given, why)


def _hccl_watchdog(given: Limit, timeouts: Timeouts) -> Limit:
    variables = timeouts.variables
    if is_on(variables, "TORCH_HCCL_BLOCKING_WAIT", default=False):
        return given
    handling = count_of(variables, "TORCH_HCCL_ASYNC_ERROR_HANDLING", 1)
    if not handling:
        return _never(given, "TORCH_HCCL_ASYNC_ERROR_HANDLING is 0")
    if handling != 1 or given.limit.limit_us != _HALF_HOUR_S * SECOND_US:
        return given
    # Left at its default, torch_npu moves its watchdog out of HCCL's way.
    seconds = exec_limit(timeouts).read_s
    if not seconds:
        return replace(_never(given, "HCCL_EXEC_TIMEOUT is 0"), derived=True)
    source = "default of torch_npu: HCCL_EXEC_TIMEOUT + 1800 s"
    limit_us = int((seconds + _HALF_HOUR_S) * SECOND_US)
    return Limit(TimeoutLimit(given.limit.name, limit_us, source, ()), derived=True)


def _nccl_heartbeat(timeouts: Timeouts, session: SessionStatus | None) -> Limit:
    usual = 480 if _torch_version(session) >= (2, 5) else 600
    monitored = is_on(timeouts.variables, "TORCH_NCCL_ENABLE_MONITORING", default=True)
    return _heartbeat(timeouts, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", usual, monitored)


def _hccl_heartbeat(timeouts: Timeouts) -> Limit:
    monitored = is_on(timeouts.variables, "TORCH_HCCL_ENABLE_MONITORING", default=False)
    return _heartbeat(timeouts, "TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC", 600, monitored)


def _heartbeat(timeouts: Timeouts, name: str, usual_s: int, monitored: bool) -> Limit:
    read = seconds_of(timeouts.variables, name, usual_s, owner="torch", legal=(1, UNLIMITED_S))
    source = f"{read.source}; strikes a watchdog that is stuck, not a late rank"
    beat = Limit(TimeoutLimit(name, int(read.seconds * SECOND_US), source, ()), Covers.NOTHING)
    return beat if monitored else _never(beat, "monitoring is off")


def _session_limits(timeouts: Timeouts, backend: str) -> list[Limit]:
    """Return what scripts said of limits that no variable says; HCCL's own is read elsewhere."""
    limits: list[Limit] = []
    for name in timeouts.limits:
        seconds = declared(timeouts.limits, name)
        if seconds is None or (name == SESSION_EXEC and backend == "hccl"):
            continue
        # An operator's own execution does not begin before all members are there.
        covers = Covers.NOTHING if name == "op_execute_timeout" else Covers.WAITS
        limit_us = int(seconds * SECOND_US)
        limits.append(Limit(TimeoutLimit(name, limit_us, "session", ()), covers))
    return limits


def _never(limit: Limit, why: str) -> Limit:
    source = f"{limit.limit.source}; {_NEVER}{why}"
    return replace(limit, limit=replace(limit.limit, limit_us=0, source=source))


def _usual_backend(session: SessionStatus | None) -> str:
    if session is None:
        return ""
    torch = session.framework.startswith("torch")
    return {"Ascend": "hccl", "GPU": "nccl", "CPU": "gloo" if torch else ""}.get(
        session.device_target, ""
    )


def _default_s(backend: str, session: SessionStatus | None) -> int:
    return 600 if backend == "nccl" and _torch_version(session) >= (2, 2) else _HALF_HOUR_S


def _torch_version(session: SessionStatus | None) -> tuple[int, ...]:
    version = session.framework.partition(" ")[2] if session else ""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal()) or (2, 5)


def _is_world(group: ProcessGroup, session: SessionStatus | None) -> bool:
    return session is None or len(group.ranks) == session.world_size


def _aiv(timeouts: Timeouts) -> bool:
    return exec_limit(timeouts).aiv
