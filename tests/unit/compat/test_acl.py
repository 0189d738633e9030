"""The life cycle of `rankdump.acl`: return codes, and the configuration that applies."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies

import rankdump
from rankdump import acl
from rankdump._compat.acl_lifecycle import AclDumpLifecycle
from rankdump._core.plan import plan_from_json
from rankdump._session import default_session

Write = Callable[..., Path]


@pytest.fixture
def cycle(running: RunningFakeAgent) -> Iterator[AclDumpLifecycle]:
    """A life cycle of its own, whose sessions go to a fake agent."""
    made = AclDumpLifecycle({"RANKDUMP_AGENT": running.address})
    yield made
    made.finalize_dump()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str = "acl.json", **dump: Any) -> Path:
        body: dict[str, object] = {
            "dump_path": str(tmp_path),
            "dump_mode": "all",
            "dump_list": [],
            "dump_op_switch": "on",
        }
        path = tmp_path / name
        path.write_text(json.dumps({"dump": body | dump}))
        return path

    return written


def current() -> rankdump.Session:
    """The session that `attach` would use."""
    return default_session.open_default_session()


def test_codes_are_those_of_cann():
    """Error codes of the AscendCL API reference, CANN 8."""
    assert (acl.OK, acl.NO_PATH, acl.INITIALISED_TWICE) == (0, 100000, 100002)
    assert (acl.UNREADABLE_FILE, acl.UNPARSABLE, acl.BAD_CONFIGURATION) == (100003, 100006, 100009)
    assert (acl.NOT_INITIALISED, acl.INTERNAL) == (100045, 500000)


def test_acl_module_has_one_life_cycle_per_process(tmp_path: Path):
    assert acl.finalize_dump() == acl.NOT_INITIALISED
    assert acl.set_dump(str(tmp_path / "acl.json")) == acl.NOT_INITIALISED
    assert acl.init_dump() == acl.OK
    assert acl.init_dump() == acl.INITIALISED_TWICE
    assert acl.finalize_dump() == acl.OK
    assert acl.finalize_dump() == acl.NOT_INITIALISED


def test_acl_module_is_loaded_on_use():
    code = (
        "import sys, rankdump; before = 'rankdump.acl' in sys.modules; "
        "print(before, rankdump.acl.finalize_dump(), rankdump.tf.DumpConfig().plan().enabled, "
        "[m for m in ('grpc', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "100045", "False", "[]"]


@pytest.mark.parametrize("path", [None, "", 7, b"acl.json"])
def test_set_dump_rejects_an_empty_path(cycle: AclDumpLifecycle, path: object):
    assert cycle.init_dump() == acl.OK
    assert cycle.set_dump(path) == acl.NO_PATH


@pytest.mark.parametrize(
    ("text", "code", "reported"),
    [
        (None, acl.UNREADABLE_FILE, "missing"),
        ("{", acl.UNPARSABLE, "(EP0004)"),
        ("[]", acl.UNPARSABLE, "(EP0004)"),
        ('{"dump": ' + "[" * 5000, acl.UNPARSABLE, "(EP0004)"),
        ('{"dump": {"a": ' + "[" * 9 + "]" * 9 + "}}", acl.BAD_CONFIGURATION, "(EP0004)"),
        ('{"dump": []}', acl.BAD_CONFIGURATION, "(EP0001)"),
        ('{"dump": {"dump_mode": "x"}}', acl.BAD_CONFIGURATION, "(EP0002)"),
        ('{"dump": {"dump_path": "/not/there"}}', acl.BAD_CONFIGURATION, "(EP0003)"),
    ],
)
def test_set_dump_of_an_invalid_file_returns_its_code(
    cycle: AclDumpLifecycle, tmp_path, caplog, text, code, reported
):
    """Each fault has its number, and one line that says what is wrong; nothing is dumped."""
    path = tmp_path / "acl.json"
    if text is not None:
        path.write_text(text)
    assert cycle.init_dump() == acl.OK
    assert cycle.set_dump(str(path)) == code
    (record,) = caplog.records
    assert f"set_dump returns {code}: {path}" in record.getMessage()
    assert reported in record.getMessage()
    assert cycle.finalize_dump() == acl.OK


def test_set_dump_accepts_ten_levels_of_nesting(cycle: AclDumpLifecycle, write: Write):
    deep = json.loads("[" * 8 + "]" * 8)
    assert cycle.init_dump() == acl.OK
    assert cycle.set_dump(write(unknown=deep)) == acl.OK


def test_unexpected_error_returns_the_internal_code(
    cycle: AclDumpLifecycle, write, caplog, monkeypatch
):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr("rankdump._compat.acl_lifecycle.identify_rank", broken)
    assert cycle.init_dump() == acl.OK
    assert cycle.set_dump(write()) == acl.INTERNAL
    assert "surprise" in caplog.text


def test_finalize_dump_of_a_rejected_rank_is_an_error(
    cycle: AclDumpLifecycle, running: RunningFakeAgent, write, caplog
):
    """Nothing is counted after a refusal, so no number of tensors tells of it."""
    running.agent.refusal = "rank 0 is taken"
    cycle.init_dump()
    assert cycle.set_dump(write()) == acl.OK
    session = current()
    session.step()
    session.dump("Add", "Default/Add-op0", "output", 0, np.ones(3, np.float32))
    assert cycle.finalize_dump() == acl.INTERNAL
    assert "finalize_dump returns 500000: the agent rejected this rank" in caplog.text


def test_set_dump_of_an_invalid_file_keeps_the_last_configuration(
    cycle: AclDumpLifecycle, write, tmp_path
):
    cycle.init_dump()
    assert cycle.set_dump(write()) == acl.OK
    assert cycle.set_dump(str(tmp_path / "missing.json")) == acl.UNREADABLE_FILE
    assert current().active


@pytest.mark.parametrize("body", [{}, {"dump": {}}, {"profiler": {}}])
def test_set_dump_of_a_disabled_dump_opens_no_session(
    cycle: AclDumpLifecycle, running, tmp_path, caplog, body
):
    """No error, no session; `attach` costs nothing."""
    path = tmp_path / "other.cfg"
    path.write_text(json.dumps(body))
    cycle.init_dump()
    assert cycle.set_dump(str(path)) == acl.OK
    assert not current().active
    assert "enables nothing" in caplog.text
    assert cycle.finalize_dump() == acl.OK
    assert running.agent.opened == []


def test_session_is_opened_with_the_first_model(cycle: AclDumpLifecycle, running, write):
    cycle.init_dump()
    cycle.set_dump(write(dump_mode="input"))
    cycle.set_dump(write(dump_mode="output"))
    assert running.agent.opened == []
    assert current() is current()
    (opened,) = running.agent.opened
    assert plan_from_json(opened.plan_json).selection.inputs is False


def test_second_set_dump_applies_to_later_models(cycle: AclDumpLifecycle, running, write):
    """Who had a session before keeps it, to the end of both."""
    cycle.init_dump()
    cycle.set_dump(write("a.json", dump_step="0"))
    first = current()
    cycle.set_dump(write("b.json", dump_step="1"))
    second = current()
    assert first is not second
    assert first.active
    assert second.active
    assert cycle.finalize_dump() == acl.OK
    assert not first.active
    assert not second.active
    steps = [plan_from_json(o.plan_json).selection.iterations.text for o in running.agent.opened]
    assert steps == ["0", "1"]
    first_id, second_id = (opened.job_id for opened in running.agent.opened)
    assert second_id == f"{first_id}-2"
    assert running.agent.opened[0].config_source == (write("a.json", dump_step="0")).read_bytes()


def test_life_cycle_can_be_repeated_with_another_file(cycle: AclDumpLifecycle, running, write):
    """Init, set, finalize, and the same again with another file: two dumps, two folders."""
    for name in ("a", "b"):
        assert cycle.init_dump() == acl.OK
        assert cycle.set_dump(str(write(f"{name}.json"))) == acl.OK
        session = current()
        session.dump("Add", name, "input", 0, np.ones(1))
        assert cycle.finalize_dump() == acl.OK
        assert session.closed
    assert [record.op_name for record in bodies(running, "record")] == ["a", "b"]
    started = [plan_from_json(o.plan_json).output.started for o in running.agent.opened]
    assert len(set(started)) == 2
    assert all(len(text) == 14 for text in started)


def test_time_folders_differ_within_a_second(running, write):
    cycle = AclDumpLifecycle({"RANKDUMP_AGENT": running.address}, clock=lambda: 1_700_000_000.9)
    for _ in range(3):
        cycle.init_dump()
        cycle.set_dump(write())
        current()
        cycle.finalize_dump()
    started = [plan_from_json(o.plan_json).output.started for o in running.agent.opened]
    assert len(set(started)) == 3


def test_first_time_folder_is_named_by_the_job(running, write):
    environ = {"RANKDUMP_AGENT": running.address, "RANKDUMP_STARTED": "20200102030405"}
    cycle = AclDumpLifecycle(environ)
    cycle.init_dump()
    cycle.set_dump(write("a.json"))
    current()
    cycle.set_dump(write("b.json"))
    current()
    cycle.finalize_dump()
    first, second = (plan_from_json(o.plan_json).output.started for o in running.agent.opened)
    assert first == "20200102030405" != second


def test_environment_applies_again_after_finalize_dump(cycle: AclDumpLifecycle, write):
    cycle.init_dump()
    cycle.set_dump(write())
    assert current().active
    cycle.finalize_dump()
    assert not current().active


def test_warnings_are_logged_by_rank_0_only(running, write, caplog):
    caplog.set_level(logging.WARNING, "rankdump")
    for rank, said in (("1", 0), ("0", 1)):
        cycle = AclDumpLifecycle(
            {"RANKDUMP_AGENT": running.address, "RANK": rank, "WORLD_SIZE": "2"}
        )
        cycle.init_dump()
        cycle.set_dump(write(dump_kernel_data="all"))
        cycle.finalize_dump()
        assert caplog.text.count("dump_kernel_data") == said


def test_dump_config_is_the_plan_of_a_session(running: RunningFakeAgent, tmp_path: Path):
    """`rankdump.tf` has no life cycle: a session takes its object as a plan."""
    config = rankdump.tf.DumpConfig(enable_dump=True, dump_path=str(tmp_path), dump_step="1")
    with rankdump.Session(config, agent=running.address) as session:
        for step in range(3):
            session.step(step)
            session.dump("Add", "a", "output", 0, np.ones(1))
    assert [record.iteration for record in bodies(running, "record")] == [1]
    (opened,) = running.agent.opened
    output = plan_from_json(opened.plan_json).output
    assert (output.layout, output.root, len(output.started)) == ("cann", str(tmp_path), 14)


def test_acl_file_is_accepted_from_the_environment(running: RunningFakeAgent, write: Write):
    """RANKDUMP_CONFIG may name either kind of file."""
    environ = {"RANKDUMP_CONFIG": str(write()), "RANKDUMP_AGENT": running.address}
    with rankdump.Session.from_environment(environ) as session:
        session.dump("Add", "a", "input", 0, np.ones(1))
    assert [record.op_name for record in bodies(running, "record")] == ["a"]
    write().write_text('{"dump": {}}')
    assert not rankdump.Session.from_environment(environ).active
