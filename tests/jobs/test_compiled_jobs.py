"""Jobs with a compiled model whose operators are recorded inside the compiled region."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.data_dumps import write_data_dump

import rankdump
from rankdump.reader import status

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

DUMPED = (1, 3)
RUN_S = 500
KINDS = ("plain", "inside", "boundary", "ddp")
ROOT = "Default/network-Sequential"
MODULES = ("0-Linear/Linear-op0", "1-GELU/GELU-op0", "2-LayerNorm/LayerNorm-op0")


@dataclass(frozen=True)
class CompiledJob:
    """What a job printed as JSON, all that it said, and its tree."""

    found: dict[str, Any]
    said: str
    tree: Path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompiledJob]:
    """All jobs, by what of the model they record; that without a dump is `plain`."""
    folder = tmp_path_factory.mktemp("compiled")
    for kind in KINDS:
        own = folder / kind
        own.mkdir()
        write_data_dump(own, own / "tree", devices=[0], iteration="1|3")
    # Each job has a configuration of its own, and all of them one agent.
    config = folder / KINDS[0] / "data_dump.json"
    command = [sys.executable, "-m", "rankdump", "run", "--config", config, "--", sys.executable]
    command += [Path(__file__).with_name("compiled_job.py"), "aot_eager", folder, *KINDS]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    logs = {kind: (folder / kind / "log").read_text() for kind in KINDS}
    assert done.returncode == 0, (done.stderr, logs)
    return {kind: read_job(folder / kind / "tree", log) for kind, log in logs.items()}


def read_job(tree: Path, log: str) -> CompiledJob:
    (line,) = [line for line in log.splitlines() if line.startswith('{"losses"')]
    return CompiledJob(json.loads(line), log, tree)


def list_names(tree: Path) -> set[str]:
    return {entry.op_name for entry in rankdump.open(tree).tensors()}


def test_job_records_the_operators_of_its_compiled_region(jobs):
    """Same losses as without a dump, one compilation, and a complete tree with gradients."""
    plain, inside = jobs["plain"], jobs["inside"]
    assert inside.found == plain.found
    assert plain.found["compilations"] == 1
    assert "inside a region" not in inside.said
    names = list_names(inside.tree)
    for module in MODULES:
        assert {f"{ROOT}/{module}", f"Gradients/{ROOT}/{module}"} <= names
    found = status(inside.tree).iterations
    assert [each.iteration for each in found] == list(DUMPED)
    assert all(each.complete and each.is_balanced and not each.dropped for each in found)


def test_job_without_the_option_records_the_boundary_alone(jobs):
    boundary = jobs["boundary"]
    assert boundary.found["losses"] == jobs["plain"].found["losses"]
    assert "attach the model with inside_compiled=True" in boundary.said
    names = list_names(boundary.tree)
    assert f"{ROOT}/Sequential-op0" in names
    assert not any(f"{ROOT}/{module}" in names for module in MODULES)


def test_job_with_ddp_runs_and_names_what_torch_does_not_allow(jobs):
    """torch fails to compile operators with effects where DDP splits the graph."""
    job = jobs["ddp"]
    assert job.found["losses"] == jobs["plain"].found["losses"]
    assert "below DistributedDataParallel, unless torch._dynamo.config.optimize_ddp is" in job.said
    assert f"{ROOT}/Sequential-op0" in list_names(job.tree)
