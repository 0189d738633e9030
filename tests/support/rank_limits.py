"""Ranks with timeout limits from given sources, for tests of hints."""

from __future__ import annotations

from rankdump._core.events import ProcessGroup
from rankdump._core.status import SessionState, SessionStatus
from rankdump._core.timeouts import GroupTimeout, RankTimeouts
from rankdumpd.coordinator.fleet_views import JobFacts
from rankdumpd.coordinator.hints.timeout_limits import ProcessGroupLimits, collect_group_limits

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
    *each: RankTimeouts,
    framework: str = "mindspore 2.3",
    device: str = "Ascend",
    group: ProcessGroup = WORLD,
) -> ProcessGroupLimits:
    """What holds when rank i read the i-th of them; the last speaks for the rest."""
    facts = JobFacts(
        "j",
        {rank: each[min(rank, len(each) - 1)] for rank in range(3)},
        {rank: session(rank, framework, device) for rank in range(3)},
    )
    return collect_group_limits(group, group.ranks, facts)


def environment(**variables: str) -> RankTimeouts:
    """A rank that has these variables set."""
    return RankTimeouts(variables)


def torch(backend: str, seconds: float, *, group: str = "w", **variables: str) -> RankTimeouts:
    """A rank whose process group was made with a timeout."""
    return RankTimeouts(variables, (GroupTimeout(group, backend, int(seconds * S)),))
