"""Change of the number of workers during a job: sessions and slabs move."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.worker_host import WAIT_S, WorkerHost, dump, tensors, wait_gone, watch

from rankdump._core.status import SessionState
from rankdumpd.workers.session_migration import select_worker


@pytest.mark.parametrize(
    ("before", "after", "shared_memory"),
    [(1, 2, True), (2, 1, False), (2, 3, True), (3, 2, False)],
)
def test_ranks_continue_with_another_number_of_workers(
    short_dir: Path, before, after, shared_memory
):
    """No tensor is lost or duplicated, whichever worker serves a rank."""
    with contextlib.ExitStack() as stack:
        host = WorkerHost(short_dir, before)
        stack.callback(host.close)
        sessions = [host.session(rank, shared_memory=shared_memory) for rank in range(3)]
        for rank, session in enumerate(sessions):
            session.step(0)
            dump(session, tensors(rank, 0, 100))
        host.kill_all()
        for rank, session in enumerate(sessions):
            dump(session, tensors(rank, 100, 100))
        host.start(after)
        for rank, session in enumerate(sessions):
            dump(session, tensors(rank, 200, 100))
            session.close()
        for rank in range(3):
            np.testing.assert_array_equal(host.arrays(rank), tensors(rank, 0, 300))
            (manifest,) = host.manifests(rank)
            assert manifest.status.is_balanced
            assert manifest.status.stored == 300
        states = {s.rank: s.state for s in host.view().sessions}
        assert states == dict.fromkeys(range(3), SessionState.CLOSED)
        assert not list(host.folder.rglob("*.slab"))


DYING_RANK = """
import sys
from pathlib import Path
from support.slab_agents import in_slab, wait_until
from support.worker_host import RankPlace, dump, tensors
session = RankPlace(Path(sys.argv[1])).session(2)
session.step(0)
dump(session, tensors(2, 0, 50))
# On a busy host a rank begins on the stream, where what its agent does not read dies with it.
wait_until(lambda: in_slab(session))
print(flush=True)
sys.stdin.readline()
dump(session, tensors(2, 50, 250))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_slab_of_a_dead_rank_is_read_by_another_worker(short_dir: Path, before, after):
    """Supervisor, workers and rank are killed; the slab moves with its session and is read."""
    with contextlib.ExitStack() as stack:
        host = WorkerHost(short_dir, before)
        stack.callback(host.close)
        rank = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", DYING_RANK, str(short_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdout.readline()
        worker = host.workers().get(select_worker("job", 2, before), host.process.pid)
        os.kill(worker, signal.SIGSTOP)
        rank.stdin.write(b"\n")
        rank.stdin.flush()
        rank.stdout.readline()
        watches = watch(host.workers().values())
        for process in (rank, host.process):
            process.kill()
            process.wait(WAIT_S)
        if worker != host.process.pid:
            os.kill(worker, signal.SIGKILL)
        wait_gone(watches)
        host.start(after)
        # Complete it is not: the rank never said what it expected.
        while sum(i.stored for i in host.view().iterations) < 300:
            assert host.process.poll() is None
        assert [s.state for s in host.view().sessions] == [SessionState.LOST]
        np.testing.assert_array_equal(host.arrays(2), tensors(2, 0, 300))
