"""Dumps that msprobe makes are read as torch reads them; run by `make peers`.

MSPROBE_PYTHON names the Python of a virtual environment that has it, with torch.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump._analysis.replay import replay_calls
from rankdump.errors import UnsupportedError

PEER = Path(__file__).with_name("run_msprobe.py")


def dump(folder: Path, task: str, mode: str = "statistics") -> Path:
    """Have msprobe dump one step, and return the root of its dump."""
    python = os.environ["MSPROBE_PYTHON"]
    subprocess.run([python, str(PEER), str(folder), task, mode], check=True, capture_output=True)
    return folder / "dump"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with tensors."""
    return dump(tmp_path_factory.mktemp("probe") / "tensors", "tensor")


def test_every_tensor_is_read_as_torch_reads_it(tensors: Path):
    """No file is left out, and every element is the same."""
    found = rankdump.open(tensors)
    arrays = np.load(tensors.parent / "arrays.npz")
    assert found.problems == ()
    assert {entry.path.name for entry in found.tensors()} == set(arrays.files)
    for entry in found.tensors():
        assert np.array_equal(found.load(entry), arrays[entry.path.name], equal_nan=True)


def test_every_call_that_may_be_replayed_is_within_rounding(tensors: Path):
    """Arguments are complete: each call on the list can be made again."""
    found, done = rankdump.open(tensors), 0
    for name in dict.fromkeys(each.op_name for each in found.tensors(operator="*_forward")):
        with suppress(UnsupportedError):
            assert all(each.is_within for each in replay_calls(found, name)), name
            done += 1
    assert done >= 10


@pytest.mark.parametrize("mode", ["statistics", "md5", "xor"])
def test_dumps_without_tensors_compare_with_those_with_them(
    mode: str, tensors: Path, tmp_path: Path
):
    """The same program: nothing differs, whatever the mode keeps."""
    report = rankdump.compare(dump(tmp_path / mode, "statistics", mode), tensors, processes=1)
    verdicts = {row.outcome.verdict.value for row in report.rows}
    assert verdicts <= {"same", "normal", "unknown"}
    assert report.rows
