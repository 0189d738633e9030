"""Runs jobs with the real frameworks in separate processes, plain and dumped."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rankdump
from rankdump import reader

JOBS = Path(__file__).parent / "jobs"
TIMEOUT_S = 900
"""For a test with all jobs that it runs: ends one that hangs, and none on a busy machine."""

Journal = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test here the time that it takes to import the frameworks under load."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass
class FrameworkRun:
    """What a job did, by its own journals and by its dump."""

    printed: str
    journals: tuple[Journal, ...]
    """By rank."""
    tree: Path | None = None

    @property
    def dump(self) -> reader.Dump:
        """The dump of the job."""
        assert self.tree is not None
        return rankdump.open(self.tree)


class FrameworkJobs:
    """Runs the jobs of this folder in a folder of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    def run_plain(self, name: str, *words: object, ranks: int = 0, **about: Any) -> FrameworkRun:
        """Run a job without a configuration; `ranks` above 0 go through torchrun.

        With `starts_ranks` the framework starts them itself.
        """
        return self._run((), name, words, ranks, **about, tree=None)

    def run_dumped(self, name: str, *words: object, ranks: int = 0, **about: Any) -> FrameworkRun:
        """Run a job under `rankdump run`, with everything selected."""
        config, tree = self._folder / "data_dump.json", self._folder / f"tree-{self._runs}"
        config.write_text(json.dumps(make_configuration()))
        through = ("rankdump", "run", "--config", config, "--output", tree, "--")
        return self._run(through, name, words, ranks, **about, tree=tree)

    def _run(
        self,
        through: tuple[object, ...],
        name: str,
        words: tuple[object, ...],
        ranks: int,
        *,
        tree: Path | None,
        starts_ranks: bool = False,
    ) -> FrameworkRun:
        out = self._folder / f"run-{self._runs}"
        out.mkdir()
        self._runs += 1
        torchrun = ("torchrun", "--standalone", "--nproc-per-node", ranks)
        python = torchrun if ranks and not starts_ranks else (sys.executable,)
        command = (*through, *python, JOBS / name, out, *words)
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self._folder,
            env=make_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        journals = [json.loads(path.read_text()) for path in sorted(out.glob("journal-*.json"))]
        assert len(journals) == max(1, ranks), done.stdout[-6000:]
        return FrameworkRun(done.stdout, tuple(journals), tree)


def make_environment() -> dict[str, str]:
    """Return the environment of a job: no configuration, and nothing is downloaded."""
    found = {name: text for name, text in os.environ.items() if not name.startswith("RANKDUMP_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return {**found, **own, "PATH": path, "RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0"}


def make_configuration() -> dict[str, Any]:
    """Return a `data_dump.json` that selects everything."""
    common = {
        "dump_mode": 0,
        "path": "/nowhere/unless/overridden",
        "net_name": "Net",
        "iteration": "all",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    e2e = {"enable": True, "trans_flag": True}
    return {"common_dump_settings": common, "e2e_dump_settings": e2e}


def read_parameter_digests(run: FrameworkRun, rank: int, *, prefix: str = "") -> Journal:
    """Return the digests of gradients and parameters in a dump, in the form of a journal.

    `prefix` stands before the model's own names in those of the dump.
    """
    steps = run.journals[rank]["steps"]
    gradients: list[dict[str, str]] = [{} for _ in range(steps)]
    parameters: list[dict[str, str]] = [{} for _ in range(steps)]
    for entry in run.dump.tensors():
        name = entry.record.op_name if entry.record is not None else ""
        if entry.key.rank != rank or entry.key.op_type != "Parameter":
            continue
        array = reader.load(entry)
        found = gradients if name.startswith("Gradients/") else parameters
        plain = name.removeprefix("Gradients/").removeprefix(prefix)
        step = found[entry.key.iteration]
        assert plain not in step, f"{name} is in the dump twice"
        step[plain] = hashlib.sha256(array.tobytes()).hexdigest()
    return {"gradients": gradients, "parameters": parameters}


def list_calls(run: FrameworkRun, operator: str, *, rank: int = 0) -> dict[int, list[str]]:
    """Return the forward calls of a module by iteration: `net-Net/Net` has `Net-op0`, ..."""
    found: dict[int, set[str]] = {}
    for entry in run.dump.tensors():
        name = entry.record.op_name if entry.record is not None else ""
        if entry.key.rank == rank and name.startswith("Default/") and f"{operator}-op" in name:
            found.setdefault(entry.key.iteration, set()).add(name.rpartition("/")[2])
    return {step: sorted(names) for step, names in sorted(found.items())}


def find_microbatches(run: FrameworkRun, *, rank: int = 0) -> dict[int, set[int | None]]:
    """Return the micro-batches of the forward calls by iteration, without evaluations."""
    found: dict[int, set[int | None]] = {}
    for entry in run.dump.tensors():
        record = entry.record
        if record is None or entry.key.rank != rank or record.phase:
            continue
        if record.op_name.startswith("Default/"):
            found.setdefault(entry.key.iteration, set()).add(record.microbatch)
    return found


@pytest.fixture
def jobs(tmp_path: Path) -> FrameworkJobs:
    return FrameworkJobs(tmp_path)
