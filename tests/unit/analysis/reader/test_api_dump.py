"""API dumps of troubleshooter and rankdump: order, steps, statistics, files, source lines."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump import reader
from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide
from rankdump.errors import CorruptedError

GOLDEN = Path(__file__).parents[5] / "shared" / "golden" / "troubleshooter"
TREES = {
    # tree: files, lines, steps, calls with a stack
    "1.0.17-all": (136, 136, 2, 51),
    "1.0.17-api_list": (24, 24, 2, 8),
    "1.0.17-extra-statistics": (0, 161, 2, 55),
    "1.0.17-list": (11, 11, 2, 3),
    "1.0.17-noise": (136, 136, 2, 51),
    "1.0.17-range": (18, 18, 1, 6),
    "1.0.17-statistics": (0, 147, 2, 51),
    "1.0.18-all": (136, 136, 2, 51),
}
NUMBERS = "[2.0, 1.0, 1.5]"


def golden(name: str) -> Path:
    path = GOLDEN / name
    if not path.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"no tree {path}")
    return path


def tree(root: Path, lines: list[tuple[str, int]], *, arrays: bool = True) -> Path:
    """Write a tree of these tensors and steps, without a manifest."""
    folder = root / "rank0" / "torch_api_dump"
    folder.mkdir(parents=True)
    text = [f'["{name}", {step}, [], "torch.float32", [2], {NUMBERS}]\n' for name, step in lines]
    (root / "rank0" / "torch_api_dump_info.pkl").write_text("".join(text))
    for name, step in lines if arrays else ():
        np.save(folder / f"{name}.npy", np.full(2, step, dtype=np.float32))
    return root


@pytest.mark.parametrize("name", TREES)
def test_tree_of_troubleshooter_is_read_in_order(name):
    """Every tensor in the order of the info file, its array as numpy has it, and its figures."""
    root = golden(name)
    dump = reader.open(root)
    (path,) = (root / "rank0").glob("*_info.*")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    files, count, steps, stacks = TREES[name]
    assert (len(dump.tensors()), len(dump.statistics())) == (files, count)
    assert dump.iterations == tuple(range(steps))
    assert dump.problems == ()
    assert reader.walk(root).foreign == 0
    rows = dump.statistics()
    assert [f"{row.op_name}_{row.key.argument}" for row in rows] == [line[0] for line in lines]
    assert [row.number("max") for row in rows] == [line[5][0] for line in lines]
    assert all(row.finite for row in rows)
    if files:
        assert [entry.path.name.removesuffix(".npy") for entry in dump.tensors()] == [
            line[0] for line in lines
        ]
        assert [entry.key for entry in dump.tensors()] == [row.key for row in rows]
    for entry in dump.tensors():
        expected = np.load(entry.path, allow_pickle=False)
        np.testing.assert_array_equal(dump.load(entry), expected)
        np.testing.assert_array_equal(dump.load(entry.key), expected)
        assert reader.locate(entry.path) == (entry,)
    assert len([name for name in dump.sources if name.endswith("_forward")]) == stacks
    assert all(frames[0].file.endswith("run_ts.py") for frames in dump.sources.values())


def test_call_of_troubleshooter_has_places_and_source_lines():
    """Sides, places and the line of the script; a backward came from where its forward did."""
    dump = reader.open(golden("1.0.17-all"))
    call = dump.tensors(operator="Tensor___add___0_forward")
    assert [(entry.key.side, entry.key.slot) for entry in call] == [
        (TensorSide.INPUT, 0),
        (TensorSide.INPUT, 1),
        (TensorSide.OUTPUT, 0),
    ]
    frame = dump.sources["Tensor___add___0_forward"][-1]
    assert (frame.line, frame.code) == (9, "return F.relu(x + y)")
    assert dump.sources["Tensor___add___0_backward"][-1] == frame
    assert dump.sources["LAYER_blocks_forward"]


def test_steps_of_our_info_file_are_used(tmp_path):
    """An evaluation between two backwards is no step of its own when steps are real."""
    names = ["Torch_a_0_forward", "Torch_a_0_backward", "Torch_a_1_forward", "Torch_a_2_forward"]
    steps = [4, 4, 4, 9]
    lines = [(f"{name}_input.0", step) for name, step in zip(names, steps, strict=True)]
    dump = rankdump.open(tree(tmp_path, lines))
    assert dump.iterations == (4, 9)
    assert [entry.op_name for entry in dump.tensors(iteration=4)] == names[:3]
    assert [float(dump.load(entry)[0]) for entry in dump.tensors()] == steps


def test_file_without_an_info_line_comes_last(tmp_path):
    """As a tool that died between the two leaves it; a torn line is named, not an error."""
    lines = [("Torch_a_0_forward_input.0", 1), ("Torch_a_0_backward_input", 1)]
    root = tree(tmp_path, lines)
    extra = root / "rank0/torch_api_dump/Torch_a_1_forward_input.0.npy"
    np.save(extra, np.zeros(2))
    info = root / "rank0/torch_api_dump_info.pkl"
    info.write_text(info.read_text() + '["Torch_a_1_f')
    dump = rankdump.open(root)
    assert [entry.op_name for entry in dump.tensors()] == [
        "Torch_a_0_forward",
        "Torch_a_0_backward",
        "Torch_a_1_forward",
    ]
    with pytest.raises(CorruptedError, match="its last line is incomplete"):
        dump.statistics()
    (root / "rank0/torch_api_dump_stack.json").write_text("{")
    with pytest.raises(CorruptedError, match="not a stack file"):
        _ = dump.sources


def test_info_lines_without_files_are_tensors(tmp_path):
    """Operators and iterations of a dump without files; NaN is known where others have numbers."""
    root = tree(tmp_path, [("Torch_a_0_forward_input.0", 1)], arrays=False)
    info = root / "rank0/torch_api_dump_info.pkl"
    nan = "[NaN, NaN, NaN]"
    info.write_text(
        info.read_text()
        + f'["Torch_b_0_forward_output.1.0", 1, [], "torch.float32", [2], {nan}]\n'
        + f'["Torch_c_0_forward_output", 1, [], "torch.bool", [2], {nan}]\n'
    )
    dump = rankdump.open(root)
    assert dump.operators == ("Torch_a_0_forward", "Torch_b_0_forward", "Torch_c_0_forward")
    assert [row.finite for row in dump.statistics()] == [True, False, None]
    surveyed = list(reader.Survey(reader.walk(root), reader.selected({})))
    assert [(row.key.argument, row.finite) for row in surveyed] == [
        ("input.0", True),
        ("output.1.0", False),
        ("output", None),
    ]


def test_info_file_is_not_unpickled(tmp_path):
    """What looks like a pickle is a line that is none."""
    root = tree(tmp_path, [("Torch_a_0_forward_input.0", 1)])
    (root / "rank0/torch_api_dump_info.pkl").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.\n")
    with pytest.raises(CorruptedError, match="not a line of an info file"):
        rankdump.open(root).statistics()


@pytest.mark.parametrize("command", ["ls", "stats", "show", "find-source"])
def test_commands_accept_an_api_dump(command, tmp_path, capsys, monkeypatch):
    """They take such a tree like any other."""
    root = shutil.copytree(golden("1.0.17-all"), tmp_path / "dump")
    relu = root / "rank0/torch_api_dump/Functional_relu_0_forward_input.0.npy"
    arguments = {
        "show": [str(relu)],
        "find-source": [str(root), "net.py:9"],
    }.get(command, [str(root), "--op", "Functional_relu_0*"])
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command_line([command, *arguments]) in (0, 1)
    assert "Functional_relu_0_forward" in capsys.readouterr().out
