"""Run cards of real jobs: ranks that share weights agree, and each changed cause is named first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import run_in_process
from support.data_dumps import write_data_dump

import rankdump
from rankdump._analysis.compare.card_findings import compare_ranks

JOB = Path(__file__).with_name("card_job.py")
SCENARIOS = ("base", "batch", "weight", "seed", "rate", "drift")
RUN_S = 500
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, run by one job with two ranks."""
    folder = tmp_path_factory.mktemp("cards")
    config = write_data_dump(folder, folder / "unused", devices=range(2))
    command = [sys.executable, "-m", "rankdump", "run", "--config", str(config), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(JOB), "2", str(folder), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_ranks_of_data_parallelism_have_equal_weights_and_batches_of_their_own(folder):
    dump = rankdump.open(folder / "base" / "tree")
    first, second = (dump.where(rank=rank, iteration=0).cards[0].card for rank in (0, 1))
    assert len(first.parameters) == 4
    assert first.parameters == second.parameters
    assert first.models == second.models
    assert first.versions == second.versions
    assert first.digests["batch.0"] != second.digests["batch.0"]
    assert [each.text for each in compare_ranks(dump.found_cards)] == [
        "torch.initial_seed differs between ranks: 3 on rank 0, 4 on rank 1"
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("batch", ["the batches differ from iteration 1 on: batch.0 (rank 0-1)"]),
        ("weight", ["the weights differ before iteration 0: 1 of 4 parameters (2.weight)"]),
        (
            "seed",
            [
                "the weights differ before iteration 0: 4 of 4 parameters "
                "(0.weight, 0.bias, 2.weight and 1 more)",
                "the states of random generators differ from iteration 0 on: random.cpu (rank 0-1)",
                "torch.initial_seed 4 against 3 (rank 0)",
                "torch.initial_seed 5 against 4 (rank 1)",
            ],
        ),
        ("rate", ["the learning rates differ from iteration 0 on: group 0 0.2 against 0.1"]),
    ],
)
def test_changed_cause_leads_the_comparison(folder, name, expected):
    trees = [str(folder / each / "tree") for each in (name, "base")]
    done = run_in_process("diff", *trees)
    lines = done.stdout.splitlines()
    assert lines[0] == "before the first operator:"
    found = [line.strip() for line in lines[1 : lines.index("")]]
    assert [text[: len(start)] for text, start in zip(found, expected, strict=False)] == expected
    # Other weights follow in later iterations, where their turn is.
    assert all("weights differ before iteration" in each for each in found[len(expected) :])


def test_rank_that_drifts_is_named(folder):
    done = run_in_process("card", str(folder / "drift" / "tree"))
    assert done.stdout.splitlines()[:2] == [
        "differs between ranks:",
        "  the weights differ between ranks before iteration 0: 1 of 4 parameters "
        "(0.bias; rank 0-1)",
    ]
