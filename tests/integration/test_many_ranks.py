"""Many ranks at once on one agent, some of which are killed: staged tensors are stored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from integration.jobs import crowd

import rankdump
from rankdump._cli.daemon_client import fetch_agent_status
from rankdump._core.record import sanitize_name
from rankdump._core.status import SessionState, StatusView

pytestmark = [pytest.mark.slow, pytest.mark.serial]

MIB = 1 << 20
WAIT_S = 300


@pytest.fixture
def run_ranks(short_dir: Path):
    """Runs the ranks of one job until they end; returns the tree of the job."""

    def run(address: str, finishes: list[str], **own: object) -> Path:
        config = short_dir / "dump.json"
        common = {
            "dump_mode": 0,
            "path": str(short_dir / "dump"),
            "net_name": "Net",
            "iteration": "all",
            "input_output": 0,
            "kernels": [],
            "support_device": [0],
        }
        body = {
            "common_dump_settings": common,
            "e2e_dump_settings": {"enable": True, "trans_flag": True},
            "rankdump": {"block_timeout_s": WAIT_S, **own},
        }
        config.write_text(json.dumps(body))
        environ = os.environ | {
            "RANKDUMP_CONFIG": str(config),
            "RANKDUMP_AGENT": address,
            "RANKDUMP_JOB_ID": "crowd",
        }
        job = [sys.executable, crowd.__file__, *finishes]
        done = subprocess.run(job, env=environ, stdout=subprocess.PIPE, timeout=WAIT_S, check=True)
        ended = json.loads(done.stdout)
        assert ended == [-signal.SIGKILL if finish == "kill" else 0 for finish in finishes]
        return short_dir / "dump"

    return run


def wait_until_settled(address: str, ranks: int) -> StatusView:
    """Return the status once no session is open and every tensor is stored.

    A killed rank is lost as soon as its stream breaks, shortly before its slab is read.
    """
    everything = ranks * crowd.ITERATIONS * crowd.OPERATORS
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        view = fetch_agent_status(address)
        over = [s for s in view.sessions if s.state is not SessionState.OPEN]
        if len(over) == ranks and sum(each.kept_tensors for each in view.iterations) == everything:
            return view
        time.sleep(0.05)
    raise AssertionError(f"after {WAIT_S} s: {fetch_agent_status(address)}")


def check_whole(tree: Path, ranks: int) -> None:
    """Check that the tree has every tensor that any rank dumped, bit for bit, and no other."""
    dump = rankdump.open(tree)
    assert not dump.problems
    assert len(dump.tensors()) == ranks * crowd.ITERATIONS * crowd.OPERATORS
    for rank in range(ranks):
        of_rank = dump.where(rank=rank)
        for iteration in range(crowd.ITERATIONS):
            # By the name in the file: without a manifest nobody knows the full one.
            found = {e.key.op_name: e for e in of_rank.where(iteration=iteration).tensors()}
            for name, values in crowd.tensors(rank, iteration):
                np.testing.assert_array_equal(dump.load(found[sanitize_name(name)]), values)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["slab", "chunks"])
def test_sixteen_ranks_share_an_agent_without_loss(
    make_agent, short_dir: Path, run_ranks, shared_memory: bool
):
    """They share the memory of the agent; no tensor is lost or given to another rank."""
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=4 * MIB)
    tree = run_ranks(agent.address, ["close"] * 16, shared_memory=shared_memory)
    view = wait_until_settled(agent.address, 16)
    assert [s.state for s in view.sessions] == [SessionState.CLOSED] * 16
    assert len(view.iterations) == 16 * crowd.ITERATIONS
    assert all(i.complete and i.is_balanced and not i.dropped for i in view.iterations)
    check_whole(tree, 16)


def test_killed_ranks_keep_their_staged_tensors(make_agent, short_dir: Path, run_ranks):
    """The tree has what a rank staged before SIGKILL, and the tensors of the other ranks."""
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=64 * MIB)
    tree = run_ranks(agent.address, ["kill", "close", "kill", "close"])
    view = wait_until_settled(agent.address, 4)
    states = {s.rank: s.state for s in view.sessions}
    lost, closed = SessionState.LOST, SessionState.CLOSED
    assert states == {0: lost, 1: closed, 2: lost, 3: closed}
    check_whole(tree, 4)
