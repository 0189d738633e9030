"""Commands on dumps of other tools: what they print, and one line for what they cannot answer."""

from __future__ import annotations

import json

import pytest
from support.foreign_dumps import write_dump

import rankdump
from rankdump._cli.command_group import run_command_line


@pytest.fixture
def ask(capsys):
    """Run a command; return the exit code and the lines on both outputs."""

    def run(*words):
        code = run_command_line([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


def test_ls_lists_tensors_of_msprobe(ask, tmp_path):
    root = write_dump("msprobe-tensor", tmp_path)
    code, lines, errors = ask("ls", root, "--op", "*fc/Linear-op0")
    assert (code, errors) == (0, [])
    assert lines[2].split() == ["fc/Linear-op0", "input", "0", "float32", "(1,4,4)", "64", "B"]
    assert lines[-1] == "statistics in 1 dump.json file, 27.0 KiB on disk: see rankdump stats"
    code, lines, _ = ask("ls", root)
    assert lines[1].split()[-1] == "msprobe"


def test_stats_of_a_log_have_its_norms(ask, tmp_path):
    root = write_dump("debug-mode-text", tmp_path)
    code, lines, errors = ask("stats", root / "rank_0.log", "--op", "*addmm*")
    assert (code, errors) == (0, [])
    assert lines[1].split()[-1] == "l1norm"
    assert lines[-2].endswith("statistics of 4 tensors: 4 from logs")
    _, lines, _ = ask("stats", root, "--json", "--sort", "l1norm", "--limit", "1")
    assert json.loads("\n".join(lines))["tensors"][0]["l1norm"] == 18.661705665290356


def test_first_nan_leads(ask, tmp_path):
    code, lines, _ = ask("stats", write_dump("debug-mode-nan", tmp_path), "--nonfinite")
    assert (code, lines[0]) == (0, "NaN or infinity starts at log-op0")


def test_collectives_of_the_flight_recorder_are_listed_and_merged(ask, tmp_path):
    root = write_dump("flight", tmp_path)
    code, lines, _ = ask("ls", root, "--rank", "0")
    assert code == 0
    assert lines[6].split()[:6] == ["0", "5", "default_pg", "5", "all_reduce", "(5)"]
    assert lines[8] == "rank 0: 5 complete, 1 scheduled"
    _, lines, _ = ask("ls", root, "--json", "--limit", "2")
    assert [call["call"] for call in json.loads("\n".join(lines))["calls"]] == [0, 1]
    code, lines, _ = ask("order", root)
    assert (code, lines[-1]) == (
        0,
        "not complete: default_pg/AllReduce-op5 is scheduled on rank 0",
    )
    assert ask("order", root, "--findings")[0] == 1


def test_order_of_a_dump_without_times_shows_none(ask, tmp_path):
    _, lines, _ = ask("order", write_dump("msprobe-statistics", tmp_path), "--limit", "0")
    assert lines[0].split() == ["position", "iteration", "ranks", "name"]
    assert "all_reduce Distributed_all_reduce_4_forward" in lines[-5]


@pytest.mark.parametrize("name", ["msprobe-statistics", "debug-mode", "flight"])
@pytest.mark.parametrize("command", [["status"], ["fsck"], ["forecast"], ["index"]])
def test_what_only_our_trees_have_is_one_line(command, name, ask, tmp_path):
    root = write_dump(name, tmp_path)
    code, _, errors = ask(*command, root)
    assert (code != 0, len(errors)) == (True, 1)


@pytest.mark.parametrize("command", ["stats", "diff", "find-source"])
def test_flight_recorder_has_no_tensors_in_one_line(command, ask, tmp_path):
    root = write_dump("flight", tmp_path)
    more = {"diff": [root], "find-source": ["net.py:1"]}.get(command, [])
    code, lines, errors = ask(command, root, *more)
    assert (code, lines, len(errors)) == (1, [], 1)
    assert "rankdump order merges those of all ranks" in errors[0]


def test_lines_lead_to_calls(ask, tmp_path):
    code, lines, _ = ask("find-source", write_dump("msprobe-tensor", tmp_path), "job.py:16")
    assert (code, "Functional_linear_0_forward" in " ".join(lines)) == (0, True)


def test_show_opens_pt_files(ask, tmp_path):
    root = write_dump("msprobe-tensor", tmp_path)
    (path,) = root.rglob("Tensor.to.0.forward.output.0.pt")
    _, lines, _ = ask("show", path)
    told = dict(line.split(": ", 1) for line in lines)
    assert told["dtype"].strip() == "bfloat16"
    assert told["op name"].strip() == "Tensor_to_0_forward"
    alone = tmp_path / "x.pt"
    alone.write_bytes(path.read_bytes())
    _, lines, _ = ask("show", alone)
    assert "shape:    (1,4,3)" in " ".join(lines).replace("        ", "    ")


def test_half_a_dump_is_named(ask, tmp_path):
    root = write_dump("msprobe-tensor", tmp_path)
    (root / "step0" / "proc1" / "dump.json").unlink()
    code, _, errors = ask("ls", root)
    assert (code, len(errors)) == (1, 1)
    assert "dump.json: missing or empty" in errors[0]


def test_empty_api_dump_is_not_taken_for_msprobe(tmp_path):
    """Only what msprobe writes is taken for its dump."""
    folder = tmp_path / "rank0"
    folder.mkdir()
    (folder / "dump.json").write_text("{}")
    assert rankdump.open(tmp_path).ranks == (0,)
