"""Two agents with workers on one runtime folder: the second is rejected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.slab_agents import wait_until
from support.worker_host import WAIT_S, WorkerHost, dump, tensors

from rankdump._embedded_daemon import is_daemon_serving


@pytest.fixture
def host(short_dir: Path) -> Iterator[WorkerHost]:
    host = WorkerHost(short_dir, 2)
    yield host
    host.close()


def second(host: WorkerHost, socket: Path, *, workers: int) -> subprocess.CompletedProcess[str]:
    """Run another supervisor, with a state folder of its own."""
    folder = host.folder
    own = {"LISTEN": f"unix:{socket}", "STATE_DIR": f"{folder}/other", "RUNTIME_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "rankdumpd", "agent", "--workers", str(workers)],
        env={**os.environ, **{f"RANKDUMPD_AGENT__{key}": value for key, value in own.items()}},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=folder,
    )


def test_second_supervisor_on_one_runtime_folder_is_rejected(host: WorkerHost, tmp_path: Path):
    """With the same socket, another one beside it, or one elsewhere; also with more workers."""
    tmp_path.chmod(0o750)
    before = sorted(host.folder.rglob("*"))
    places = ((host.folder / "agent.sock", 2), (host.folder / "b.sock", 3), (tmp_path / "c", 3))
    for socket, workers in places:
        done = second(host, socket, workers=workers)
        said = f"agent.runtime_dir: {host.folder} is used by the workers of another agent"
        (line,) = done.stderr.splitlines()
        assert line.endswith(f"CRITICAL rankdumpd.main: {said}")
        assert done.returncode == 1
    mine = [path for path in host.folder.rglob("*") if "other" not in path.parts]
    assert sorted(mine) == before
    with host.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 20))
    np.testing.assert_array_equal(host.arrays(0), tensors(0, 0, 20))


def test_second_supervisor_is_rejected_while_a_worker_restarts(host: WorkerHost):
    """The worker's socket stays reserved until the supervisor has restarted it."""
    index = 1
    os.kill(host.worker(index), signal.SIGKILL)
    done = second(host, host.folder / "b.sock", workers=2)
    assert done.returncode == 1
    wait_until(lambda: is_daemon_serving(f"{host.address}.{index}", timeout_s=0.2))
