"""Comparison of two runs of a two-rank job: the report names where they begin to differ.

Of a network and the same network with the weight of one layer changed by 0.001, that layer comes
first on both ranks. A NaN that is inserted on one rank is named with rank, iteration and line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankdump
from rankdump._analysis.compare.report import ComparisonReport, DivergenceOrigin, TensorVerdict

LAUNCHER = Path(__file__).parents[1] / "support" / "rank_launcher.py"
JOB = Path(__file__).parent / "jobs" / "two_versions.py"
LAYER = "Default/network-Encoder/blocks-Sequential/2-Block/wide-Sequential/2-Linear/Linear-op0"
SPOILER = "Default/network-Encoder/blocks-Sequential/1-Block/spoiler-Spoiler/Spoiler-op0"
CONFIG = """{
  "common_dump_settings": {
    "dump_mode": 0, "path": "/tmp/unused", "net_name": "Encoder", "iteration": "all",
    "saved_data": "tensor", "input_output": 0, "kernels": [], "support_device": [0, 1]
  },
  "e2e_dump_settings": {"enable": true, "trans_flag": true}
}"""
pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tree of modules and one of calls for each version, all made by one job, which starts torch
    once.
    """
    folder = tmp_path_factory.mktemp("versions")
    config = folder / "data_dump.json"
    config.write_text(CONFIG)
    run = ["rankdump", "run", "--config", config, "--", sys.executable]
    ranks = [LAUNCHER, "2", JOB, folder]
    done = subprocess.run(
        [sys.executable, "-m", *run, *ranks],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def plain(folder) -> Path:
    return folder / "modules" / "plain"


@pytest.fixture(scope="module")
def disturbed(folder, plain) -> ComparisonReport:
    return rankdump.compare(plain, folder / "modules" / "disturbed")


@pytest.fixture(scope="module")
def spoilt(folder, plain) -> ComparisonReport:
    return rankdump.compare(plain, folder / "modules" / "nan")


def of_kind(origins: tuple[DivergenceOrigin, ...], kind: str) -> list[DivergenceOrigin]:
    return [origin for origin in origins if origin.kind == kind]


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(JOB.read_text().splitlines(), 1) if text in line)


def test_diff_finds_the_disturbed_layer(disturbed):
    (origin,) = disturbed.origins
    (suspect,) = origin.suspects
    assert origin.certain
    assert (suspect.name_a, suspect.name_b) == (LAYER, LAYER)
    assert (suspect.iteration, suspect.backward) == (0, False)
    assert "its inputs agree" in suspect.reason
    assert "blocks.2.wide.2.weight differs too" in suspect.reason
    assert suspect.source[-1].line == line_of("self.spoiler(self.wide(rows))")


def test_diff_names_the_layer_on_both_ranks(disturbed):
    found = [(o.certain, o.suspects[0].rank, o.suspects[0].name_a) for o in disturbed.rank_origins]
    assert found == [(True, 0, LAYER), (True, 1, LAYER)]


def test_calls_before_the_origin_agree_and_all_are_paired(disturbed):
    assert disturbed.notes == ()
    assert {row.rule for row in disturbed.rows} == {"exact"}
    at = disturbed.origins[0].suspects[0].position
    before = [row for row in disturbed.rows if row.iteration == 0 and row.position < at]
    outer = {"Encoder", "Sequential", "Block"}
    assert before
    assert all(row.outcome.verdict.agrees for row in before if row.op_type not in outer)


def test_diff_names_rank_iteration_and_line_of_a_nan(spoilt):
    (origin,) = of_kind(spoilt.origins, "nonfinite")
    (suspect,) = origin.suspects
    assert (origin.side, origin.certain) == ("b", True)
    assert (suspect.rank, suspect.iteration, suspect.name_b) == (1, 1, SPOILER)
    assert suspect.reason.startswith("its inputs are finite, and output.0 holds NaN or infinity")
    assert suspect.source[-1].line == line_of("self.spoiler(self.wide(rows))")
    (difference,) = of_kind(spoilt.origins, "difference")
    assert (difference.certain, difference.suspects[0].rank) == (True, 1)


def test_diff_finds_the_nan_received_by_the_other_rank(spoilt):
    """Rank 0 has the NaN in the gradients that the all-reduce returns."""
    other = [o.suspects[0] for o in spoilt.rank_origins if o.suspects[0].rank == 0]
    assert other
    assert all(suspect.op_type == "Parameter" and suspect.backward for suspect in other)
    assert all("it was received from rank 1" in suspect.reason for suspect in other)


def test_iteration_without_the_nan_agrees(folder, plain, spoilt):
    report = rankdump.compare(plain, spoilt.b, iteration=0)
    assert report.agrees
    assert {row.outcome.verdict for row in report.rows} == {TensorVerdict.SAME}


def test_two_ranks_differ_first_in_their_data(plain):
    """Two ranks of one run differ first in their input data, not in any operator."""
    report = rankdump.compare(plain, plain, rank_a=0, rank_b=1, iteration=0)
    (origin,) = report.origins
    assert origin.suspects[0].op_type == "Encoder"
    assert "outside what was dumped" in origin.suspects[0].reason


@pytest.fixture(scope="module")
def apis(folder) -> Path:
    return folder / "apis"


def test_diff_of_api_dumps_finds_the_disturbed_layer(apis):
    report = rankdump.compare(apis / "plain", apis / "disturbed")
    (origin,) = report.origins
    (suspect,) = origin.suspects
    assert (origin.certain, suspect.op_type, suspect.iteration) == (True, "NN_Linear", 0)
    assert "it is the layer blocks_2_wide_2" in suspect.reason
    assert suspect.source[-1].line == line_of("self.spoiler(self.wide(rows))")
    assert [o.suspects[0].name_a for o in report.rank_origins] == [suspect.name_a] * 2


def test_inserted_call_does_not_shift_the_pairing(apis):
    """On rank 1, `where` replaces a product in the second step."""
    report = rankdump.compare(apis / "plain", apis / "nan")
    alone = {row.op_type for row in report.rows if not row.rule}
    assert alone == {"Tensor___mul__", "Torch_where"}
    agreeing = [row for row in report.rows if row.rule and (row.rank, row.iteration) != (1, 1)]
    assert agreeing
    assert all(row.outcome.verdict.agrees for row in agreeing)
    (origin,) = of_kind(report.origins, "nonfinite")
    (suspect,) = origin.suspects
    assert (suspect.rank, suspect.iteration, suspect.op_type) == (1, 1, "Torch_where")
    assert suspect.source[-1].line == line_of("torch.where(")
