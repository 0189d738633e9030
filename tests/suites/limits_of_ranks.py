"""Ranks that read their limits somewhere, for the tests of hints."""

from __future__ import annotations

from rankdump.contract.events import ProcessGroup
from rankdump.contract.status import SessionState, SessionStatus
from rankdump.contract.timeouts import GroupTimeout, Timeouts
from rankdumpd.coordinator.hints.limits import GroupLimits, group_limits
from rankdumpd.coordinator.values import JobFacts

S = 1_000_000
WORLD, PAIR = ProcessGroup("w", (0, 1, 2)), ProcessGroup("p", (0, 1))


def session(
    rank: int, framework: str, device: str, *, world_size: int = 3, selected: str = "all"
) -> SessionStatus:
    """An open session."""
    return SessionStatus(
        "j", f"s{rank}", rank, world_size, 0, "h", 1, SessionState.OPEN,
        framework=framework, device_target=device, selected=selected,
    )  # fmt: skip


def limits(
    *each: Timeouts,
    framework: str = "mindspore 2.3",
    device: str = "Ascend",
    group: ProcessGroup = WORLD,
) -> GroupLimits:
    """What holds when rank i read the i-th of them; the last speaks for the rest."""
    facts = JobFacts(
        "j",
        {rank: each[min(rank, len(each) - 1)] for rank in range(3)},
        {rank: session(rank, framework, device) for rank in range(3)},
    )
    return group_limits(group, group.ranks, facts)


def environment(**variables: str) -> Timeouts:
    """A rank that has these variables set."""
    return Timeouts(variables)


def torch(backend: str, seconds: float, *, group: str = "w", **variables: str) -> Timeouts:
    """A rank whose process group was made with a timeout."""
    return Timeouts(variables, (GroupTimeout(group, backend, int(seconds * S)),))
