"""Whole jobs under `rankdump run` and plain: one rank and two, graph mode and PyNative mode."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankdump
from rankdump import reader

from .conftest import JOBS, clean_environment, run_to_its_end

JOB = "train_step_cell.py"
STEP = "Default/network-TrainOneStepCell/TrainOneStepCell-op0"
FC1 = "Default/network-Net/fc1-Dense/Dense-op0"

Job = Callable[..., str]


def config(folder: Path, *, e2e: dict[str, Any] | None = None, **changes: Any) -> Path:
    common = {
        "dump_mode": 0,
        "path": str(folder / "tree"),
        "net_name": "Net",
        "iteration": "all",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    body = {
        "common_dump_settings": common | changes,
        "e2e_dump_settings": {"enable": True, "trans_flag": True} | (e2e or {}),
    }
    path = folder / "data_dump.json"
    path.write_text(json.dumps(body))
    return path


def numbers_in(printed: str) -> list[str]:
    """Return the lines that say what a job computed."""
    return sorted(re.findall(r"^rank \d+ (?:step|state) .*$", printed, re.MULTILINE))


def files_of(tree: Path, *, native: bool) -> list[str]:
    """Return the tensors that MindSpore, or rankdump, wrote: MindSpore names the element type."""
    found = [path.name for path in tree.rglob("*.npy*")]
    return [name for name in found if (".DefaultFormat.npy" not in name) == native]


def _run(folder: Path, **changes: Any) -> tuple[object, ...]:
    return ("rankdump", "run", "--config", config(folder, **changes), "--")


@pytest.mark.parametrize("loop", [(), ("--model",)])
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_run_dumps_one_iteration_in_the_middle(
    job: Job, tmp_path: Path, mode: str, loop: tuple[str, ...]
) -> None:
    """Law: a job computes the same, whichever iterations are dumped."""
    alone = job(JOB, mode, *loop)
    dumped = job(JOB, mode, *loop, through=_run(tmp_path, iteration="2"))
    assert numbers_in(alone) == numbers_in(dumped)
    assert len(numbers_in(alone)) == 4 + 1
    dump = rankdump.open(tmp_path / "tree")
    assert set(dump.iterations) == {2}
    names = set(dump.operators)
    assert {"fc1.weight", "fc2.bias"} <= names
    assert (STEP in names, FC1 in names) == (mode == "graph", mode == "pynative")
    assert dumped.count("cells and operators inside it are not") == (mode == "graph")


@pytest.mark.parametrize("whose", ["rankdump", "mindspore"])
def test_dump_mode_2_keeps_marked_cells(job: Job, tmp_path: Path, whose: str) -> None:
    printed = job(JOB, "pynative", "--mark", whose, through=_run(tmp_path, dump_mode=2))
    assert "nothing was dumped" not in printed
    assert set(rankdump.open(tmp_path / "tree").operators) == {
        FC1,
        f"Gradients/{FC1}",
        "fc1.weight",
        "fc1.bias",
        "Gradients/fc1.weight",
        "Gradients/fc1.bias",
    }


def test_arguments_are_beside_the_tensors(job: Job, tmp_path: Path) -> None:
    job(JOB, "pynative", through=_run(tmp_path, e2e={"save_kernel_args": True}, iteration="1"))
    (file,) = (tmp_path / "tree").rglob("Dense.Default_network-Net_fc1-Dense_Dense-op0.json")
    found = json.loads(file.read_text())
    assert (found["in_channels"], found["matmul.transpose_b"]) == ("4", "True")


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_only_mindspore_dumps_with_its_own_variable(job: Job, tmp_path: Path, mode: str) -> None:
    """Law: if MindSpore reads the configuration itself, only it writes, and rankdump warns once.

    There is an agent that would take the tensors: that of `rankdump run`.
    """
    tree, file = tmp_path / "tree", config(tmp_path)
    native = ("env", "-u", "RANKDUMP_CONFIG", f"MINDSPORE_DUMP_CONFIG={file}")
    printed = job(JOB, mode, through=("rankdump", "run", "--config", file, "--", *native))
    assert printed.count(f"MindSpore reads MINDSPORE_DUMP_CONFIG itself and dumps to {tree}") == 1
    assert files_of(tree, native=True)
    assert not files_of(tree, native=False)


def test_only_rankdump_dumps_under_rankdump_run(job: Job, tmp_path: Path) -> None:
    """Law: `rankdump run` hides the configuration from MindSpore, whichever variable names it."""
    tree, file = tmp_path / "tree", config(tmp_path)
    native = {"MINDSPORE_DUMP_CONFIG": str(file)}
    for through in (("rankdump", "run", "--"), ("rankdump", "run", "--config", file, "--")):
        printed = job(JOB, "graph", environ=native, through=through)
        assert (
            printed.count("MINDSPORE_DUMP_CONFIG is removed from the environment of the command")
            == 1
        )
        assert files_of(tree, native=False)
        assert not files_of(tree, native=True)


def test_both_dumps_are_written_if_both_are_configured(job: Job, tmp_path: Path) -> None:
    """As the warning of graph mode advises, MindSpore's kernels are in a separate folder."""
    own = tmp_path / "own"
    own.mkdir()
    through = _run(own, iteration="1")
    (tmp_path / "native").mkdir()
    native = {"MINDSPORE_DUMP_CONFIG": str(config(tmp_path / "native", iteration="1"))}
    job(JOB, "graph", environ=native, through=through)
    assert files_of(own / "tree", native=False)
    assert not files_of(own / "tree", native=True)
    assert any(name.startswith("MatMul.") for name in files_of(tmp_path / "native", native=True))


