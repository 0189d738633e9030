"""Descriptor limit of a running process: lowered to almost none, and restored."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from rankdumpd.agent.storage.folders import MAX_OPEN_FOLDERS

_SPARE = 1


def open_descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def lasting_descriptors(pid: int) -> int:
    """Return how many it has open, except folders that an agent may hold."""
    folders = others = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if each.is_dir():
                folders += 1
            else:
                others += 1
    return others + max(0, folders - MAX_OPEN_FOLDERS)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process without shared pages."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


class DescriptorLimit:
    """Descriptor limit of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def exhaust(self) -> None:
        """Lower the limit to almost none."""
        highest = max(int(each.name) for each in Path(f"/proc/{self._pid}/fd").iterdir())
        few = min(highest + 1 + _SPARE, open_descriptors(self._pid) + _SPARE)
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (few, self._before[1]))

    def give_back(self) -> None:
        """Restore the limit."""
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._before)
