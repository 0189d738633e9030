"""A job whose plan names collectives: their inputs and outputs are those that the ranks
computed, the losses are the same, and a plan of everything has none of them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_dumps import write_data_dump

import rankdump
from rankdump._analysis.reader.tree import Entry
from rankdump.reader import read_order, status

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

WORLD, STEPS = 2, 3
RUN_S = 500
TITLES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
BUCKET = "Default/group-0/bucket-0/AllReduce-op4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job; the agent has everything when the command returns."""
    folder = tmp_path_factory.mktemp("tensors")
    config = write_data_dump(folder, folder / "unused", devices=range(WORLD))
    command = [sys.executable, "-m", "rankdump", "run", "--config", str(config), "--"]
    command += [sys.executable, str(Path(__file__).with_name("collective_tensor_job.py"))]
    command += [str(WORLD), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return folder


@dataclass
class TensorRun:
    """One session of the job: the reports of its ranks, and its tree."""

    tree: Path
    reports: list[dict[str, Any]]

    @property
    def collectives(self) -> list[Entry]:
        dump = rankdump.open(self.tree)
        return [each for each in dump.tensors() if each.op_name.startswith("Default/group-")]


def read_run(folder: Path, tree: str) -> TensorRun:
    reports = [json.loads((folder / f"{tree}.rank_{n}.json").read_text()) for n in range(WORLD)]
    return TensorRun(folder / tree, reports)


@pytest.mark.parametrize("tree", ["selected", "named", "everything"])
def test_losses_are_the_same_with_a_dump(folder: Path, tree: str) -> None:
    for report in read_run(folder, tree).reports:
        assert len(report["plain"]) > STEPS
        assert report["dumped"] == report["plain"]


def test_inputs_and_outputs_are_those_of_the_ranks(folder: Path) -> None:
    """Each tensor that the ranks expect is there once, with its bytes, and nothing else is."""
    run, dump = read_run(folder, "selected"), rankdump.open(folder / "selected")
    found = {}
    for each in run.collectives:
        data = dump.load(each)
        key = (each.key.rank, each.key.iteration, each.op_name, each.key.side.value, each.key.slot)
        assert key not in found
        found[key] = hashlib.sha256(data.tobytes()).hexdigest()
        if each.op_name == BUCKET and key[3] == "output":
            data = np.sort(data.reshape(-1))
            sorted_key = (*key[:3], "sorted output", 0)
            found[sorted_key] = hashlib.sha256(data.tobytes()).hexdigest()
    expected = {
        (rank, step, f"Default/group-0/{name}", side, slot): digest
        for rank, report in enumerate(run.reports)
        for step, name, side, slot, digest in report["digests"]
    }
    assert len(expected) == sum(len(each["digests"]) for each in run.reports) > 100
    assert {key: found.get(key) for key in expected} == expected
    others = {key[2:5] for key in found.keys() - expected.keys()}
    assert {each for each in others if "Broadcast" not in each[0]} == {
        (BUCKET, "input", 0),
        (BUCKET, "output", 0),  # compared above without an order
        ("Default/group-0/AllReduce-op5", "input", 0),
    }


def test_buffers_that_ddp_broadcasts_have_outputs(folder: Path) -> None:
    """Statistics of the norm are packed for one broadcast; rank 1 gets what rank 0 gave."""
    run, dump = read_run(folder, "selected"), rankdump.open(folder / "selected")
    named = [each for each in run.collectives if each.op_name.endswith("/Broadcast-op1")]
    (given,) = [e for e in named if e.key.side.value == "input" and e.key.iteration == 2]
    taken = [e for e in named if e.key.side.value == "output" and e.key.iteration == 2]
    assert given.key.rank == 0
    assert sorted(each.key.rank for each in taken) == [0, 1]
    assert dump.load(given).size == 12
    assert all(np.array_equal(dump.load(given), dump.load(each)) for each in taken)


def test_only_outputs_that_cannot_be_read_safely_are_dropped(folder: Path) -> None:
    """In each iteration one all-reduce is waited for by its future alone, and one broadcast of the
    C++ code of DistributedDataParallel is made in the buffer itself, which the forward changes.
    """
    for tree, dropped in (("selected", {"not_waited": 2}), ("named", {}), ("everything", {})):
        found = status(folder / tree).iterations
        assert len(found) == STEPS * WORLD
        for each in found:
            assert each.complete
            assert each.is_balanced
            assert dict(each.dropped) == dropped, tree


def test_names_and_expressions_select_single_collectives(folder: Path) -> None:
    run = read_run(folder, "named")
    places = Counter((each.op_name, each.key.side.value) for each in run.collectives)
    names = ("Default/group-0/AllReduce-op1", BUCKET)
    every = STEPS * WORLD
    assert places == {(name, side): every for name in names for side in ("input", "output")}


def test_plan_of_everything_has_no_tensors_of_collectives(folder: Path) -> None:
    run = read_run(folder, "everything")
    assert rankdump.open(run.tree).tensors()
    assert not run.collectives


def test_record_has_the_name_of_its_event(folder: Path) -> None:
    """In every iteration a collective has the same name, in the order and in the tree.

    In its second iteration DistributedDataParallel broadcasts the order of its buckets.
    """
    run = read_run(folder, "selected")
    calls = [e for e in read_order(run.tree).entries(graph=0) if e.kind.is_collective]
    named = {(rank, call.iteration, call.name) for call in calls for rank in call.ranks}
    assert {(e.key.rank, e.key.iteration, e.op_name) for e in run.collectives} <= named
    by_iteration = [[c.name for c in calls if c.iteration == step] for step in range(STEPS)]
    assert by_iteration[0] == by_iteration[2]
    assert len(set(by_iteration[0])) == len(by_iteration[0]) == 13
    others = [[name for name in names if "Broadcast" not in name] for names in by_iteration]
    assert others[0] == others[1]
    assert len(by_iteration[1]) == 15
    sequences = [call.sequence for call in calls]
    assert len(set(sequences)) == len(sequences)
