"""Rejection of msprobe dumps, which have the folders of an API dump."""

from __future__ import annotations

import json

import pytest

import rankdump
from rankdump._cli.command_group import run_command_line
from rankdump.errors import CorruptedError

BODY = {"task": "tensor", "level": "mix", "framework": "pytorch", "data": {}}


@pytest.fixture(params=["rank0", "rank1", "proc2938"])
def dump(request, tmp_path):
    """One step of one process, as msprobe 26.2.0 leaves it."""
    folder = tmp_path / "dump" / "step0" / request.param
    (folder / "dump_tensor_data").mkdir(parents=True)
    (folder / "dump_tensor_data" / "Functional.conv2d.0.forward.input.1.pt").write_bytes(b"PK")
    (folder / "dump.json").write_text(json.dumps(BODY, indent=1))
    (folder / "stack.json").write_text("{}")
    return tmp_path / "dump"


@pytest.mark.parametrize("command", ["ls", "stats", "status", "find-source", "diff"])
@pytest.mark.parametrize("below", ["", "step0"])
def test_commands_reject_an_msprobe_dump_in_one_line(command, below, dump, capsys):
    """From the whole dump and from a step, in every command, with what reads it."""
    root = str(dump / below)
    more = {"diff": [root], "find-source": ["net.py:1"]}.get(command, [])
    assert run_command_line([command, root, *more]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "a dump of msprobe" in captured.err
    assert "rankdump.migrator" in captured.err


def test_open_rejects_an_msprobe_dump(dump):
    with pytest.raises(CorruptedError, match="a dump of msprobe"):
        rankdump.open(dump / "step0")


def test_empty_api_dump_is_not_taken_for_msprobe(tmp_path):
    """Only what msprobe writes is taken for its dump."""
    folder = tmp_path / "rank0"
    folder.mkdir()
    (folder / "dump.json").write_text("{}")
    assert rankdump.open(tmp_path).ranks == (0,)
