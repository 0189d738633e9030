"""Trees of profile `ms2.0` in MindSpore 2.0's own readers; run by `make peers`.

The readers are the C++ offline debugger (`mindspore.offline_debug`) and MindInsight's DumpAnalyzer,
in a virtual environment of their own; PEERS_PYTHON names its Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankdump.reader import walk

READER = Path(__file__).with_name("read_with_mindspore.py")
JOB = Path(__file__).with_name("residual_net.py")
RANKS = (0, 1)
CONFIG = {
    "common_dump_settings": {
        "dump_mode": 0,
        "path": "/nowhere/unless/overridden",
        "net_name": "Residual",
        "iteration": "0|2-3",
        "input_output": 0,
        "saved_data": "full",
        "kernels": [],
        "support_device": [0, 1],
    },
    "e2e_dump_settings": {"enable": True, "trans_flag": True},
    # The readers take no packed files, and need to read what an agent of another user wrote.
    "rankdump": {"profile": "ms2.0", "codec": "none"},
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A two-rank torch job, collected."""
    folder = tmp_path_factory.mktemp("peers")
    config = folder / "data_dump.json"
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "rankdump", "run", "--config", config, "--output"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(RANKS))]
    subprocess.run(
        [*map(str, command), str(folder / "tree"), "--", sys.executable, *ranks, str(JOB)],
        env={**os.environ, "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return folder / "tree"


def read(tree: Path) -> dict:
    """Return what MindSpore's programs find in a tree."""
    done = subprocess.run(
        [os.environ["PEERS_PYTHON"], str(READER), str(tree), "Residual"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0, done.stderr
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def found(tree: Path) -> dict:
    return read(tree)


def test_readers_find_every_rank_and_iteration(found):
    assert found["ranks"] == list(RANKS)
    assert found["iterations"] == [0, 2, 3]


def test_debugger_reads_every_tensor_unchanged(tree, found):
    """Bytes and shape, of every rank, by the operator's name in the graph."""
    assert found["debugger_different"] == []
    assert found["debugger_same"] == len(walk(tree).entries) > 100


def test_graph_has_every_operator_of_the_order(tree, found):
    for rank in RANKS:
        order = tree / f"rank_{rank}/execution_order/ms_execution_order_graph_0.csv"
        names = order.read_text().splitlines()[1:]
        # A collective is an event between operators; the modules' graph does not have it.
        operators = {name for name in names if not name.startswith("Default/group-")}
        assert len(operators) > 10
        assert operators <= set(found["nodes"][str(rank)])


def test_analyzer_reads_values_and_finds_large_ones(found):
    assert found["analyzer_values"] > 100
    watched = found["watched"]
    assert watched["expected"]
    assert watched["found"] == watched["expected"]


def test_debugger_does_not_find_a_renamed_tensor(tree, tmp_path):
    """The check can fail: the name in the graph decides what the debugger finds."""
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    chosen = min((copy / "rank_1/Residual/0/2").glob("Linear.*.output.0.*"))
    renamed = chosen.with_name(chosen.name.replace("Linear-op", "Linear-x", 1))
    chosen.parent.chmod(0o750)
    chosen.rename(renamed)
    # Read by its old name it is gone, and nothing in the graph has the new one.
    assert read(copy)["debugger_different"] == [str(renamed.relative_to(copy))]
