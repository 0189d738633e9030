"""A real job whose overhead is limited: its order is whole, and what is less is marked as less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump.errors import CorruptedError
from rankdump.reader import read_order, status

LAUNCHER = Path(__file__).parents[1] / "support" / "rank_launcher.py"
RANKDUMP = [sys.executable, "-m", "rankdump"]
STEPS = 15
JOB = f"""
import torch, torch.distributed as dist, rankdump
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
session = rankdump.attach(model)
for step in range({STEPS}):
    session.step(step)
    model(torch.ones(2, 64) * (dist.get_rank() + step)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
session.close()
dist.destroy_process_group()
"""


def run(folder: Path, share: float) -> Path:
    """Run the job under `rankdump run`; return its tree."""
    folder.mkdir()
    script, config, tree = folder / "job.py", folder / "data_dump.json", folder / "dump"
    script.write_text(JOB)
    common = {
        "dump_mode": 0,
        "path": str(tree),
        "net_name": "Net",
        "iteration": "all",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    body = {
        "common_dump_settings": common,
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
        "rankdump": {"max_step_overhead": share},
    }
    config.write_text(json.dumps(body))
    launcher = [sys.executable, str(LAUNCHER), "2"]
    done = subprocess.run(
        [*RANKDUMP, "run", "--config", str(config), "--", *launcher, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stderr.txt").write_text(done.stderr)
    return tree


@pytest.fixture(scope="module")
def governed(tmp_path_factory) -> Path:
    """A tree whose ranks may take nothing of a step, so that they go through every level."""
    return run(tmp_path_factory.mktemp("governed") / "job", 1e-9)


def program(tree: Path) -> dict[int, list[tuple[object, ...]]]:
    """What each rank executed, in its order."""
    found: dict[int, list[tuple[int, tuple[object, ...]]]] = {}
    for entry in read_order(tree).entries():
        for rank, position in zip(entry.ranks, entry.rank_positions, strict=True):
            event = (entry.iteration, entry.name, entry.kind, entry.group, entry.sequence)
            found.setdefault(rank, []).append((position, event))
    return {rank: [event for _, event in sorted(events)] for rank, events in found.items()}


def test_order_of_a_governed_job_is_that_of_a_full_one(governed, tmp_path):
    """Law: the governor never changes what the coordinator can order."""
    full = program(run(tmp_path / "full", 0))
    assert program(governed) == full
    assert {rank: len({event[0] for event in events}) for rank, events in full.items()} == {
        0: STEPS,
        1: STEPS,
    }


def test_every_tensor_is_kept_degraded_or_dropped_with_its_reason(governed):
    found = status(governed).iterations
    assert len(found) == 2 * STEPS
    assert all(each.is_balanced for each in found)
    expected = {each.expected for each in found}
    assert len(expected) == 1
    for each in found:
        assert sum(each.degraded_by.values()) == each.degraded
    degraded = sum((Counter(each.degraded_by) for each in found), Counter[str]())
    dropped = sum((Counter(each.dropped) for each in found), Counter[str]())
    assert degraded.keys() == dropped.keys() == {"step_overhead"}
    said = (governed.parent / "stderr.txt").read_text()
    assert f"{degraded.total() // 2:,} tensors degraded (step_overhead)" in said
    assert said.count("instead of all that the plan selects it now keeps") == 2


def test_reader_never_takes_the_first_elements_for_the_tensor(governed):
    """The shape, the manifest and every command say that it is a part."""
    dump = rankdump.open(governed)
    parts = [each for each in dump.tensors(rank=0, iteration=2) if dump.load(each).size == 1024]
    wholes = [each for each in dump.tensors(rank=0, iteration=1) if dump.load(each).size > 1024]
    assert len(parts) == len(wholes) >= 1, "of the weight at least"
    for part in parts:
        assert dump.load(part).shape == (1024,)
        with pytest.raises(CorruptedError, match=r"only the first 1024 elements of \[64, 64\]"):
            dump.load(part, full=True)
    for whole in wholes:
        assert np.array_equal(dump.load(whole, full=True), dump.load(whole))
    lines = subprocess.run(
        [*RANKDUMP, "ls", str(governed), "--iteration", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    assert "only the first 1024 elements of [64, 64]" in lines
    assert "tensors degraded (step_overhead)" in lines
