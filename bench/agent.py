"""What an agent takes when there is nothing to do: processor time and memory.

Once just started, and once with a rank connected that has dumped and now is silent. The daemon
is a standalone one, so the coordinator is in the figures. The floor of its memory is a bare
interpreter that has loaded the same packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .arrays import activations, dump
from .host import Host, running_host
from .result import Result

IDLE_S = 10.0
SETTLE_S = 2.0
TENSORS = 128
ELEMENTS = 1 << 18
_MB = 1e6
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BARE = """
import sys, grpc, numpy, zstandard, xxhash, google.protobuf.message
print(flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and those that it started take."""

    cpu_share: float
    """Of one core."""
    rss_mb: float
    """Without shared memory."""
    shared_mb: float


def measure() -> Result:
    """Watch the daemon do nothing, twice."""
    with running_host() as host:
        time.sleep(SETTLE_S)
        fresh = _watched(host.pid)
        with host.session("agent") as session:
            session.step(0)
            dump(session, activations(TENSORS, ELEMENTS))
            session.step(1)
            used = _silent(host)
    return Result(
        figures={
            "idle_cpu_share": used.cpu_share,
            "rss_mb": used.rss_mb,
            "shared_mb": used.shared_mb,
            "fresh_idle_cpu_share": fresh.cpu_share,
            "fresh_rss_mb": fresh.rss_mb,
        },
        ratios={"fresh_rss_vs_bare_interpreter": fresh.rss_mb / _bare_rss_mb()},
    )


def _silent(host: Host) -> Usage:
    host.wait_until_written("agent", 0)
    time.sleep(SETTLE_S)
    return _watched(host.pid)


def _watched(pid: int) -> Usage:
    before_s, begun = _cpu_s(pid), time.perf_counter()
    time.sleep(IDLE_S)
    share = (_cpu_s(pid) - before_s) / (time.perf_counter() - begun)
    rss_mb = sum(_memory_mb(each, "RssAnon") + _memory_mb(each, "RssFile") for each in _tree(pid))
    return Usage(share, rss_mb, sum(_memory_mb(each, "RssShmem") for each in _tree(pid)))


def _tree(pid: int) -> list[int]:
    """Return a process and all below it: an agent may spread over several."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found += _tree(child)
    return found


def _cpu_s(pid: int) -> float:
    """Return the processor time so far, of the user and of the system."""
    ticks = 0
    for each in _tree(pid):
        # Counted from behind the name, which may hold blanks.
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def _memory_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 1024 / _MB


def _bare_rss_mb() -> float:
    """Return what the packages take that the daemon cannot do without."""
    command = [sys.executable, "-c", _BARE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        rss_mb = _memory_mb(process.pid, "RssAnon") + _memory_mb(process.pid, "RssFile")
        process.stdin.close()
        return rss_mb
