"""`rankdump plot`: files, exit codes, and one line for each error."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._cli.command_group import run_command_line

NAME = "Default/network-Net/fc-Linear/Linear-op0"


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line(["plot", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def root(tree: TreeBuilder) -> Path:
    for iteration in (0, 1):
        for rank in (0, 1):
            values = np.array([1 + rank, np.nan if rank and iteration else 2], np.float32)
            tree.tensor(rank, iteration, NAME, values, tabled=True)
            tree.complete(rank, iteration)
    return tree.root


@pytest.mark.parametrize("indexed", [False, True])
def test_lines_are_written(root, capsys, tmp_path, indexed):
    """Law: with a table and without one the file is the same."""
    if indexed:
        assert run_command_line(["index", str(root)]) == 0
        capsys.readouterr()
    target = tmp_path / "norm.svg"
    assert told(capsys, root, "--op", "*fc-Linear*", "--stat", "max", "-o", target) == (
        0,
        f"{target} written: max of fc/Linear-op0, output 0, 2 ranks\n1 value NaN\n",
        "",
    )
    picture = target.read_text()
    assert all(f">{text}<" in picture for text in ("rank 0", "rank 1", "NaN", "iteration", "max"))


def test_every_form_and_kind_is_written(root, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = ("--rank", "0", "--iteration", "0", "--kind", "histogram")
    assert told(capsys, root, *one, "-o", "bars.png")[:2] == (
        0,
        "bars.png written: elements of fc/Linear-op0, output 0, rank 0, iteration 0\n"
        "2 elements from 1 to 2\n",
    )
    assert Path("bars.png").read_bytes().startswith(b"\x89PNG")
    assert told(capsys, root, "--kind", "heatmap", "-o", "map.HTML")[0] == 0
    page = Path("map.HTML").read_text()
    assert f"<pre>rankdump plot {root} --kind heatmap -o map.HTML</pre>" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bars.png", "map.HTML", "tree"]


def test_lines_of_several_jobs_are_told_apart(root, capsys, tmp_path):
    other = TreeBuilder(root, job="other", clock_us=1_700_000_001_000_000)
    other.tensor(0, 0, NAME, np.ones(2, np.float32), tabled=True)
    other.complete(0, 0, session="session-of-other")
    assert run_command_line(["index", str(root)]) == 0
    target = tmp_path / "x.svg"
    assert told(capsys, root, "--rank", "0", "-o", target)[0] == 0
    assert ">job job<" in target.read_text()
    assert ">job other<" in target.read_text()
    assert told(capsys, root, "--job", "other", "-o", target)[0] == 0
    assert "job" not in target.read_text()
    code, _, err = told(capsys, root, "--job", "none", "-o", target)
    assert code == 1
    assert "the tree has no dump of job 'none'" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "x.pdf"], "x.pdf: the form .pdf is unknown; allowed: .svg, .png, .html"),
        (["-o", "x"], "x: the form without a suffix is unknown"),
        (["-o", "missing/x.svg"], "missing/x.svg: its folder does not exist"),
        (["-o", "old.svg", "--op", "no*"], "no tensor matches; the tree has rank 0-1, iteration"),
        (["-o", "old.svg", "--stat", "norm"], "--stat: 'norm' is not allowed; allowed: max, min,"),
        (["-o", "old.svg", "--stat", "avg"], "none has avg; recorded: max, min, l2norm"),
        (["-o", "old.svg", "--kind", "histogram"], "a histogram shows one tensor, and 4 match"),
        (["-o", "old.svg", "--kind", "heatmap", "--over", "rank"], "--over is for --kind lines"),
        (["-o", "old.svg", "--kind", "histogram", "--stat", "max"], "--stat is not for"),
        ([], "Missing option '-o'"),
    ],
)
def test_chart_that_cannot_be_made_is_one_line(
    root, capsys, tmp_path, monkeypatch, arguments, words
):
    """Law: nothing was done, and a file that was there is as it was."""
    monkeypatch.chdir(tmp_path)
    Path("old.svg").write_text("old")
    code, out, err = told(capsys, root, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert Path("old.svg").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.svg", "tree"]


@pytest.mark.parametrize("indexed", [False, True])
def test_attempt_that_is_not_there_is_one_line(root, capsys, tmp_path, indexed):
    if indexed:
        assert run_command_line(["index", str(root)]) == 0
        capsys.readouterr()
    code, _, err = told(capsys, root, "--attempt", "7", "-o", tmp_path / "x.svg")
    assert (code, err) == (1, f"rankdump: {root}: the tree has no attempt 7; known: 0\n")


def test_disk_that_takes_no_file_is_one_line(root, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("rankdump._cli.plot.os.access", lambda path, mode: False)
    target = tmp_path / "x.svg"
    code, _, err = told(capsys, root, "-o", target)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{target}: its folder cannot be written to" in err
    monkeypatch.undo()

    def fail(folder, name, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankdump._cli.plot.write_output", fail)
    code, _, err = told(capsys, root, "-o", target)
    assert (code, err) == (
        2, f"rankdump: {target}: cannot be written: No space left on device\n"
    )  # fmt: skip


def test_damaged_tensor_is_one_line(root, capsys, tmp_path):
    (path,) = (root / "rank_0").rglob("0/Linear*.npy.zst")
    path.write_bytes(b"no tensor")
    one = ("--rank", "0", "--iteration", "0", "--kind", "histogram")
    code, _, err = told(capsys, root, *one, "-o", tmp_path / "x.svg")
    assert (code, err.count("\n")) == (1, 1)
    assert path.name in err


def test_folder_that_is_no_tree_is_one_line(capsys, tmp_path):
    code, _, err = told(capsys, tmp_path, "-o", tmp_path / "x.svg")
    assert (code, err.count("\n")) == (1, 1)
    assert "not a dump tree" in err


def test_table_that_is_behind_is_noted(root, capsys, tmp_path, tree):
    assert run_command_line(["index", str(root)]) == 0
    tree.tensor(0, 2, NAME, np.ones(2, np.float32), tabled=True)
    tree.complete(0, 2)
    capsys.readouterr()
    code, _, err = told(capsys, root, "-o", tmp_path / "x.svg")
    assert (code, err) == (
        0, f"the table lacks 1 new or changed file: run rankdump index {root}\n"
    )  # fmt: skip


def test_missing_extra_is_named(root, capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "rankdump._analysis.plot.chart_picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = told(capsys, root, "-o", tmp_path / "x.svg")
    assert code == 2
    assert "install it with: pip install 'rankdump[plot]'" in err


@pytest.mark.parametrize("indexed", [False, True])
def test_damaged_manifest_is_named(root, capsys, tmp_path, indexed):
    """The chart shows the rest; the code is that of other commands."""
    if indexed:
        assert run_command_line(["index", str(root)]) == 0
        capsys.readouterr()
    manifest = sorted((root / "rank_1/.dump_metadata/manifest").iterdir())[0]
    manifest.write_text("{")
    target = tmp_path / "x.svg"
    code, out, err = told(capsys, root, "--op", "*fc-Linear*", "-o", target)
    assert code == 1
    assert out.startswith(f"{target} written: ")
    assert f"{manifest}: manifest cannot be read: " in err
    code, _, err = told(capsys, root, "--op", "*none*", "-o", tmp_path / "y.svg")
    assert code == 2
    assert f"{manifest}: manifest cannot be read: " in err
