"""Tests of CallStackFile: valid JSON after every addition, each call once, repair after a crash."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from rankdump._core.session_protocol import CallStacks
from rankdump._layout.tree_paths import FilePlace
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.rank_files import CallStackFile
from rankdumpd.agent.storage.tree import DumpTree

PLACE = FilePlace("rank0", "torch_api_dump_stack.json")
DEEP = (
    'File net.py, line 8, in forward, \n y = f("a")',
    "File run.py, line 1, in <module>, \n r()",
)
SHALLOW = ("File run.py, line 2, in <module>, \n ]",)


def calls(*numbers: int, kind: str = "Torch_matmul") -> CallStacks:
    names = tuple(f"{kind}_{number}_forward" for number in numbers)
    return CallStacks(0, names, tuple(n % 3 for n in numbers), (DEEP, SHALLOW, ()))


def marks(*paths: str) -> CallStacks:
    return CallStacks(
        0, tuple(f"LAYER_{path}_forward" for path in paths), (0,) * len(paths), (DEEP,)
    )


def file_in(root: Path) -> CallStackFile:
    tree = DumpTree(str(root), file_mode=0o400, folder_mode=0o700, growing_mode=0o600)
    return CallStackFile(tree, PLACE, "torch")


def read(root: Path) -> dict[str, list[str]]:
    """The object, which must be spelt as `json.dumps` spells it, with every key once."""
    text = (root / PLACE.path).read_text()
    pairs = json.loads(text, object_pairs_hook=list)
    body = dict(pairs)
    assert len(body) == len(pairs)
    assert json.dumps(body, indent=4) == text
    return body


def test_stack_file_is_one_json_object(tmp_path):
    """In their order, as the real tool writes it, readable for its owner alone."""
    file = file_in(tmp_path)
    for numbers in ((0, 1, 2), (3,), (5, 4)):
        file.add(calls(*numbers), again=False)
        read(tmp_path)
    body = read(tmp_path)
    assert list(body) == [f"torch.matmul({n}) forward" for n in (0, 1, 2, 3, 5, 4)]
    assert body["torch.matmul(3) forward"] == list(DEEP)
    assert body["torch.matmul(5) forward"] == []
    assert stat.S_IMODE((tmp_path / PLACE.path).stat().st_mode) == 0o600


@pytest.mark.parametrize("numbers", [(0, 1), (0, 1, 2)])
def test_torn_stack_file_is_repaired_by_resend(tmp_path, numbers):
    """Whatever a crash left of a file, the same calls again make it whole, each once."""
    file_in(tmp_path).add(calls(*numbers), again=False)
    path = tmp_path / PLACE.path
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        file_in(tmp_path).add(calls(*numbers), again=True)
        assert path.read_bytes() == whole, cut
        file_in(tmp_path).add(calls(3), again=False)
        assert len(read(tmp_path)) == len(numbers) + 1


def test_module_is_added_once(tmp_path):
    """It is sent with every call, in every process."""
    file = file_in(tmp_path)
    file.add(marks("fc", "blocks.0.conv"), again=False)
    file.add(marks("fc", "act"), again=False)
    file_in(tmp_path).add(marks("act", "fc"), again=False)
    names = ("fc", "blocks.0.conv", "act")
    assert list(read(tmp_path)) == [f"LAYER: {name} forward" for name in names]


def test_failing_disk_keeps_earlier_entries(tmp_path, monkeypatch):
    """Half an addition is taken back; the same one later is whole."""
    file = file_in(tmp_path)
    file.add(calls(0), again=False)
    before = read(tmp_path)

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        monkeypatch.setattr(rank_files.os, "pwrite", pwrite)
        pwrite(descriptor, bytes(data)[:30], offset)
        raise OSError(28, "failing on purpose")

    pwrite = os.pwrite
    monkeypatch.setattr(rank_files.os, "pwrite", fail)
    with pytest.raises(OSError, match="on purpose"):
        file.add(calls(1), again=False)
    assert read(tmp_path) == before
    file.add(calls(1), again=False)
    assert len(read(tmp_path)) == 2


def test_end_of_long_entry_is_found(tmp_path):
    """A torn entry longer than the part that is read first."""
    long = CallStacks(0, ("Torch_a_0_forward", "Torch_a_1_forward"), (0, 0), (DEEP * 2000,))
    file_in(tmp_path).add(long, again=False)
    path = tmp_path / PLACE.path
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 200])
    file_in(tmp_path).add(long, again=True)
    assert path.read_bytes() == whole


def test_file_without_entries_begins_anew(tmp_path):
    """An empty JSON object has no entries."""
    path = tmp_path / PLACE.path
    path.parent.mkdir()
    path.write_text("{}")
    file_in(tmp_path).add(calls(0), again=False)
    assert len(read(tmp_path)) == 1
