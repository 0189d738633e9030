"""Comparison of API dumps against troubleshooter's own; run by `make peers`.

TROUBLESHOOTER_PYTHON names the Python of a virtual environment that has it, with torch.

Left out of what is compared, with its reason: where three or more calls in a row have no partner,
the tool lists the tensors of the inner ones in the order in which the file system names the files;
here they are in that of the info file. So lines are compared in order for statistics, and as a set
for elements.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rankdump._compat.api_comparison import api_dump_compare

PEER = Path(__file__).with_name("run_troubleshooter.py")
GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "troubleshooter"


@dataclass(frozen=True)
class NetRun:
    """One run of a net that follows from its seed."""

    out: str
    seed: int = 0
    changed: int = 0
    """How often steps are inserted or left out."""
    noise: float = 0.0
    """Added to the weight of one layer."""
    iterations: int = 2
    start: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters of `api_dump_start`."""
    backward: bool = True


def run(verb: str, told: object, module: str = "troubleshooter") -> None:
    """Run the tool, or ours.

    Which of several equal keys the tool takes hangs on Python's seed of hashes. The code that it
    brings for protobuf is older than protobuf's own parser takes.
    """
    fixed = {"PYTHONHASHSEED": "0", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    python = sys.executable if module == "rankdump" else os.environ["TROUBLESHOOTER_PYTHON"]
    subprocess.run(
        [python, "-W", "ignore", str(PEER), module, verb, json.dumps(told)],
        check=True,
        capture_output=True,
        env={**os.environ, **fixed},
    )


def compared(tmp_path: Path, pairs: list[tuple[Path, Path, dict[str, Any]]]) -> list[list[Path]]:
    """Compare with both; return the folders of theirs and ours."""
    folders = [
        [tmp_path / f"{whose}{at}" for whose in ("theirs", "ours")] for at in range(len(pairs))
    ]
    told = [
        [str(a), str(b), str(theirs), parameters]
        for (a, b, parameters), (theirs, _) in zip(pairs, folders, strict=True)
    ]
    run("compare", told)
    for (a, b, parameters), (_, ours) in zip(pairs, folders, strict=True):
        api_dump_compare(a, b, ours, **parameters)
    return folders


def files(folder: Path, *, ordered: bool) -> dict[str, list[str]]:
    texts = {path.name: path.read_text().split("\n") for path in folder.glob("*")}
    return {name: lines if ordered else sorted(lines) for name, lines in texts.items()}


def has_elements(dump: Path) -> bool:
    return any((dump / "rank0" / "torch_api_dump").glob("*.npy"))


def check(tmp_path: Path, pairs: list[tuple[Path, Path, dict[str, Any]]]) -> None:
    """Both say the same of every pair."""
    for (a, b, _), (theirs, ours) in zip(pairs, compared(tmp_path, pairs), strict=True):
        ordered = not (has_elements(a) and has_elements(b))
        expected = files(theirs, ordered=ordered)
        assert expected
        assert files(ours, ordered=ordered) == expected


def test_comparison_of_golden_dumps_equals_troubleshooter(tmp_path):
    trees = ["1.0.17-list", "1.0.17-range", "1.0.17-api_list", "1.0.17-noise", "1.0.17-statistics"]
    pairs = [(GOLDEN / "1.0.17-all", GOLDEN / tree, {}) for tree in trees]
    pairs += [(GOLDEN / tree, GOLDEN / "1.0.17-all", {"ignore_unmatched": True}) for tree in trees]
    check(tmp_path, pairs)


@pytest.mark.parametrize("seed", range(4))
def test_comparison_with_inserted_calls_equals_troubleshooter(seed, tmp_path):
    figures = {"dump_type": "statistics"}
    dumps = {
        "a": NetRun("", seed),
        "b": NetRun("", seed, changed=3, noise=0.001),
        "forward": NetRun("", seed, changed=1, backward=False),
        "figures": NetRun("", seed, changed=5, start=figures),
    }
    for name, dump in dumps.items():
        run("dump", {**asdict(dump), "out": str(tmp_path / name)})
    parameters = {"rtol": 0.01, "atol": 0.001, "equal_nan": True}
    pairs = [
        (tmp_path / "a", tmp_path / "b", {}),
        (tmp_path / "b", tmp_path / "a", {"ignore_unmatched": True}),
        (tmp_path / "a", tmp_path / "a", parameters),
        (tmp_path / "a", tmp_path / "forward", parameters),
        (tmp_path / "b", tmp_path / "figures", {}),
        (tmp_path / "figures", tmp_path / "a", {}),
    ]
    check(tmp_path, pairs)


KINDS = {
    "all": {},
    "statistics": {"dump_type": "statistics"},
    "list": {"mode": "list", "scope": ["NN_Linear_0", "NN_Linear_4", "Functional_log_softmax_1"]},
    "api_list": {"mode": "api_list", "scope": ["linear", "soft"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_troubleshooter_finds_our_dump_identical_to_its_own(kind, tmp_path):
    """Names, order, steps and numbers; the real step and the manifests do not disturb it."""
    for seed in (1, 2):
        dump = NetRun("", seed, start=KINDS[kind])
        for module in ("troubleshooter", "rankdump"):
            run("dump", {**asdict(dump), "out": str(tmp_path / f"{module}{seed}")}, module)
    pairs = [(tmp_path / f"troubleshooter{n}", tmp_path / f"rankdump{n}", {}) for n in (1, 2)]
    for theirs, ours in compared(tmp_path, pairs):
        found = files(theirs, ordered=True)
        assert files(ours, ordered=True) == found
        for name, lines in found.items():
            rows = [row for row in csv.reader(lines) if row][1:]
            assert rows
            assert all(row[0] == row[1] for row in rows), name
            if "mapping" in name:
                continue
            if kind == "statistics":
                assert {row[-1] for row in rows} <= {"0.00000, 0.00000, 0.00000"}, name
            else:
                assert {(row[4], row[7]) for row in rows} == {("True", "0.00000, 0.00000")}, name


@pytest.mark.parametrize("start", [{}, {"dump_type": "statistics", "filter_data": False}])
def test_troubleshooter_reads_keyword_arguments_and_recomputed_calls(start, tmp_path):
    """Its reader wants numbers for places, and no more than two."""
    dumps = [tmp_path / name for name in ("a", "b")]
    for dump in dumps:
        run("words", {"out": str(dump), "start": start}, "rankdump")
    info = (dumps[0] / "rank0" / "torch_api_dump_info.pkl").read_text().splitlines()
    lines = {line[0]: line for line in map(json.loads, info)}
    places = ["output.0", "output.1.0", "output.1.1", "output.1.2"]
    assert {f"NN_Linear_1_forward_{place}" for place in places} <= set(lines)
    assert {f"Torch_add_0_forward_input.{n}" for n in (0, 1)} <= set(lines)
    assert ("Torch_add_0_forward_input.2" in lines) == (start != {})
    again = [name for name, line in lines.items() if line[2] == ["recompute"]]
    assert {name.partition("_forward_")[0] for name in again} >= {"NN_Linear_2", "Tensor_tanh_1"}
    # Ours knows the steps and what is recomputed, and finds other rows; here theirs have to be.
    (theirs, _) = compared(tmp_path, [(dumps[0], dumps[1], {})])[0]
    tables = [path.read_text().splitlines()[1:] for path in theirs.glob("*_compare_*")]
    rows = [row for table in tables for row in csv.reader(table) if row]
    assert {row[0] for row in rows} >= {f"NN_Linear_1_forward_{place}" for place in places}
    assert all(row[0] == row[1] for row in rows)
