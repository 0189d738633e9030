"""`rankdump stats`: statistics of a tree, and the first tensor that is not finite."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide

NAMES = [f"Default/network-Net/fc{number}-Linear/Linear-op0" for number in range(3)]


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def cells(out):
    return [line.split() for line in out.splitlines()]


@pytest.fixture
def grown(tree):
    """Two ranks, two iterations; rank 1 meets a NaN in iteration 0, rank 0 one iteration later."""
    for rank in (0, 1):
        for iteration in (0, 1):
            for at, name in enumerate(NAMES):
                values = np.array([1.5, -2.0, at], np.float32)
                if iteration + rank >= 1 and at == 1:
                    values[2] = np.nan
                if iteration == 1 and at == 2:
                    values[0] = np.inf
                tree.tensor(rank, iteration, name, values, tabled=at != 2)
            tree.complete(rank, iteration)
    return tree


def test_stats_prints_the_values_of_statistic_csv(tree, capsys):
    """What statistic.csv says, figure by figure; what it lacks is a dash."""
    tree.row(0, 3, NAMES[0], np.arange(1, 7, dtype=np.float32), side=TensorSide.INPUT)
    tree.complete(0, 3, world_size=1)
    code, out, _ = told(capsys, "stats", tree.root)
    where, titles, row, *_ = cells(out)
    assert code == 0
    assert " ".join(where) == "rank 0, iteration 3, net Net, graph 0"
    assert " ".join(titles) == "operator tensor dtype min max mean l2norm nan inf"
    assert " ".join(row) == "fc0/Linear-op0 input 0 float32 1 6 - 9.53939 - -"
    assert "statistics of 1 tensor: 1 from statistic.csv files" in out
    assert out.splitlines()[-1] == "all of them are finite"


def test_stats_names_its_sources(grown, capsys):
    """How many figures came from tables, and how many were computed."""
    code, out, _ = told(capsys, "stats", grown.root)
    assert code == 0
    assert (
        "statistics of 12 tensors: 8 from statistic.csv files, 4 computed from the tensors" in out
    )
    assert all(len(line) <= 100 for line in out.splitlines()[:-3])


def test_stats_nonfinite_names_the_first_in_execution_order(grown, capsys):
    """Only those; the first is the one of the lowest iteration, whichever rank had it."""
    code, out, _ = told(capsys, "stats", grown.root, "--nonfinite")
    assert code == 0
    lines = out.splitlines()
    assert lines[:3] == [
        "NaN or infinity may start at fc1/Linear-op0",
        "  rank 1, iteration 0, forward",
        "  output.0 holds NaN or infinity",
    ]
    assert lines[3].startswith("  not certain: no inputs were dumped")
    rows = [row for row in cells(out) if row[3:5] == ["output", "0"]]
    assert [(int(row[0]), int(row[1]), row[2]) for row in rows] == [
        (1, 0, "fc1/Linear-op0"),
        (0, 1, "fc1/Linear-op0"),
        (0, 1, "fc2/Linear-op0"),
        (1, 1, "fc1/Linear-op0"),
        (1, 1, "fc2/Linear-op0"),
    ]
    first = f"first non-finite: rank 1, iteration 0, output 0 of {NAMES[1]}"
    assert f"5 tensors not finite; {first}" in out


def test_stats_limit_does_not_hide_the_first_nonfinite(grown, capsys):
    """What is not shown is counted all the same."""
    _, out, _ = told(capsys, "stats", grown.root, "--nonfinite", "--limit", "1")
    assert sum("output 0" in line for line in out.splitlines()) == 2
    assert "5 tensors not finite; first non-finite: rank 1, iteration 0" in out
    assert "... 4 more tensors not finite: --limit 0 lists all" in out
    _, out, _ = told(capsys, "stats", grown.root, "--limit", "1")
    assert "finite" not in out
    assert "statistics of 1 tensor:" in out
    assert "... and more" in out


def test_stats_names_the_operator_that_turned_finite_inputs_into_nan(tree, capsys):
    """Its consequences come after it, in the order in which the ranks ran them."""
    for rank in (0, 1):
        values = np.ones(4, np.float32)
        for at, name in enumerate(NAMES):
            tree.tensor(rank, 2, name, values, side=TensorSide.INPUT)
            values = values * np.float32(np.nan if rank and at == 1 else 2)
            tree.tensor(rank, 2, name, values)
        tree.complete(rank, 2)
    code, out, _ = told(capsys, "stats", tree.root, "--nonfinite", "--limit", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[:4] == [
        "NaN or infinity starts at fc1/Linear-op0",
        "  rank 1, iteration 2, forward",
        "  its inputs are finite, and output.0 holds NaN or infinity",
        "",
    ]
    assert [row[2:5] for row in cells(out)[5:7]] == [
        ["fc1/Linear-op0", "output", "0"],
        ["fc2/Linear-op0", "input", "0"],
    ]
    assert lines[7] == "... 1 more tensor not finite: --limit 0 lists all"
    (suspect,) = json.loads(told(capsys, "stats", tree.root, "--nonfinite", "--json")[1])[
        "first_cause"
    ]["suspects"]
    assert (suspect["rank"], suspect["op_name"]) == (1, NAMES[1])
    _, out, _ = told(capsys, "stats", tree.root, "--nonfinite", "--rank", "0")
    assert "starts at" not in out
    assert out.splitlines()[-1] == "all of them are finite"


@pytest.mark.parametrize(
    ("by", "field", "values"),
    [
        ("max", "max", ["nan"] * 3 + ["inf"] * 2 + [2.0] * 2 + [1.5] * 5),
        ("min", "min", ["nan"] * 3 + [-2.0] * 9),
        ("nan", "nan_count", [0] * 4 + [None] * 8),
        ("order", "iteration", [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3),
    ],
)
def test_stats_sorts_extremes_first(grown, capsys, by, field, values):
    """The most extreme first, NaN before all, what has no figure last; ties as they ran."""
    _, out, _ = told(capsys, "stats", grown.root, "--json", "--sort", by)
    assert [row[field] for row in json.loads(out)["tensors"]] == values


def test_stats_sorted_table_has_rank_and_iteration(grown, capsys):
    """One table with rank and iteration in columns; what was cut is counted in the totals."""
    _, out, _ = told(capsys, "stats", grown.root, "--sort", "l2norm", "--limit", "1")
    titles, row, *_ = cells(out)
    assert titles[:3] == ["rank", "iteration", "operator"]
    assert row[:3] == ["0", "1", "fc1/Linear-op0"]
    assert "statistics of 12 tensors" in out
    assert "5 tensors not finite" in out


def test_stats_prints_json(grown, capsys):
    """Every field, NaN as a word, nothing cut."""
    _, out, _ = told(capsys, "stats", grown.root, "--nonfinite", "--json")
    body = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (body["tensor_count"], body["nonfinite_count"], body["undecided_count"]) == (12, 5, 0)
    assert len(body["tensors"]) == 5
    assert (body["first_nonfinite"]["rank"], body["first_nonfinite"]["iteration"]) == (1, 0)
    tensor = body["tensors"][1]
    assert (tensor["op_name"], tensor["source"]) == (NAMES[2], "tensor")
    assert (tensor["max"], tensor["inf_count"], tensor["finite"]) == ("inf", 1, False)
    assert (grown.root / tensor["path"]).is_file()


def test_stats_counts_undecided_rows(tree, capsys):
    """Rows of digests alone are neither finite nor not."""
    tree.items = ("md5",)
    tree.row(0, 0, NAMES[0], np.ones(2, np.float32))
    tree.complete(0, 0, world_size=1)
    code, out, _ = told(capsys, "stats", tree.root, "--nonfinite")
    assert code == 0
    assert "1 tensor may not be finite: the table has no column that decides it" in out
    assert "all of them" not in out


def test_stats_fails_with_damage(grown, capsys):
    """A damaged tensor is named at the end, after the figures of all others."""
    path = grown.tensor(0, 0, "Default/x-X/X-op0", np.ones(1))
    path.write_bytes(b"junk")
    code, out, err = told(capsys, "stats", grown.root)
    assert code == 1
    assert str(path) in err
    assert "13 tensors" in out


def test_stats_explains_an_empty_result(grown, tmp_path, capsys):
    """A filter that left nothing names what there is; no tree is exit code 1."""
    code, out, _ = told(capsys, "stats", grown.root, "--op", "nix")
    assert code == 0
    assert "no tensor matches; the tree has rank 0-1" in out
    (tmp_path / "empty").mkdir()
    code, out, err = told(capsys, "stats", tmp_path / "empty")
    assert (code, out, "not a dump tree" in err) == (1, "", True)


def test_stats_without_rows_prints_no_blank_line(grown, capsys):
    """What is said begins with a sentence where nothing is listed."""
    _, out, _ = told(capsys, "stats", grown.root, "--op", "nix")
    assert out.startswith("no tensor matches")


def test_tree_without_tensors_is_said_to_have_none(tmp_path, capsys):
    (tmp_path / "rank_0").mkdir()
    assert told(capsys, "stats", tmp_path) == (0, f"{tmp_path}: no tensors\n", "")
