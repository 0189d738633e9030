"""Agent without free descriptors, and a second agent on one runtime folder."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
from support.slab_agents import SMALL, counts

from rankdump._core.drop_reasons import SPACE_REASONS

WAIT_S = 300


def test_missing_descriptors_are_a_drop_reason_until_they_return(make_daemon, make_rank, frames):
    """Tensors are dropped while there are no descriptors, and stored once there are some again."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    arrays = [np.full(100, n, np.float32) for n in range(4)]
    stream = rank.push().send(frames.record(1, arrays[1]))
    stream.wait_acknowledged(1)
    pid = daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    stream.send(frames.record(2, arrays[2])).wait_acknowledged(2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    stream.send(frames.record(3, arrays[3])).wait_acknowledged(3)
    assert counts(rank) == {"stored": 2, "degraded": 0, "expected": 0, "no_descriptors": 1}
    assert "no_descriptors" in SPACE_REASONS


def test_daemon_takes_all_descriptors_that_it_may_have(make_daemon):
    """Shells set a soft limit of 1024, which a host with many ranks reaches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        daemon = make_daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_limit_that_is_too_low_ends_the_start_with_one_line(short_dir):
    command = 'ulimit -n 20 && exec "$@"'
    daemon = [sys.executable, "-m", "rankdumpd", "standalone", "--socket", f"{short_dir}/d.sock"]
    daemon += ["--state-dir", f"{short_dir}/state"]
    ended = subprocess.run(
        ["sh", "-c", command, "sh", *daemon],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.endswith(
        "CRITICAL rankdumpd.main: LimitNOFILE of the unit, or ulimit -n: 20 is not allowed; "
        "allowed: at least 64 file descriptors"
    )


def test_second_agent_on_one_runtime_folder_is_rejected(make_daemon, make_rank, short_dir):
    """The second agent ends with one line, and the slabs of the first one stay."""
    daemon = make_daemon()
    rank = make_rank(daemon.address, wants_slab=True, delivery=SMALL)
    rank.open()
    before = list((short_dir / "slabs").iterdir())
    command = [sys.executable, "-m", "rankdumpd", "standalone"]
    command += ["--socket", f"{short_dir}/2.sock", "--state-dir", f"{short_dir}/state2"]
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert second.returncode == 1
    (said,) = [line for line in second.stderr.splitlines() if "CRITICAL" in line]
    assert said.endswith(f"agent.runtime_dir: {short_dir} has the slabs of another agent")
    assert list((short_dir / "slabs").iterdir()) == before != []
