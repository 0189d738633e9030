"""Processor time and memory of an idle agent.

Measured just after the start, and with an idle rank connected that has dumped. The daemon is a
standalone one, so the coordinator is included. The lower bound of its memory is a bare interpreter
that has loaded the same packages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from .arrays import activations, dump
from .host import Host, running_host
from .process import cpu_s, memory_mb, tree
from .result import Result

IDLE_S = 10.0
SETTLE_S = 2.0
TENSORS = 128
ELEMENTS = 1 << 18
_BARE = """
import sys, grpc, numpy, zstandard, xxhash, google.protobuf.message
print(flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process and its children."""

    cpu_share: float
    """Of one core."""
    rss_mb: float
    """Without shared memory."""
    shared_mb: float


def measure() -> Result:
    """Measure the idle daemon twice."""
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
    host.wait_until_packed()
    time.sleep(SETTLE_S)
    return _watched(host.pid)


def _watched(pid: int) -> Usage:
    before_s, begun = cpu_s(pid), time.perf_counter()
    time.sleep(IDLE_S)
    share = (cpu_s(pid) - before_s) / (time.perf_counter() - begun)
    rss_mb = sum(memory_mb(each, "RssAnon") + memory_mb(each, "RssFile") for each in tree(pid))
    return Usage(share, rss_mb, sum(memory_mb(each, "RssShmem") for each in tree(pid)))


def _bare_rss_mb() -> float:
    """Return the memory of the packages that the daemon needs."""
    command = [sys.executable, "-c", _BARE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        rss_mb = memory_mb(process.pid, "RssAnon") + memory_mb(process.pid, "RssFile")
        process.stdin.close()
        return rss_mb
