"""The commands of `docs/mindspore.md`, run unchanged but for the folder `/data`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import rankdump

from .conftest import JOBS, run_to_its_end

PAGE = Path(__file__).parents[2] / "docs" / "mindspore.md"


def _commands() -> list[list[str]]:
    """Return the lines of each block of commands."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE.read_text())
    return [block.splitlines() for language, block in blocks if language == "sh"]


def _prepared(folder: Path, *arguments: str) -> None:
    """Write what the commands name: the script, rankdump's plan, and MindSpore's."""
    folder.mkdir()
    program = f"import runpy, sys; sys.argv[1:] = {list(arguments)!r}\n"
    job = JOBS / "train_step_cell.py"
    (folder / "train.py").write_text(
        f'{program}runpy.run_path({str(job)!r}, run_name="__main__")\n'
    )
    for name, root in (("data_dump", "tree"), ("native", "native")):
        common = {
            "dump_mode": 0,
            "path": str(folder / root),
            "net_name": "Net",
            "iteration": "1",
            "saved_data": "tensor",
            "input_output": 0,
            "kernels": [],
            "support_device": [0],
        }
        body = {"common_dump_settings": common, "e2e_dump_settings": {"enable": True}}
        body["e2e_dump_settings"]["trans_flag"] = True
        (folder / f"{name}.json").write_text(json.dumps(body))


def _run(line: str, folder: Path) -> None:
    words = line.replace("/data/", f"{folder}/")
    run_to_its_end(["sh", "-c", f"{words} && echo done"], folder=folder)


def test_documented_commands_for_two_ranks(tmp_path: Path) -> None:
    (line,), _ = _commands()
    folder = tmp_path / "ranks"
    _prepared(folder, "pynative", "--ranks")
    _run(line, folder)
    assert rankdump.open(folder / "tree").ranks == (0, 1)


def test_documented_commands_for_every_kernel(tmp_path: Path) -> None:
    _, lines = _commands()
    folder = tmp_path / "kernels"
    _prepared(folder, "graph")
    for line in lines:
        _run(line, folder)
    kernels = set(rankdump.open(folder / "kernels").operators)
    assert any(name.endswith("MatMul-op0") for name in kernels)
    outside = set(rankdump.open(folder / "tree").operators)
    assert "Default/network-TrainOneStepCell/TrainOneStepCell-op0" in outside
