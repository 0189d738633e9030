"""Resources of a process and its children, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path

_MB = 1e6
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants: a daemon may have several."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found += tree(child)
    return found


def cpu_s(pid: int) -> float:
    """Return the processor time so far, of the user and of the system."""
    ticks = 0
    for each in tree(pid):
        # Counted from behind the name, which may hold blanks.
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def memory_mb(pid: int, name: str) -> float:
    """Return a memory number of one process, by its name in `/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 1024 / _MB
