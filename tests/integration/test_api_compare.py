"""`api_dump_compare` on folders: dumps and tables of troubleshooter, and dumps of rankdump."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.api_dumps import ApiDumpLine, call, gradient, write_dump

from rankdump.migrator import api_dump_compare

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "troubleshooter"
PAIRS = {
    "compare-all-all": ("1.0.17-all", "1.0.17-all"),
    "compare-all-noise": ("1.0.17-all", "1.0.17-noise"),
    "compare-statistics-extra_statistics": ("1.0.17-statistics", "1.0.17-extra-statistics"),
}
NET = [*call("NN_Conv2d_0"), *call("Functional_relu_0"), gradient("NN_Conv2d_0")]


def golden(name: str) -> Path:
    path = GOLDEN / name
    if not path.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"no tree {path}")
    return path


def rows(path: Path) -> list[list[str]]:
    """Return the rows of a table below its titles."""
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row][1:]


def disturbed(lines: list[ApiDumpLine], name: str) -> list[ApiDumpLine]:
    return [replace(line, array=line.array + 1) if line.name == name else line for line in lines]


@pytest.mark.parametrize("name", PAIRS)
def test_tables_equal_troubleshooters_byte_for_byte(name, tmp_path):
    expected = {path.name: path.read_bytes() for path in golden(name).iterdir()}
    origin, target = PAIRS[name]
    api_dump_compare(golden(origin), golden(target), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


def test_dumps_of_two_releases_are_compared(tmp_path):
    """The same net: all elements are close, and 1.0.18 has no means by default."""
    api_dump_compare(golden("1.0.17-all"), golden("1.0.18-all"), tmp_path / "npy")
    for step in (0, 1):
        expected = (golden("compare-all-all") / f"ts_api_forward_compare_{step}.csv").read_bytes()
        assert (tmp_path / "npy" / f"ts_api_forward_compare_{step}.csv").read_bytes() == expected
    api_dump_compare(golden("1.0.17-statistics"), golden("1.0.18-all"), tmp_path / "figures")
    table = rows(tmp_path / "figures" / "ts_api_forward_compare_0.csv")
    assert {row[-1] for row in table} == {"0.00000, 0.00000, nan"}


def test_compressed_files_are_read_and_titles_printed(tmp_path, capsys):
    a = write_dump(tmp_path / "a", NET)
    b = write_dump(tmp_path / "b", disturbed(NET, "NN_Conv2d_0_forward_output"), codec="zstd")
    assert api_dump_compare(str(a), str(b)) is None
    said = capsys.readouterr().out
    assert "The APIs mapping results of the two frameworks (step 0)" in said
    assert "The forward comparison results (step 0)" in said
    assert "The backward comparison results (step 0)" in said
    assert "False               0.00%" in said
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_real_steps_are_paired_by_number(tmp_path, capsys):
    def steps(*numbers: int) -> list[ApiDumpLine]:
        """Return the lines of these steps, of two micro-batches each."""
        return [
            line
            for number in numbers
            for call_number in (2 * number, 2 * number + 1)
            for line in (
                *call(f"NN_Conv2d_{call_number}", (number + 1, 2), step=number),
                gradient(f"NN_Conv2d_{call_number}", (number + 1, 2), step=number),
            )
        ]

    a = write_dump(tmp_path / "a", steps(1, 2, 3), ours=True)
    b = write_dump(tmp_path / "b", steps(2, 3, 4), ours=True)
    api_dump_compare(a, b, tmp_path / "out")
    said = capsys.readouterr().out
    assert "steps that only one dump has are omitted: 1, 4" in said
    assert "step 0 compares step 2 of origin_path with step 2 of target_path" in said
    assert len(list((tmp_path / "out").iterdir())) == 6
    table = rows(tmp_path / "out" / "ts_api_forward_compare_0.csv")
    assert [row[0] for row in table][::2] == [f"NN_Conv2d_{n}_forward_input.0" for n in (4, 5)]
    assert {row[2] for row in table} == {"(3, 2)"}


def test_recomputed_calls_are_paired_only_with_recomputed_ones(tmp_path, capsys):
    plain = [*call("NN_Conv2d_0"), gradient("NN_Conv2d_0")]
    repeated = [*plain[:2], *call("NN_Conv2d_1", recomputed=True), plain[2]]
    a = write_dump(tmp_path / "a", plain, ours=True)
    b = write_dump(tmp_path / "b", repeated, ours=True)
    api_dump_compare(a, b, tmp_path / "one")
    assert "1 recomputed calls that only target_path has are omitted" in capsys.readouterr().out
    assert len(rows(tmp_path / "one" / "ts_api_forward_compare_0.csv")) == 2
    api_dump_compare(b, b, tmp_path / "both")
    assert rows(tmp_path / "both" / "ts_api_mapping_0.csv") == [
        ["NN_Conv2d_0", "NN_Conv2d_0"],
        ["NN_Conv2d_1", "NN_Conv2d_1"],
    ]


def test_every_common_rank_is_compared(tmp_path, capsys):
    for rank in (0, 1, 2):
        write_dump(tmp_path / "a", NET, rank=rank)
    for rank in (0, 1):
        write_dump(tmp_path / "b", NET, rank=rank)
    api_dump_compare(tmp_path / "a", tmp_path / "b", tmp_path / "out")
    said = capsys.readouterr().out
    assert "ranks that only one dump has are omitted: 2" in said
    assert "(step 0, rank 1)" in said
    names = {path.name for path in (tmp_path / "out").glob("ts_api_mapping*")}
    assert names == {"ts_api_mapping_0.csv", "ts_api_mapping_rank1_0.csv"}


def test_single_ranks_are_compared_regardless_of_their_numbers(tmp_path):
    a = write_dump(tmp_path / "a", NET, rank=0)
    b = write_dump(tmp_path / "b", NET, rank=3)
    api_dump_compare(a, b, tmp_path / "out")
    assert (tmp_path / "out" / "ts_api_mapping_0.csv").exists()
    write_dump(tmp_path / "b", NET, rank=4)
    with pytest.raises(ValueError, match="origin_path has 0, target_path has 3, 4"):
        api_dump_compare(a, b)


def test_framework_is_recognised_by_its_files(tmp_path):
    a = write_dump(tmp_path / "a", [*call("NN_Linear_0"), *call("Torch_sub_0", (4,))])
    lines = [*call("NN_Dense_0"), *call("Functional_subtract_0", (4,))]
    b = write_dump(tmp_path / "b", lines, framework="mindspore")
    api_dump_compare(a, b, tmp_path / "out")
    text = (tmp_path / "out" / "ts_api_mapping_0.csv").read_text()
    assert text.startswith('"ORIGIN NET (pytorch)","TARGET NET (mindspore)"\n')
    assert rows(tmp_path / "out" / "ts_api_mapping_0.csv") == [
        ["NN_Linear_0", "NN_Dense_0"],
        ["Torch_sub_0", "Functional_subtract_0"],
    ]


def test_statistics_or_calls_are_compared_without_elements(tmp_path, capsys):
    a = write_dump(tmp_path / "a", NET)
    b = write_dump(tmp_path / "b", NET, npy=False)
    api_dump_compare(a, b, tmp_path / "out")
    assert {row[-1] for row in rows(tmp_path / "out" / "ts_api_forward_compare_0.csv")} == {
        "0.00000, 0.00000, 0.00000"
    }
    c = write_dump(tmp_path / "c", NET, npy=False, figures=False)
    api_dump_compare(a, c, tmp_path / "out")
    assert "has no statistics either: only calls are paired" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ts_api_mapping_0.csv"]


def test_ignored_rows_are_left_out(tmp_path):
    a = write_dump(tmp_path / "a", NET)
    b = write_dump(tmp_path / "b", [*NET[:2], *call("Torch_sigmoid_0"), *NET[2:]])
    api_dump_compare(a, b, tmp_path / "out", ignore_unmatched=True, ignore_backward=True)
    table = rows(tmp_path / "out" / "ts_api_forward_compare_0.csv")
    assert [row[0] for row in table] == [line.name for line in NET[:4]]
    assert ["", "Torch_sigmoid_0"] in rows(tmp_path / "out" / "ts_api_mapping_0.csv")
    assert not (tmp_path / "out" / "ts_api_backward_compare_0.csv").exists()


def test_damaged_tensor_is_a_row_and_a_line(tmp_path, capsys):
    a = write_dump(tmp_path / "a", NET)
    path = a / "rank0" / "torch_api_dump" / "NN_Conv2d_0_forward_output.npy"
    path.write_bytes(path.read_bytes()[:-4])
    stray = path.with_name("NN_Stray_0_forward_output.npy")
    np.save(stray, np.zeros(1))
    api_dump_compare(a, write_dump(tmp_path / "b", NET), tmp_path / "out")
    said = capsys.readouterr().out
    assert str(path) in said
    assert "1 npy files that are not listed in it are omitted" in said
    found = rows(tmp_path / "out" / "ts_api_forward_compare_0.csv")
    assert [row[4] for row in found] == ["True", "unreadable", "True", "True"]


@pytest.mark.parametrize("side", ["origin_path", "target_path"])
def test_path_without_a_dump_is_one_line(side, tmp_path):
    good = write_dump(tmp_path / "good", NET)
    (tmp_path / "empty").mkdir()
    for bad in (tmp_path / "empty", tmp_path / "missing"):
        paths = (bad, good) if side == "origin_path" else (good, bad)
        with pytest.raises(ValueError, match=f"^{side} is not a valid dump path: {bad}: .+"):
            api_dump_compare(*paths)


def test_parameters_out_of_range_are_errors(tmp_path):
    dump = write_dump(tmp_path / "a", NET)
    with pytest.raises(TypeError, match="rtol: '1' is not allowed; allowed: a number from 0"):
        api_dump_compare(dump, dump, rtol="1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="output_path: 5 is not allowed; allowed: a path"):
        api_dump_compare(dump, dump, 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="origin_path: None is not allowed; allowed: a path"):
        api_dump_compare(None, dump)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"rtol: -1\.0 is not allowed; allowed: a number from 0"):
        api_dump_compare(dump, dump, rtol=-1.0)
    with pytest.raises(ValueError, match="atol: nan is not allowed"):
        api_dump_compare(dump, dump, atol=float("nan"))
    with pytest.raises(ValueError, match="'global' is not allowed; allowed: 'recursion'"):
        api_dump_compare(dump, dump, convinced_match_method="global")
