"""The choice between rankdump and MindSpore where both read one configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import rankdump
from rankdump._session.plan_source import DumpTarget, describe_native_conflict, remove_native_dump

from .test_session import config

HERE = DumpTarget("/etc/dump.json", "/data/dump")
SAME_FILE = DumpTarget("/etc/dump.json", "/data/elsewhere")
SAME_ROOT = DumpTarget("/etc/native.json", "/data/dump")
OTHER = DumpTarget("/etc/native.json", "/data/native")


@pytest.mark.parametrize(
    ("native", "loaded", "conflicts"),
    [
        (HERE, True, True),
        (SAME_FILE, True, True),
        (SAME_ROOT, True, True),
        (HERE, False, False),
        (OTHER, True, False),
        (DumpTarget(), True, False),
    ],
)
def test_native_dump_conflicts_if_both_would_write_the_same(native, loaded, conflicts):
    """Law: nothing is dumped twice; without MindSpore, or with another tree, rankdump dumps."""
    reason = describe_native_conflict(HERE, native, mindspore_loaded=loaded)
    assert bool(reason) == conflicts
    assert not reason or f"`rankdump ingest {native.root} --into TREE --follow`" in reason


@pytest.fixture
def mindspore_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", ModuleType("mindspore"))


@pytest.mark.usefixtures("mindspore_loaded")
@pytest.mark.parametrize(("rank", "said"), [(0, 1), (1, 0)])
def test_session_leaves_the_dump_to_mindspore_and_one_rank_warns(tmp_path, caplog, rank, said):
    file = config(tmp_path, path="/data/dump")
    environ = {"MINDSPORE_DUMP_CONFIG": str(file), "RANK_ID": str(rank)}
    assert not rankdump.Session.from_environment(environ).active
    assert caplog.text.count("MindSpore reads MINDSPORE_DUMP_CONFIG itself") == said
    assert caplog.text.count("RANKDUMP_CONFIG and unset MINDSPORE_DUMP_CONFIG") == said


@pytest.mark.usefixtures("mindspore_loaded")
@pytest.mark.parametrize("native", ["", "missing.json", "native"])
def test_session_with_its_own_configuration_dumps(tmp_path, running, caplog, native):
    """It also dumps beside MindSpore's dump into another tree, or one that MindSpore rejects."""
    (tmp_path / "native").mkdir()
    beside = str(config(tmp_path / "native", path="/data/native"))
    environ = {
        "RANKDUMP_CONFIG": str(config(tmp_path, path="/data/dump")),
        "MINDSPORE_DUMP_CONFIG": beside if native == "native" else native,
        "RANKDUMP_AGENT": running.address,
    }
    with rankdump.Session.from_environment(environ) as session:
        assert session.active
    assert "MindSpore" not in caplog.text


def test_job_without_mindspore_may_use_either_variable(tmp_path, running):
    """Without MindSpore, only rankdump reads the variable."""
    environ = {
        "MINDSPORE_DUMP_CONFIG": str(config(tmp_path)),
        "RANKDUMP_AGENT": running.address,
    }
    with rankdump.Session.from_environment(environ) as session:
        assert session.active


def _environ(tmp_path: Path, native: Path | str) -> dict[str, str]:
    return {
        "RANKDUMP_CONFIG": str(config(tmp_path, path="/data/dump")),
        "MINDSPORE_DUMP_CONFIG": str(native),
        "PATH": "/bin",
    }


@pytest.mark.parametrize("root", ["/data/dump", "/data/output"])
def test_native_variable_is_removed_if_it_names_the_same_dump(tmp_path, root):
    """The same file counts, whatever RANKDUMP_OUTPUT is, and also a link to it."""
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "data_dump.json")
    environ = _environ(tmp_path, link) | {"RANKDUMP_OUTPUT": root}
    assert remove_native_dump(environ, root) == {
        name: text for name, text in environ.items() if name != "MINDSPORE_DUMP_CONFIG"
    }


def test_native_variable_stays_if_it_names_another_dump(tmp_path):
    (tmp_path / "native").mkdir()
    environ = _environ(tmp_path, config(tmp_path / "native", path="/data/native"))
    assert remove_native_dump(environ, "/data/dump") == environ


def test_acl_dump_keeps_its_variable(tmp_path):
    """MS_ACL_DUMP_CFG_PATH requests an ACL dump if it has the text of the other variable."""
    own = tmp_path / "data_dump.json"
    spelt = f"{tmp_path}/./data_dump.json"
    environ = _environ(tmp_path, spelt) | {"MS_ACL_DUMP_CFG_PATH": spelt}
    assert remove_native_dump(environ, "/data/dump")["MS_ACL_DUMP_CFG_PATH"] == str(own)