def test_native_dump_is_imported_as_the_warning_advises(job: Job, tmp_path: Path) -> None:
    native = {"MINDSPORE_DUMP_CONFIG": str(config(tmp_path, iteration="1"))}
    job(JOB, "graph", environ=native)
    taken = ["ingest", tmp_path / "tree", "--into", tmp_path / "taken"]
    words = [str(word) for word in ("rankdump", *taken, "--follow", "--until-idle", "1")]
    subprocess.run(words, env=clean_environment(), check=True, capture_output=True)
    names = set(rankdump.open(tmp_path / "taken").operators)
    assert any("fc1-Dense" in name and "MatMul" in name for name in names)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _two_ranks(folder: Path, mode: str, *, through: tuple[object, ...] = ()) -> str:
    """Train on two ranks that msrun starts, and return what they computed."""
    logs = folder / "logs"
    port = f"--master_port={_free_port()}"
    words = ("--worker_num=2", "--local_worker_num=2", port, f"--log_dir={logs}", "--join=True")
    command = [*through, "msrun", *words, JOBS / JOB, mode, "--ranks"]
    run_to_its_end([str(word) for word in command], folder=folder)
    return "".join((logs / f"worker_{rank}.log").read_text() for rank in (0, 1))


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_two_ranks_under_msrun_are_dumped(tmp_path: Path, mode: str) -> None:
    """Data-parallel training: both ranks are in one tree, and results stay the same."""
    alone, dumped = tmp_path / "alone", tmp_path / "dumped"
    alone.mkdir()
    dumped.mkdir()
    before = numbers_in(_two_ranks(alone, mode))
    after = numbers_in(_two_ranks(dumped, mode, through=_run(dumped, iteration="1-2")))
    assert before == after
    assert len(after) == 2 * (4 + 1)
    dump = rankdump.open(dumped / "tree")
    found = {(entry.key.rank, entry.key.iteration) for entry in dump.tensors()}
    assert found == {(rank, iteration) for rank in (0, 1) for iteration in (1, 2)}
    assert (STEP if mode == "graph" else FC1) in set(dump.operators)
    assert not any(row.dropped for row in reader.status(dumped / "tree").iterations)
