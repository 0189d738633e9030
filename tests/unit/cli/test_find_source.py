"""`rankdump find-source`: from a line of the script to operators and files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankdump._cli.command_group import run_command_line

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
TEXT = f"""  %0(a) = Conv2d(%x)
      # Fullname with scope: ({CONV})
      # In file /job/train.py:40/    loss = net(x)/
      # In file /job/model.py:7/        return self.fc(self.conv1(x))/
  %1(b) = MakeTuple(%0)
      # Fullname with scope: (Default/MakeTuple-op0)
      # In file /job/train.py:40/    loss = net(x)/
"""


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def grown(tree):
    """One operator on two ranks in three iterations."""
    for rank in (0, 1):
        tree.graph(rank, TEXT)
        for iteration in (0, 1, 2):
            tree.tensor(rank, iteration, CONV, np.ones(2, np.float32))
            tree.complete(rank, iteration)
    return tree


def test_find_source_prints_operators_and_files_of_a_line(grown, capsys):
    """The line, each operator once for all ranks, and paths below the tree's root."""
    code, out, _ = told(capsys, "find-source", grown.root, "model.py:7")
    lines = [line.strip() for line in out.splitlines() if line]
    assert code == 0
    assert lines[0] == "/job/model.py:7  return self.fc(self.conv1(x))"
    assert lines[1].split() == ["Conv2d", CONV]
    assert lines[2] == "6 tensors: rank 0-1, iteration 0-2"
    assert all((grown.root / line).is_file() for line in lines[3:])
    assert len(lines) == 9


def test_find_source_limits_files(grown, capsys):
    """Six of an operator, or as many as were asked for; the rest is counted."""
    _, out, _ = told(capsys, "find-source", grown.root, "model.py:7", "--limit", "2")
    assert "... 4 more files" in out
    _, out, _ = told(capsys, "find-source", grown.root, "model.py:7", "--limit", "0", "--rank", "1")
    assert out.count("rank_1/") == 3
    assert "rank_0/" not in out


def test_find_source_names_operators_without_files(grown, capsys):
    """They came from the line as well; nothing of theirs was dumped."""
    _, out, _ = told(capsys, "find-source", grown.root, "loss = net(x)")
    assert "1 operator without a file: Default/MakeTuple-op0" in out


def test_find_source_states_a_match_of_another_number(grown, capsys):
    """A match by the scope alone is no silent one."""
    for rank in (0, 1):
        grown.graph(rank, TEXT.replace("Conv2d-op0", "Conv2d-op4"))
    _, out, _ = told(capsys, "find-source", grown.root, "model.py:7")
    assert f"other numbers in the names of the files: {CONV}" in out


def test_find_source_prints_json(grown, capsys):
    """A script gets every operator of every rank, with every file."""
    _, out, _ = told(capsys, "find-source", grown.root, "train.py:40", "--json")
    body = json.loads(out)
    assert body["operator_count"] == 4
    first = body["operators"][0]
    assert (first["op_name"], first["rank"], first["exact"]) == (CONV, 0, True)
    assert (first["file"], first["line"], first["code"]) == ("/job/train.py", 40, "loss = net(x)")
    assert len(first["tensors"]) == 3


def test_find_source_of_a_line_without_operators_names_the_files(grown, capsys):
    """Says which source files there are, and is no failure."""
    code, out, _ = told(capsys, "find-source", grown.root, "train.py:41")
    assert code == 0
    assert "no operator came from this line; the graphs name model.py, train.py" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--graph", "7"], "none of its 2 graphs"), (["--rank", "9"], "none of its 2 graphs")],
)
def test_find_source_without_a_matching_graph_is_an_error(grown, capsys, options, words):
    """Nothing to search in is an error in one line."""
    code, out, err = told(capsys, "find-source", grown.root, "x", *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err


def test_find_source_in_a_tree_without_graphs_is_an_error(tree, capsys):
    """The line says what was expected, and where."""
    tree.tensor(0, 0, CONV, np.ones(2, np.float32))
    code, _, err = told(capsys, "find-source", tree.root, "x")
    assert code == 1
    assert "expected rank_N/graphs/ms_output_trace_code_graph_M.ir" in err
