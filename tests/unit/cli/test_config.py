"""`rankdump config check`: the plan in words or JSON, or the key at fault in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suites.configurations import COMMON, E2E

from rankdump.cli.commands import answer
from rankdump.contract.plan import DumpPlan


def written(folder: Path, own: dict[str, object] | None = None, **changes: object) -> str:
    body = {"common_dump_settings": {**COMMON, **changes}, "e2e_dump_settings": E2E}
    path = folder / "data_dump.json"
    path.write_text(json.dumps(body | ({"rankdump": own} if own else {})))
    return str(path)


def test_a_plan_in_words(tmp_path, capsys):
    """Every choice that decides what lands where is one line."""
    own: dict[str, object] = {"codec": "none", "on_full": "drop", "strict": True}
    kernels = ["Conv2D", "Default/a-A/A-op0", "name-regex(.*relu.*)"]
    changes = {"dump_mode": 1, "kernels": kernels, "iteration": "0|5-8", "input_output": 2}
    assert answer(["config", "check", written(tmp_path, own, **changes)]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    said = {name: value.strip() for name, value in lines.items()}
    assert said["iterations"] == "0|5-8"
    assert said["operators"] == "type Conv2D, Default/a-A/A-op0, name-regex(.*relu.*)"
    assert said["sides"] == "outputs"
    assert said["devices"] == "0, 1"
    assert said["tree"] == "/tmp/dump (layout mindspore-sync, codec none)"
    assert said["buffer"].endswith("when full: drop")
    assert said["durability"] == "written, strict"
    assert said["modes"] == "files 0440, folders 0750"


def test_a_plan_for_scripts(tmp_path, capsys, monkeypatch):
    """The JSON form is the one that travels, with the environment's changes in it."""
    monkeypatch.setenv("RANKDUMP_OUTPUT", "/data/elsewhere")
    assert answer(["config", "check", "--json", written(tmp_path)]) == 0
    plan = DumpPlan.from_json(capsys.readouterr().out.encode())
    assert plan.output.root == "/data/elsewhere"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_output": 3}, ["common_dump_settings.input_output", "3"]),
        ({"iteration": "0 | 5"}, ["common_dump_settings.iteration", "'0 | 5'", '"0|5-8|100-120"']),
        ({"saved_data": "statistic"}, ["saved_data", "'statistic'", "tensor"]),
    ],
)
def test_the_key_at_fault(tmp_path, capsys, changes, words):
    """One line with file, key, value and what is allowed; the code is 2."""
    path = written(tmp_path, **changes)
    assert answer(["config", "check", path]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.count("\n") == 1
    assert all(word in seen.err for word in [path, *words])


def test_a_missing_verb_is_one_line(capsys):
    """A group without a command says so, as any other wrong use."""
    assert answer(["config"]) == 2
    assert capsys.readouterr().err == "rankdump: Missing command.\n"
