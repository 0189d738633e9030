"""Jobs of which a rank ends without running any code of ours: killed, aborted, or by `os._exit`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.data_dumps import write_data_dump

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).parent / "aborted_job.py"
ROUNDS = 3
EVENTS_OF_A_ROUND = 4
"""The model, its two layers and the all-reduce."""


@pytest.fixture
def run(tmp_path, socket_folder):
    """Run the job with an agent and a coordinator of its own; return its order as JSON."""

    def ran(way: str, **section) -> dict:
        # A small slab is ready at once, also on a busy disk: a rank waits 2 s for it at most.
        own = {"buffer_bytes": 1 << 20} | section
        config = write_data_dump(tmp_path, "/nowhere", saved_data="statistic", own=own)
        tree = tmp_path / "tree"
        command = ["run", "--config", config, "--output", tree, "--", sys.executable, JOB]
        subprocess.run(
            [sys.executable, "-m", "rankdump", *map(str, command), way, str(tmp_path)],
            check=True,
            capture_output=True,
            env=os.environ | {"TMPDIR": str(socket_folder)},
        )
        order = subprocess.run(
            [sys.executable, "-m", "rankdump", "order", str(tree), "--json"],
            capture_output=True,
            check=False,
        )
        return json.loads(order.stdout)

    return ran


def list_positions(order: dict, rank: int, iteration: int) -> list[int]:
    """Return the positions of a rank's events of an iteration, in the order."""
    return [
        position
        for entry in order["entries"]
        if entry["iteration"] == iteration
        for owner, position in zip(entry["ranks"], entry["rank_positions"], strict=True)
        if owner == rank
    ]


def find_last_call(order: dict) -> dict:
    return next(e for e in reversed(order["entries"]) if e["kind"] == "all_reduce")


@pytest.mark.parametrize("way", ["exit", "kill", "abort"])
def test_rank_that_ends_at_once_is_known_to_its_last_event(run, tmp_path, way):
    """It ends right after a collective: all its events are in the order, and the finding names it.

    The other rank, in which gloo raised, is not blamed.
    """
    order = run(way)
    assert (tmp_path / "calls_1.txt").read_text() == "".join(f"round {n}\n" for n in range(ROUNDS))
    assert (tmp_path / "calls_0.txt").read_text().endswith("raised RuntimeError\n")
    positions = list_positions(order, 1, 1)
    first = positions[0]
    assert sorted(positions) == list(range(first, first + ROUNDS * EVENTS_OF_A_ROUND))
    joint = [e for e in order["entries"] if e["kind"] == "all_reduce" and not e["missing"]]
    assert [e["ranks"] for e in joint] == [[0, 1]] * ROUNDS
    (finding,) = order["findings"]
    assert (finding["kind"], finding["ranks"]) == ("ended_rank", [1])
    last, missed = joint[-1], find_last_call(order)
    assert f"the process of rank 1 ended after all_reduce {last['name']!r}" in finding["text"]
    assert f"it never arrived at all_reduce {missed['name']!r}" in finding["text"]
    assert finding["text"].endswith("which failed on rank 0")
    assert (missed["ranks"], missed["missing"]) == ([0], [1])


def test_rank_without_shared_memory_is_not_blamed_for_what_it_may_have_done(run):
    """Its last half second may be missing: that is stated, and nobody is reported as absent."""
    order = run("kill", shared_memory=False)
    kinds = {finding["kind"] for finding in order["findings"]}
    assert "ended_rank" in kinds
    assert not kinds & {"missing_member", "silent_rank", "lone_message"}
    (finding,) = [f for f in order["findings"] if f["kind"] == "ended_rank"]
    assert finding["ranks"] == [1]
    assert "its last events may be missing" in finding["text"]
    assert all(not entry["missing"] for entry in order["entries"])
