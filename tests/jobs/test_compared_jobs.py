"""What a person reads about real jobs: FSDP2 against one rank, a NaN on one rank, a GAN."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import run_in_process
from support.data_dumps import write_data_dump

import rankdump
from rankdump._analysis.compare.report import ComparisonReport, TensorVerdict
from rankdump._analysis.compare.report_summary import find_tensor_kind
from rankdump._core.manifest import Manifest

JOB = Path(__file__).with_name("compared_job.py")
NAMES = ("sharded", "whole", "spoilt", "gan")
RUN_S = 500
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.torch,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The trees of all jobs, by their names."""
    folder = tmp_path_factory.mktemp("compared")
    for name in NAMES:
        write_data_dump(folder, folder / name, name=f"{name}.json")
    # Each job has a configuration of its own, and all of them one agent.
    command = [sys.executable, "-m", "rankdump", "run", "--config", folder / f"{NAMES[0]}.json"]
    command += ["--", sys.executable, JOB, folder, *NAMES]
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def sharded(folder) -> Path:
    return folder / "sharded"


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    return folder / "whole"


@pytest.fixture(scope="module")
def spoilt(folder) -> Path:
    """FSDP2; rank 1 has a NaN in one operator of iteration 1."""
    return folder / "spoilt"


@pytest.fixture(scope="module")
def gan(folder) -> Path:
    return folder / "gan"


def check_weights(report: ComparisonReport, sharded: Path) -> None:
    """Digests of shards add up to those of the whole model, in the run cards."""
    subjects = [each.subject for each in report.card_findings if each.is_difference]
    assert {"parameters", "models"}.isdisjoint(subjects)
    parts = [each.card.parameters for each in rankdump.open(sharded).cards if each.iteration == 0]
    assert len(parts) == 2
    assert all(text.count(" ") == 2 for own in parts for text in own.values())
    (model,) = rankdump.open(sharded).cards[0].card.models
    assert model.parameters == len(set().union(*parts))


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_model_pairs_with_the_whole_one(sharded, whole, rank):
    """Every call has a partner, and a shard equals its part although batches differ in size."""
    report = rankdump.compare(sharded, whole, rank_a=rank, rank_b=0)
    check_weights(report, sharded)
    assert all(row.name_a and row.name_b for row in report.rows)
    verdicts: dict[str, set[TensorVerdict]] = {}
    for row in report.rows:
        verdicts.setdefault(find_tensor_kind(row), set()).add(row.outcome.verdict)
    agree = {TensorVerdict.SAME, TensorVerdict.NORMAL}
    assert verdicts["parameters"] <= agree
    assert verdicts["gradients"] <= agree
    assert verdicts["buffers"] == {TensorVerdict.SAME}
    assert TensorVerdict.SHAPE in verdicts["activations"]


def test_tree_with_the_names_of_sharded_classes_pairs_as_well(sharded, whole, tmp_path):
    """Earlier versions wrote the name of the class that fully_shard makes."""
    earlier = tmp_path / "earlier"
    shutil.copytree(sharded, earlier)
    for path in earlier.glob("rank_*/.dump_metadata/manifest/*.json"):
        path.chmod(0o644)
        manifest = Manifest.from_json(path.read_bytes())
        records = tuple(
            record._replace(
                op_name=re.sub(r"(-|/)(Net|Block)(?=[-/])", r"\1FSDP\2", record.op_name),
                op_type=re.sub(r"^(Net|Block)$", r"FSDP\1", record.op_type),
            )
            for record in manifest.records
        )
        path.write_bytes(replace(manifest, records=records).to_json())
    report = rankdump.compare(earlier, whole, rank=0)
    names = {(row.name_a, row.name_b) for row in report.rows}
    assert ("Default/network-FSDPNet/FSDPNet-op0", "Default/network-Net/Net-op0") in names
    assert all(a and b for a, b in names)
    assert {row.rule for row in report.rows} == {"exact"}


def test_diff_has_a_line_for_each_kind(sharded, whole):
    done = run_in_process("diff", sharded, whole, "--by-rank")
    assert done.returncode == 1
    kinds = [line.split("  ")[0] for line in done.stdout.splitlines() if " pairs: " in line]
    assert kinds == ["parameters", "buffers", "gradients", "activations", "activation gradients"]
    (activations,) = (line for line in done.stdout.splitlines() if line.startswith("activations"))
    assert "first extent 2 in a and 4 in b, as of other batch sizes" in activations
    assert "input.1 (labels)" in done.stdout
    assert "output.0 (loss)" in done.stdout


def test_stats_names_the_first_cause_of_a_nan(spoilt):
    """The rank, the operator, the iteration and the line; what it spoilt comes after."""
    done = run_in_process("stats", spoilt, "--nonfinite")
    lines = done.stdout.splitlines()
    assert lines[0] == "NaN or infinity starts at layers.1.up/WideLinear-op0"
    assert lines[1] == "  rank 1, iteration 1, forward"
    assert lines[2].startswith("  its inputs are finite, and output.0 holds NaN or infinity")
    number = next(
        at for at, line in enumerate(JOB.read_text().splitlines(), 1) if "self.up(x)" in line
    )
    assert lines[3].strip().startswith(f"{JOB}:{number}  ")
    rows = [line for line in lines if re.match(r" +[01] +[01] .* (in|out)put [0-9]", line)]
    assert len(rows) == 20
    assert any(line.endswith("more tensors not finite: --limit 0 lists all") for line in lines)


def test_diff_begins_with_the_nan(spoilt, sharded):
    """On side b, with its own rank, also where ranks are compared crosswise; after the batches,
    which such ranks do not share.
    """
    done = run_in_process("diff", sharded, spoilt, "--rank-a", "0", "--rank-b", "1")
    lines = done.stdout.splitlines()
    assert lines[1].startswith("  the batches differ from iteration 0 on: batch.0, batch.labels")
    assert lines[3] == "NaN or infinity in b starts at layers.1.up/WideLinear-op0"
    assert lines[4] == "  rank 1, iteration 1, forward"


def test_listings_tell_the_models_of_a_gan_apart(gan):
    listed = run_in_process("ls", gan, "--limit", "0").stdout
    headings = {line for line in listed.splitlines() if line.startswith("rank 0, iteration 0")}
    assert headings == {
        "rank 0, iteration 0, net Net, graph 0, model Generator",
        "rank 0, iteration 0, net Net, graph 1, model Discriminator",
    }
    ordered = run_in_process("order", gan, "--iteration", "0").stdout
    for name in ("Generator.0/Linear-op0", "Discriminator.0/Linear-op0", "Generator-op0"):
        assert f" {name} " in ordered
    assert "Gradients/Discriminator.2/Linear-op0" in ordered
