"""Whole jobs that dump the calls of torch's API, with an embedded agent."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankdump._core.daemon_endpoint import DaemonFolder

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "troubleshooter"
JOB = Path(__file__).parent / "jobs" / "api_calls.py"
LISTED = ["NN_Conv2d_1", "Torch_matmul_0", "Tensor___add___4"]
RANGE = ["Functional_max_pool2d_0", "Functional_relu_0"]

RUNS: dict[str, dict[str, Any]] = {
    # Files of troubleshooter 1.0.17.
    "1.0.17-all": {},
    "1.0.17-statistics": {"dump_type": "statistics"},
    "1.0.17-list": {"mode": "list", "scope": LISTED},
    "1.0.17-range": {"mode": "range", "scope": RANGE},
    "1.0.17-api_list": {"mode": "api_list", "scope": ["relu", "softmax", "Linear"]},
    "1.0.18-all": {},
    "npy": {"dump_type": "npy"},
    "stack": {"dump_type": "stack"},
}


def started(runs: list[dict[str, Any]], folder: Path, **environ: str) -> subprocess.Popen[str]:
    """Start the job; its agent has its files in that folder."""
    return subprocess.Popen(
        [sys.executable, JOB, json.dumps(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **environ},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=500)
    return process.returncode, err


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree of each run; one process makes all of them, because importing torch
    takes long.
    """
    root = tmp_path_factory.mktemp("t")
    runs = [
        {
            "init": {
                "output_path": str(root / name),
                "retain_backward": True,
                "compare_statedict": name == "1.0.17-all",
                "release": "1.0.18" if name == "1.0.18-all" else "1.0.17",
            },
            "start": start,
        }
        for name, start in RUNS.items()
    ]
    code, err = ended(started(runs, tmp_path_factory.mktemp("r")))
    assert code == 0, err
    return root


def lines(tree: Path, rank: str = "rank0") -> list[list[Any]]:
    """Return the lines of a rank's info file."""
    (info,) = (tree / rank).glob("torch_api_dump_info.*")
    return [json.loads(line) for line in info.read_text().splitlines()]


def stacks(tree: Path) -> dict[str, list[str]]:
    return json.loads((tree / "rank0" / "torch_api_dump_stack.json").read_text())


def files(tree: Path) -> set[str]:
    return {path.name for path in (tree / "rank0" / "torch_api_dump").glob("*")}


def functions(stack: list[str]) -> list[str]:
    """Return the functions of a call stack; lines of frames differ between scripts."""
    found = [re.search(r", in ([^,]+), \n", line) for line in stack]
    return [match[1] for match in found if match is not None]


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in RUNS if "-" in name])
def test_dump_equals_troubleshooters(trees: Path, name: str):
    """Equal are names, order, types, shapes, files, stacks by function; statistics and elements to
    1e-5.
    """
    golden, ours = GOLDEN / name, trees / name
    if not golden.is_dir():
        pytest.skip("the golden dumps are not beside this clone")
    theirs, mine = lines(golden), lines(ours)
    assert [line[0] for line in mine] == [line[0] for line in theirs]
    assert [(line[3:5], len(line)) for line in mine] == [(li[3:5], len(li)) for li in theirs]
    for mine_, theirs_ in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(mine_[5], theirs_[5], atol=1e-5)
    assert files(ours) == files(golden)
    for file in files(golden):
        mine_, theirs_ = (np.load(t / "rank0" / "torch_api_dump" / file) for t in (ours, golden))
        np.testing.assert_allclose(mine_, theirs_, atol=1e-5)
    # The tool gives several modules one key.
    assert _calls(ours) == _calls(golden)


def _calls(tree: Path) -> list[tuple[str, int]]:
    calls = {key: stack for key, stack in stacks(tree).items() if not key.startswith("LAYER")}
    # Below the net's own frames stand those of the script.
    return [(key, functions(stack).count("forward")) for key, stack in calls.items()]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "count"), [("npy", 136), ("stack", 0)])
def test_dump_without_statistics_has_nan_in_every_line(trees: Path, name: str, count: int):
    """A dump of stacks alone has no tensor files."""
    tree = trees / name
    assert len(files(tree)) == count
    assert len(lines(tree)) == (count or 147)
    assert all(math.isnan(number) for line in lines(tree) for number in line[5])
    assert list(stacks(tree))[:2] == ["LAYER: stem forward", "torch.nn.Conv2d(0) forward"]


@pytest.mark.torch
def test_dump_has_steps_modes_and_state(trees: Path):
    """Steps are numbered, file modes permit the owner only, and the model's state is saved."""
    tree = trees / "1.0.17-all"
    steps = [line[1] for line in lines(tree)]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1}
    rank = tree / "rank0"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tree, rank, *rank.iterdir())}
    assert modes["rank0"] == modes["torch_api_dump"] == 0o700
    assert modes["pt_net.pth"] == 0o400
    assert {path.stat().st_mode & 0o777 for path in (rank / "torch_api_dump").iterdir()} == {0o400}


@pytest.mark.torch
@pytest.mark.parametrize(("how", "code"), [("interrupt", -2), ("kill", -9)])
def test_dead_script_keeps_its_dump(tmp_path: Path, socket_folder: Path, how: str, code: int):
    """The dump has the part of the unfinished step as well; the agent ends by itself."""
    init = {"output_path": str(tmp_path / "dump"), "retain_backward": True}
    process = started([{"init": init, "end": how}], socket_folder)
    assert ended(process)[0] == code
    folder = next(socket_folder.glob("rankdump*"), None)
    while folder is not None and DaemonFolder(folder).has_daemon:
        time.sleep(0.01)
    tree = tmp_path / "dump"
    assert [line[1] for line in lines(tree)].count(0) == 74
    names = {line[0] for line in lines(tree) if line[1] == 1}
    assert {"NN_Conv2d_3_forward_output", "Functional_log_softmax_1_forward_output"} <= names
    assert {f"{line[0]}.npy" for line in lines(tree)} == files(tree)


@pytest.mark.torch
def test_two_ranks_have_folders_of_their_own(tmp_path: Path, socket_folder: Path):
    """Both folders have the same calls; one agent merges their order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    runs = [{"init": {"output_path": str(tmp_path / "dump")}}]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [started(runs, socket_folder, RANK=str(rank), **job) for rank in (0, 1)]
    for rank in ranks:
        code, err = ended(rank)
        assert code == 0, err
    names = [[line[0] for line in lines(tmp_path / "dump", f"rank{rank}")] for rank in (0, 1)]
    assert names[0] == names[1] != []
    order = (tmp_path / "dump/global_execution_order/execution_order_graph_0.csv").read_text()
    (collective, *_) = [line for line in order.splitlines() if ",ALL_REDUCE," in line]
    assert collective.split(",")[5] == "0 1"
    assert list(socket_folder.glob("rankdump*")) == []
