"""Jobs with a compiled model whose operators are recorded inside the compiled region."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.data_dumps import write_data_dump

import rankdump
from rankdump.reader import status

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

DUMPED = (1, 3)
RUN_S = 500
ROOT = "Default/network-Sequential"
MODULES = ("0-Linear/Linear-op0", "1-GELU/GELU-op0", "2-LayerNorm/LayerNorm-op0")


def run_job(folder: Path, kind: str, backend: str = "aot_eager") -> tuple[dict[str, Any], str]:
    """Run the job under `rankdump run`; return what it printed, and its messages."""
    config = write_data_dump(folder, folder / "tree", devices=[0], iteration="1|3")
    job = [sys.executable, Path(__file__).with_name("compiled_job.py"), backend, kind, folder]
    command = [sys.executable, "-m", "rankdump", "run", "--config", config, "--", *job]
    done = subprocess.run(
        job if kind == "plain" else command,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    return json.loads(line), done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the job prints without a dump."""
    return run_job(tmp_path_factory.mktemp("plain"), "plain")[0]


def list_names(tree: Path) -> set[str]:
    return {entry.op_name for entry in rankdump.open(tree).tensors()}


def test_job_records_the_operators_of_its_compiled_region(plain, tmp_path):
    """Same losses as without a dump, one compilation, and a complete tree with gradients."""
    inside, said = run_job(tmp_path, "inside")
    assert inside == plain
    assert plain["compilations"] == 1
    assert "inside a region" not in said
    names = list_names(tmp_path / "tree")
    for module in MODULES:
        assert {f"{ROOT}/{module}", f"Gradients/{ROOT}/{module}"} <= names
    found = status(tmp_path / "tree").iterations
    assert [each.iteration for each in found] == list(DUMPED)
    assert all(each.complete and each.is_balanced and not each.dropped for each in found)


def test_job_without_the_option_records_the_boundary_alone(plain, tmp_path):
    boundary, said = run_job(tmp_path, "boundary")
    assert boundary["losses"] == plain["losses"]
    assert "attach the model with inside_compiled=True" in said
    names = list_names(tmp_path / "tree")
    assert f"{ROOT}/Sequential-op0" in names
    assert not any(f"{ROOT}/{module}" in names for module in MODULES)


def test_job_with_ddp_runs_and_names_what_torch_does_not_allow(plain, tmp_path):
    """torch fails to compile operators with effects where DDP splits the graph."""
    found, said = run_job(tmp_path, "ddp")
    assert found["losses"] == plain["losses"]
    assert "below DistributedDataParallel, unless torch._dynamo.config.optimize_ddp is" in said
    assert f"{ROOT}/Sequential-op0" in list_names(tmp_path / "tree")
