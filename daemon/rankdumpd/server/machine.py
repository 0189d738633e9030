"""Resources of the machine that this process may use: memory and cores within its control groups,
file descriptors, the id of the host, and the scheduling priority.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from rankdump.errors import ConfigError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP_FILE = Path("/proc/self/cgroup")
_AUTOGROUP_FILE = Path("/proc/self/autogroup")
_MAX_NICENESS = 19
MIN_DESCRIPTORS = 64
"""Descriptors that a daemon with a few ranks needs; with too few, gRPC aborts the process."""


def read_memory_bytes(groups: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP_FILE) -> int:
    """Return the bytes of memory of the machine, or the lowest limit of the control groups around
    this process if that is less.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The text `max` means that there is no limit.
    limits = [
        int(text) for text in _iter_cgroup_limits("memory.max", groups, own) if text.isdecimal()
    ]
    return min([total, *limits])


def count_cores(groups: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP_FILE) -> int:
    """Return the number of cores that this process may use, by its affinity and the CPUQuota of its
    unit.
    """
    allowed = len(os.sched_getaffinity(0))
    for text in _iter_cgroup_limits("cpu.max", groups, own):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open file descriptors to the hard limit.

    Shells and systemd units set the soft limit to 1024 for programs that cannot use more.
    ConfigError where the hard limit is too low for a daemon.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        allowed = f"at least {MIN_DESCRIPTORS} file descriptors"
        raise ConfigError("LimitNOFILE of the unit, or ulimit -n", "", hard, allowed)


def read_host_id(proc: Path = Path("/proc"), machine: Path = Path("/etc/machine-id")) -> str:
    """Return a text that is the same for all processes of this host and differs on every other
    host, whatever the host's name is.

    It contains the boot id, the machine id and the network namespace: containers of one machine
    count as several hosts, and copied images share a machine id. Empty if none of the three can be
    read.
    """
    parts: list[str] = []
    for path in (proc / "sys/kernel/random/boot_id", machine):
        with contextlib.suppress(OSError):
            parts.append(path.read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str((proc / "self/ns/net").readlink()))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest() if parts else ""


def lower_priority(niceness: int) -> None:
    """Raise the niceness of this process to at least `niceness`.

    The niceness applies to all threads: if a single thread were nice, others would wait for it
    while it holds the GIL.
    """
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        lower_session_priority(niceness)


def become_idle() -> None:
    """Run this process only on cores that are otherwise idle, as far as it may set that."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _MAX_NICENESS)
    lower_session_priority(_MAX_NICENESS)


def lower_session_priority(niceness: int) -> None:
    """Raise the niceness of the session that this process leads: some kernels schedule each session
    as one group, and the niceness of a process counts only within the group (sched(7), autogroup).
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            _AUTOGROUP_FILE.write_text(str(niceness))


def _iter_cgroup_limits(name: str, groups: Path, own: Path) -> Iterator[str]:
    """Yield the limit with this name of each control group around this process (cgroup v2)."""
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
