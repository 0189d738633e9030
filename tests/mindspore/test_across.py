"""One network in torch and in MindSpore, with the same weights: dumped, and compared.

Law: all calls are paired although their names differ, and agree within tolerance; in a network with
one layer's weight disturbed by 0.001, that layer comes first.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

import rankdump
from rankdump._analysis.compare.report import ComparisonReport, TensorVerdict
from rankdump.migrator import api_dump_compare

from .conftest import JOBS, run_job

CONFIG = """{
  "common_dump_settings": {
    "dump_mode": 0, "path": "/tmp/unused", "net_name": "Net", "iteration": "all",
    "saved_data": "tensor", "input_output": 0, "kernels": [], "support_device": [0]
  },
  "e2e_dump_settings": {"enable": true, "trans_flag": true}
}"""
PAIRED = [
    ("NN_Conv2d_0", "NN_Conv2d_0"),
    ("Functional_relu_0", "Functional_relu_0"),
    ("Tensor_reshape_0", "Tensor_reshape_0"),
    ("NN_Linear_0", "NN_Dense_0"),
    ("Functional_relu_1", "Functional_relu_1"),
    ("NN_Linear_1", "NN_Dense_1"),
    ("Functional_log_softmax_0", "Functional_log_softmax_0"),
]
Dumped = Callable[..., Path]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    folder = tmp_path_factory.mktemp("across")
    (folder / "data_dump.json").write_text(CONFIG)
    made: dict[tuple[str, ...], Path] = {}

    def dump(program: str, *options: str) -> Path:
        """Run a program once, and return its tree; how its process ended does not count."""
        known = (program, *options)
        if known not in made:
            tree = folder / f"tree-{len(made)}"
            config = ("--config", folder / "data_dump.json", "--output", tree)
            through = ("rankdump", "run", *config, "--") if "--cells" in options else ()
            run_job(program, tree, *options, folder=folder, through=through)
            made[known] = tree
        return made[known]

    return dump


@pytest.fixture(scope="module")
def alike(dumped: Dumped) -> ComparisonReport:
    return rankdump.compare(dumped("train_torch.py"), dumped("train_mindspore.py"))


def _api(name: str) -> str:
    return name.removesuffix("_forward")


def line_of(program: str, text: str) -> int:
    lines = (JOBS / program).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_calls_of_both_frameworks_are_all_paired_and_agree(alike: ComparisonReport) -> None:
    assert alike.agrees, alike.notes
    assert not alike.origins
    assert {row.outcome.verdict for row in alike.rows} <= {TensorVerdict.SAME, TensorVerdict.NORMAL}


def test_calls_of_both_frameworks_are_paired_across_their_names(alike: ComparisonReport) -> None:
    named = [(row.name_a, row.name_b) for row in alike.rows if row.iteration == 0]
    pairs = list(dict.fromkeys((_api(a), _api(b)) for a, b in named if a.endswith("_forward")))
    assert [pair for pair in pairs if not pair[0].startswith("LAYER")][: len(PAIRED)] == PAIRED


def test_gradients_of_both_steps_are_compared(alike: ComparisonReport) -> None:
    backward = [row for row in alike.rows if row.name_a.endswith("_backward")]
    assert {row.iteration for row in backward} == {0, 1}
    assert "NN_Conv2d_1_backward" in {row.name_b for row in backward}


def test_comparison_by_troubleshooter_agrees(
    dumped: Dumped, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_dump_compare(
        str(dumped("train_torch.py")), str(dumped("train_mindspore.py")), str(tmp_path)
    )
    for step in (0, 1):
        with (tmp_path / f"ts_api_mapping_{step}.csv").open() as file:
            header, *mapping = csv.reader(line for line in file if line.strip())
        assert header == ["ORIGIN NET (pytorch)", "TARGET NET (mindspore)"]
        assert all(origin and target for origin, target in mapping)
        for direction in ("forward", "backward"):
            with (tmp_path / f"ts_api_{direction}_compare_{step}.csv").open() as file:
                rows = list(csv.DictReader(line for line in file if line.strip()))
            assert rows
            assert {row["result of allclose"] for row in rows} == {"True"}
    assert "NN_Dense_0" in capsys.readouterr().out


def test_disturbed_weight_is_found_at_its_place(dumped: Dumped) -> None:
    disturbed = dumped("train_mindspore.py", "--disturbed", "fc1.weight")
    report = rankdump.compare(dumped("train_torch.py"), disturbed)
    (origin,) = report.origins
    (suspect,) = origin.suspects
    assert origin.certain
    assert (suspect.name_a, suspect.name_b) == ("NN_Linear_0_forward", "NN_Dense_0_forward")
    assert (suspect.rank, suspect.iteration, suspect.backward) == (0, 0, False)
    assert suspect.source[-1].line == line_of("train_torch.py", "F.relu(self.fc1(x))")


def test_model_is_dumped_cell_by_cell(dumped: Dumped) -> None:
    dump = rankdump.open(dumped("train_mindspore.py", "--cells"))
    names = set(dump.operators)
    assert "Default/network-Net/fc1-Dense/Dense-op0" in names
    assert "Gradients/Default/network-Net/conv-Conv2d/Conv2d-op0" in names
    assert {"fc1.weight", "Gradients/fc1.weight"} <= names


def test_modules_and_cells_are_compared(dumped: Dumped) -> None:
    report = rankdump.compare(
        dumped("train_torch.py", "--cells"), dumped("train_mindspore.py", "--cells")
    )
    pairs = {(row.name_a, row.name_b): row.outcome.verdict for row in report.rows}
    linear = (
        "Default/network-Net/fc1-Linear/Linear-op0",
        "Default/network-Net/fc1-Dense/Dense-op0",
    )
    assert pairs[linear].agrees
    assert pairs["fc1.weight", "fc1.weight"].agrees
    assert not report.origins
