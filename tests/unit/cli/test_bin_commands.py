"""Commands on trees of CANN, where members of bin files are tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.cann_trees import STARTED, CannTree, bin_parts, write

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpInput, Shape
from rankdump._cli.command_group import run_command_line

NAME = "Default/network-Net/fc-Dense/Add-op0"
VALUES = np.array([[1.0, -2.0, 0.0], [np.inf, 3.0, np.nan]], np.float32)
HALF = np.arange(4, dtype=np.float16)


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def tree(tmp_path: Path) -> CannTree:
    """A model on device 2, one operator, no manifest."""
    made = CannTree(tmp_path / "tree", device=2, packed=True)
    made.operator(3, NAME, {0: VALUES, 2: HALF}, {0: VALUES}, word="NCHW")
    return made


def test_ls_lists_members(tree, capsys):
    """With what the header says; a device stands where a rank would."""
    code, out, _ = told(capsys, "ls", tree.root, "--iteration", 3)
    assert code == 0
    assert "rank 2, iteration 3, net Net, graph 1" in out
    assert [line.split()[1:5] for line in out.splitlines() if "Add-op0" in line] == [
        ["input", "0", "float32", "(2,3)"],
        ["input", "2", "float16", "(4)"],
        ["output", "0", "float32", "(2,3)"],
    ]
    assert f"{tree.root}: 3 tensors of 1 device in 1 iteration" in out
    body = json.loads(told(capsys, "ls", tree.root, "--json")[1])
    assert body["ranks_are_devices"] is True
    first = body["tensors"][0]
    assert (first["member"], first["format"], first["op_name"]) == ("input.0", "NCHW", NAME)
    assert (first["codec"], first["dtype"], first["shape"]) == ("zstd", "float32", [2, 3])


def test_stats_finds_nonfinite_members(tree, capsys):
    """Computed from the payloads, one at a time."""
    code, out, _ = told(capsys, "stats", tree.root, "--nonfinite")
    assert code == 0
    assert "2 tensors not finite; first non-finite: rank 2, iteration 3, input 0" in out


@pytest.mark.parametrize("inside", [True, False])
def test_show_prints_all_tensors_of_a_file(tree, tmp_path, capsys, inside):
    """Or the one that is asked for; in a tree or not."""
    (path,) = (tree.root / STARTED).rglob("*.zst")
    if not inside:
        path = path.rename(tmp_path / "operator.zst")
    code, out, _ = told(capsys, "show", path)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("tensor:")] == [
        "input.0",
        "input.2",
        "output.0",
    ]
    assert out.count("format:       NCHW") == 3
    assert f"op name:      {NAME}" in out
    code, out, _ = told(capsys, "show", path, "--tensor", "input.2")
    assert "first values: 0.0, 1.0, 2.0, 3.0" in out
    assert "input.0" not in out
    body = json.loads(told(capsys, "show", path, "--json")[1])
    assert [tensor["member"] for tensor in body["tensors"]] == ["input.0", "input.2", "output.0"]
    one = json.loads(told(capsys, "show", path, "--json", "--tensor", "input.2")[1])
    assert (one["format"], one["original_shape"], one["first_values"]) == (
        *("NCHW", [4]),
        [0.0, 1.0, 2.0, 3.0],
    )
    assert ("iteration" in one) is inside


def test_show_names_the_tensors_of_a_file(tree, tmp_path, capsys):
    """A tensor that is not in the file is bad usage; an npy file has no names."""
    (path,) = (tree.root / STARTED).rglob("*.zst")
    code, _, err = told(capsys, "show", path, "--tensor", "input.1")
    assert (code, err.count("\n")) == (2, 1)
    assert "tensors: input.0, input.2, output.0" in err
    np.save(tmp_path / "own.npy", HALF)
    code, _, err = told(capsys, "show", tmp_path / "own.npy", "--tensor", "input.1")
    assert code == 2
    assert "the file is a single tensor" in err


def test_show_explains_missing_values(tmp_path, capsys):
    """Strings are no failure, a damaged payload is; the others are shown."""
    text = OpInput(13, 2, Shape((2,)), size=5)
    path = write(tmp_path / "text", [serialize_bin_head(DumpData(input=(text,))), b"hello"])
    code, out, _ = told(capsys, "show", path)
    assert code == 0
    assert "no values:" in out
    assert "STRING" in out
    damaged = write(tmp_path / "damaged.zst", bin_parts("a", 1, {0: VALUES, 1: HALF}, {}))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, out, _ = told(capsys, "show", damaged)
    assert code == 1
    assert ("first values: 1.0" in out, "no values:" in out) == (True, True)
    body = json.loads(told(capsys, "show", damaged, "--json")[1])
    assert "trouble" in body["tensors"][1]


def test_ls_names_a_damaged_bin_file_and_lists_the_others(tree, capsys):
    """Exit code 1, one line."""
    path = tree.operator(4, NAME, {0: VALUES}, {})
    path.write_bytes(b"junk")
    code, out, err = told(capsys, "ls", tree.root)
    assert code == 1
    assert path.name in err
    assert "3 tensors" in out


def test_stats_shows_tables_of_operators(tmp_path, capsys):
    """Figures without files."""
    tree = CannTree(tmp_path)
    header = "Input/Output,Index,Data Size,Data Type,Format,Shape,Count,Max Value,Min Value"
    tree.table(1, NAME, [header, "Output,0,24,DT_FLOAT16,ND,3x4,12,2.5,-1"])
    code, out, _ = told(capsys, "stats", tmp_path)
    assert code == 0
    assert "statistics of 1 tensor: 1 from tables" in out
    assert "float16" in out
    code, out, _ = told(capsys, "ls", tmp_path)
    assert "statistics in 1 table, 118 B on disk: see rankdump stats" in out
