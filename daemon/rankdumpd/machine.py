"""What this process may take of its machine, and how it gives way to the ranks on it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def memory_bytes(groups: Path = _GROUPS, own: Path = _OWN_GROUP) -> int:
    """Return the memory there is: the machine's, or a control group's if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # `max` is none.
    limits = [int(text) for text in _limits("memory.max", groups, own) if text.isdecimal()]
    return min([total, *limits])


def cores(groups: Path = _GROUPS, own: Path = _OWN_GROUP) -> int:
    """Return the cores that may be used at once: by affinity, and by a unit's CPUQuota."""
    allowed = len(os.sched_getaffinity(0))
    for text in _limits("cpu.max", groups, own):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def give_way(niceness: int) -> None:
    """Let every other process go first by that much; one that does so already stays as it is.

    The whole process: a thread that gave way alone would be waited for with the interpreter's lock.
    """
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _limits(name: str, groups: Path, own: Path) -> Iterator[str]:
    """Yield what each control group around this process says (cgroup v2)."""
    try:
        inner = groups / own.read_text().strip().rpartition("::/")[2]
    except OSError:
        return
    for group in (inner, *inner.parents):
        if not group.is_relative_to(groups):
            return
        try:
            yield (group / name).read_text().strip()
        except OSError:
            continue
