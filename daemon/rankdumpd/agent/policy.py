"""What the operator of a host allows, and whether there is room by it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rankdump.contract.sizes import size

NEAR = 0.8
"""Of a limit, from which on people hear of it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of one agent; 0 is none."""

    max_record_bytes: int
    keep_free_bytes: int = 0
    keep_free_ratio: float = 0.0
    keep_free_inodes_ratio: float = 0.0
    disk_bytes: int = 0
    """Of all dumps together."""
    job_bytes: int = 0
    """Of the dump of one job."""
    retain_s: float = 0.0
    """Iterations are removed when they are older."""
    retain_bytes: int = 0
    """They are while dumps take more together."""

    @property
    def retains_all(self) -> bool:
        """Whether nothing is ever removed."""
        return not self.retain_s and not self.retain_bytes


@dataclass(frozen=True, slots=True)
class Space:
    """What a disk says of itself; all zero when it never said anything."""

    free_bytes: int = 0
    """For processes without privileges."""
    total_bytes: int = 0
    free_inodes: int = 0
    total_inodes: int = 0
    """0 also where a file system has no fixed number of them."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a decision on one tensor needs to know."""

    policy: Policy
    space: Space = field(default_factory=Space)
    queued_records: int = 0
    queued_bytes: int = 0
    """Under way: they will be on the disk before the next one is."""
    used_bytes: int = 0
    """What dumps of this agent take."""
    job_bytes: int = 0
    """What the dump of the job takes."""


def floor_bytes(policy: Policy, space: Space) -> int:
    """Return what stays free of a disk: the larger of both settings."""
    return max(policy.keep_free_bytes, int(policy.keep_free_ratio * space.total_bytes))


def floor_inodes(policy: Policy, space: Space) -> int:
    """Return how many files more a disk has to be able to hold."""
    return int(policy.keep_free_inodes_ratio * space.total_inodes)


def room_reason(room: Room, byte_count: int) -> str:
    """Return why a tensor of that size is not taken; empty when there is room for it.

    A disk that never said anything refuses nothing: who writes to it will see.
    """
    policy, space, coming = room.policy, room.space, room.queued_bytes + byte_count
    if byte_count > policy.max_record_bytes:
        return "record_too_large"
    if space.total_bytes and space.free_bytes - coming < floor_bytes(policy, space):
        return "disk_low"
    if space.total_inodes:
        left = space.free_inodes - room.queued_records - 1
        if left < floor_inodes(policy, space):
            return "inodes_low"
    if policy.disk_bytes and room.used_bytes + coming > policy.disk_bytes:
        return "disk_cap"
    if policy.job_bytes and room.job_bytes + coming > policy.job_bytes:
        return "job_quota"
    return ""


def why_retired(policy: Policy, age_s: float, used_bytes: int) -> str:
    """Return why an iteration is removed that ended so long ago, `age` or `size`; else nothing."""
    if policy.retain_s and age_s > policy.retain_s:
        return "age"
    return "size" if policy.retain_bytes and used_bytes > policy.retain_bytes else ""


def disk_warnings(policy: Policy, root: str, space: Space) -> Iterator[str]:
    """Say when a disk comes near its floors, or is below them, with the numbers."""
    free, total, floor = space.free_bytes, space.total_bytes, floor_bytes(policy, space)
    # A disk that only an absolute floor guards may well be full for the most part.
    limit = total - floor if policy.keep_free_ratio else 0
    near = _near(total - free, limit) if limit else free * (1 - NEAR) <= floor
    if total and near:
        now = f"{size(free)} ({free / total:.0%}) free of {size(total)}"
        key = _key(policy, floor)
        yield f"disk of {root}: {now}; {_verb(free, floor)} {size(floor)} ({key})"
    free, total, floor = space.free_inodes, space.total_inodes, floor_inodes(policy, space)
    if floor and _near(total - free, total - floor):
        now = f"room for {free} more files of {total}"
        yield f"disk of {root}: {now}; {_verb(free, floor)} {floor} (agent.keep_free_inodes_ratio)"


def cap_warnings(policy: Policy, used_bytes: int) -> Iterator[str]:
    """Say when all dumps together come near what they may take."""
    if policy.disk_bytes and _near(used_bytes, policy.disk_bytes):
        yield f"dumps take {_share(used_bytes, policy.disk_bytes)} (agent.disk_bytes)"


def job_warnings(policy: Policy, job_id: str, job_bytes: int) -> Iterator[str]:
    """Say when the dump of a job comes near what it may take."""
    if policy.job_bytes and _near(job_bytes, policy.job_bytes):
        taken = _share(job_bytes, policy.job_bytes)
        yield f"the dump of job {job_id} takes {taken} (agent.job_bytes)"


def _near(used: int, limit: int) -> bool:
    return used >= NEAR * limit


def _verb(left: int, floor: int) -> str:
    return "tensors are refused below" if left >= floor else "tensors are refused, it is below"


def _key(policy: Policy, floor: int) -> str:
    if floor == policy.keep_free_bytes:
        return "agent.keep_free_bytes"
    return f"agent.keep_free_ratio is {policy.keep_free_ratio:.0%}"


def _share(used: int, limit: int) -> str:
    return f"{size(used)} of the {size(limit)} that it may"
