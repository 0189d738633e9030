"""`rankdump config check`: the plan in words or JSON, or the key at fault in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.configurations import ABSENT, body_of

from rankdump._cli.command_group import run_command_line
from rankdump._core.plan import plan_from_json


def written(
    folder: Path, own: Mapping[str, object] = {}, *, e2e: object = {}, **changes: object
) -> str:
    path = folder / "data_dump.json"
    path.write_text(json.dumps(body_of(common=changes, e2e=e2e, own=own)))
    return str(path)


def said(output: str) -> dict[str, str]:
    lines = [line.partition(":") for line in output.splitlines()]
    return {name: value.strip() for name, _, value in lines}


def test_check_describes_every_setting_of_a_plan(tmp_path, capsys):
    """Every choice that decides what lands where is one line."""
    own: dict[str, object] = {"codec": "none", "on_full": "drop", "strict": True}
    kernels = ["Conv2D", "Default/a-A/A-op0", "name-regex(.*relu.*)"]
    changes = {"dump_mode": 1, "kernels": kernels, "iteration": "0|5-8", "input_output": 2}
    assert run_command_line(["config", "check", written(tmp_path, own, **changes)]) == 0
    facts = said(capsys.readouterr().out)
    assert facts["iterations"] == "0|5-8"
    assert facts["operators"] == "type Conv2D, Default/a-A/A-op0, name-regex(.*relu.*)"
    assert facts["sides"] == "outputs"
    assert facts["devices"] == "0, 1"
    assert facts["tree"] == "/tmp/dump (layout mindspore-sync, codec none)"
    assert facts["profile"] == "ms2.3 (as MindSpore 2.3.0 writes)"
    assert (facts["kept"], facts["saved"]) == ("every selected tensor", "tensors")
    assert (facts["sampling"], facts["arguments"]) == ("off", "not written")
    assert "statistics" not in facts
    assert facts["buffer"].endswith("when full: drop")
    assert facts["durability"] == "written, strict"
    assert facts["modes"] == "files 0440, folders 0750"
    assert "warning" not in facts


DEVICE: dict[str, object] = {
    "stat_calc_mode": "device",
    "sample_mode": 1,
    "sample_num": 20,
    "save_kernel_args": True,
}
SPECIAL: list[tuple[dict[str, object], dict[str, object], dict[str, object], dict[str, str]]] = [
    (
        {"saved_data": "statistic", "statistic_category": ["avg", "max"]},
        DEVICE,
        {},
        {
            "saved": "statistics",
            "statistics": "avg, max (computed on the device, high precision)",
            "sampling": "the first 20 elements",
            "arguments": "written",
        },
    ),
    (
        {"saved_data": "full"},
        {},
        {"profile": "ms2.0"},
        {
            "saved": "tensors and statistics",
            "statistics": "max, min, avg, count, negative zero count, positive zero count, "
            "nan count, negative inf count, positive inf count, zero count (computed on the host)",
        },
    ),
    (
        {"op_debug_mode": 3, "overflow_number": 1, "initial_iteration": 4},
        {},
        {},
        {
            "kept": "tensors of operators with an output that is not finite; "
            "a rank stops after 1 such operator",
            "iterations": "all; the first of the job is 4",
        },
    ),
    ({"op_debug_mode": 4}, {}, {}, {"kept": "inputs of the operator that raises"}),
    ({"dump_mode": 2}, {}, {}, {"operators": "those that the script marks with rankdump.set_dump"}),
]


@pytest.mark.parametrize(("changes", "e2e", "own", "facts"), SPECIAL)
def test_check_describes_content_and_trigger(tmp_path, capsys, changes, e2e, own, facts):
    """Content, trigger and marks are said; every line of them as it stands here."""
    assert run_command_line(["config", "check", written(tmp_path, own, e2e=e2e, **changes)]) == 0
    assert said(capsys.readouterr().out).items() >= facts.items()


ACL: list[tuple[dict[str, object], dict[str, str]]] = [
    (
        {"dump_list": [{"model_name": "A", "layer": ["x", "y"]}, {"model_name": "B"}]},
        {
            "dialect": "acl",
            "net name": "each model has its own",
            "format": "bin",
            "of model A": "x, y",
            "of model B": "all",
            "sides": "outputs",
        },
    ),
    (
        {
            "dump_level": "op",
            "dump_list": [
                {
                    "model_name": "A",
                    "opname_range": [{"begin": "a", "end": "b"}],
                    "optype_blacklist": [{"name": "Add"}],
                    "opname_blacklist": [{"name": "c", "pos": ["input0", "output1"]}],
                },
                {"layer": ["x"]},
            ],
        },
        {
            "of model A": "x, a to b, without type Add, input0 and output1 of c",
            "of other models": "x",
        },
    ),
    (
        {"dump_scene": "watcher", "dump_list": [{"layer": ["a", "b"], "watcher_nodes": ["c"]}]},
        {"operators": "c; their outputs, and again after each of a, b"},
    ),
    (
        {"dump_scene": "watcher", "dump_list": [{"watcher_nodes": ["c", "d"]}]},
        {"operators": "c, d; their outputs, and again after every other operator"},
    ),
    (
        {"dump_data": "stats", "dump_op_switch": "on"},
        {
            "operators": "all",
            "statistics": "max, min, avg, count, nan count, negative inf count, "
            "positive inf count (computed on the host)",
        },
    ),
    ({}, {"enabled": "no: nothing is dumped"}),
]


@pytest.mark.parametrize(("dump", "facts"), ACL)
def test_check_describes_an_acl_plan(tmp_path, capsys, dump, facts):
    """An acl.json is found by its key, and is checked by the same command."""
    path = tmp_path / "acl.json"
    path.write_text(json.dumps({"dump": {"dump_path": str(tmp_path), **dump}}))
    assert run_command_line(["config", "check", str(path)]) == 0
    assert said(capsys.readouterr().out).items() >= facts.items()


def test_check_reports_the_code_of_cann(tmp_path, capsys):
    """The line ends in the code that CANN reports."""
    path = tmp_path / "acl.json"
    path.write_text(json.dumps({"dump": {"dump_path": str(tmp_path), "dump_step": "5-3"}}))
    assert run_command_line(["config", "check", str(path)]) == 2
    assert capsys.readouterr().err.endswith("'5-3' (EP0003)\n")


def test_check_prints_warnings_last(tmp_path, capsys):
    """What is accepted and will surprise stands last, line by line; the code is that of success."""
    path = written(tmp_path, e2e=ABSENT, iteration="5-3", op_debug_mode=0)
    assert run_command_line(["config", "check", path]) == 0
    *_, missing, reversed_range = capsys.readouterr().out.splitlines()
    assert missing.startswith("warning: e2e_dump_settings: missing; ")
    assert reversed_range.startswith(
        "warning: common_dump_settings.iteration: '5-3' runs backwards"
    )
    assert run_command_line(["config", "check", "--json", path]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 2


def test_check_prints_json(tmp_path, capsys, monkeypatch):
    """The JSON form is the one that travels, with the environment's changes in it."""
    monkeypatch.setenv("RANKDUMP_OUTPUT", "/data/elsewhere")
    assert run_command_line(["config", "check", "--json", written(tmp_path)]) == 0
    plan = plan_from_json(capsys.readouterr().out.encode())
    assert plan.output.root == "/data/elsewhere"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_output": 3}, ["common_dump_settings.input_output", "3"]),
        ({"iteration": "0 | 5"}, ["common_dump_settings.iteration", "'0 | 5'", '"0|5-8|100-120"']),
        ({"saved_data": "statistics"}, ["saved_data", "'statistics'", '"full"']),
    ],
)
def test_check_names_the_invalid_key(tmp_path, capsys, changes, words):
    """One line with file, key, value and what is allowed; the code is 2."""
    path = written(tmp_path, **changes)
    assert run_command_line(["config", "check", path]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.count("\n") == 1
    assert all(word in seen.err for word in [path, *words])


def test_config_without_a_command_is_an_error_in_one_line(capsys):
    """A group without a command says so, as any other wrong use."""
    assert run_command_line(["config"]) == 2
    assert capsys.readouterr().err == "rankdump: Missing command.\n"


class MountFlags:
    """What is known of a mount."""

    f_flag = os.ST_RDONLY


def test_check_warns_of_a_tree_that_cannot_be_written_here(tmp_path, capsys, monkeypatch):
    """The job may run on another host."""
    (tmp_path / "file").touch()
    fixed, closed = tmp_path / "fixed", tmp_path / "closed"
    fixed.mkdir()
    closed.mkdir()
    flags, access = os.statvfs, os.access
    monkeypatch.setattr(os, "statvfs", lambda at: MountFlags() if at == fixed else flags(at))
    allow = lambda at, *more, **names: at != closed and access(at, *more, **names)  # noqa: E731
    monkeypatch.setattr(os, "access", allow)
    for path, fault in (
        (f"{fixed}/a/tree", f"{fixed}: Read-only file system"),
        (f"{closed}/tree", f"{closed}: Permission denied"),
        (f"{tmp_path}/file/tree", f"{tmp_path}/file: Not a directory"),
        (f"{tmp_path}/a/tree", ""),
    ):
        file = written(tmp_path, path=path)
        assert run_command_line(["config", "check", file]) == 0
        warned = said(capsys.readouterr().out).get("warning", "")
        assert fault in warned
        assert bool(warned) == bool(fault)
        assert warned.startswith(f"on this host the tree {path} cannot be written" if fault else "")
    disabled = written(tmp_path, path=f"{fixed}/tree", e2e={"enable": False, "trans_flag": True})
    assert run_command_line(["config", "check", disabled]) == 0


def test_check_writes_nothing(tmp_path, capsys):
    """Where nothing of the path exists, that would be in the root of the file system."""
    place = tmp_path / "place"
    place.mkdir()
    file = written(tmp_path, path=f"{place}/a/tree")
    before = place.stat()
    assert run_command_line(["config", "check", file]) == 0
    assert "warning" not in said(capsys.readouterr().out)
    assert place.stat().st_mtime_ns == before.st_mtime_ns
