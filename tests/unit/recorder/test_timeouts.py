"""Timeouts of communication that a rank sends, and warnings that the agent returns."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from support.agent_double import Running, bodies, plan
from support.send_buffers import SendBufferDouble

import rankdump
from rankdump._core.rank_identity import read_timeout_variables
from rankdump._core.timeouts import GroupTimeout, RankTimeouts
from rankdump._recorder.metadata_sender import TimeoutReporter
from rankdump._wire.session_messages import timeouts_from_wire

GLOO = GroupTimeout("0", "gloo", 20_000_000)


def started(running: Running, tmp_path, **environ: str) -> rankdump.Session:
    return rankdump.Session(plan(tmp_path), agent=running.address, environ=environ)


def declared(running: Running) -> list[RankTimeouts]:
    return [timeouts_from_wire(message) for message in bodies(running, "timeouts")]


def test_timeouts_of_the_environment_are_sent_at_the_start(running, tmp_path):
    environ = {"HCCL_EXEC_TIMEOUT": "1800", "HCCL_CONNECT_TIMEOUT": "", "HOME": "/root"}
    started(running, tmp_path, **environ).close()
    assert declared(running) == [RankTimeouts({"HCCL_EXEC_TIMEOUT": "1800"})]
    assert running.agent.frames[0].WhichOneof("body") == "timeouts"


def test_no_timeouts_are_sent_without_any(running, tmp_path):
    with started(running, tmp_path) as session:
        session.dump("Add", "a", "input", 0, np.ones(1))
    assert declared(running) == []


def test_timeout_variable_with_undecodable_bytes_is_sent():
    found = read_timeout_variables(
        {"HCCL_EXEC_TIMEOUT": "\udcff", "HCCL_EVENT_TIMEOUT": "9" * 10_000}
    )
    assert found["HCCL_EXEC_TIMEOUT"] == "?"
    assert len(found["HCCL_EVENT_TIMEOUT"]) == 256


def test_timeouts_of_script_and_groups_are_sent_with_all_known_ones(running, tmp_path):
    with started(running, tmp_path, HCCL_EXEC_TIMEOUT="68") as session:
        session.limit("hccl_timeout", 600)
        session.limit("hccl_timeout", 600.0)
        pipeline = session._pipeline
        assert pipeline is not None
        for _ in range(3):
            pipeline.recorder.record_group_timeout(GLOO)
    variables = {"HCCL_EXEC_TIMEOUT": "68"}
    assert declared(running) == [
        RankTimeouts(variables),
        RankTimeouts(variables, limits={"hccl_timeout": 600.0}),
        RankTimeouts(variables, (GLOO,), {"hccl_timeout": 600.0}),
    ]


def test_timeout_of_a_recreated_group_replaces_the_old_one():
    buffer = SendBufferDouble()
    limits = TimeoutReporter({}, buffer, pytest.fail)
    limits.start()
    limits.add_group(GLOO)
    limits.add_group(GroupTimeout("0", "nccl", 1))
    limits.add_group(GroupTimeout("0", "gloo", 2))
    last = buffer.submitted[-1]
    assert isinstance(last, RankTimeouts)
    assert last.groups == (GroupTimeout("0", "gloo", 2), GroupTimeout("0", "nccl", 1))
    assert len(buffer.submitted) == 3


@pytest.mark.parametrize("seconds", [0, 1.5, np.float32(2), np.int64(3), Fraction(1, 2)])
def test_limit_accepts_allowed_seconds(running, tmp_path, caplog, seconds):
    with started(running, tmp_path) as session:
        session.limit("op_wait_timeout", seconds)
    assert declared(running)[0].limits == {"op_wait_timeout": float(seconds)}
    assert "limit" not in caplog.text


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("", 1),
        ("a b", 1),
        ("ä", 1),
        (None, 1),
        ("x" * 65, 1),
        ("x", "1"),
        ("x", True),
        ("x", -1),
        ("x", math.nan),
        ("x", math.inf),
        ("x", 1 << 40),
        pytest.param("x", 1 << 20_000, id="endless"),
        ("x", np.ones(2)),
    ],
)
def test_limit_warns_once_about_a_bad_value(running, tmp_path, caplog, name, seconds):
    with started(running, tmp_path) as session:
        session.limit(name, seconds)
        session.limit(name, seconds)
    assert declared(running) == []
    said = [r.message for r in caplog.records if "limit" in r.message]
    assert len(said) == 1
    assert "allowed" in said[0]
    assert len(said[0]) < 200


def test_limit_does_nothing_without_a_plan(caplog):
    rankdump.Session().limit("", -1)
    assert not caplog.records


def test_limit_uses_the_session_of_the_environment(monkeypatch):
    told = []
    monkeypatch.setattr(rankdump.Session, "limit", lambda _self, *what: told.append(what))
    rankdump.limit("hccl_timeout", 68)
    assert told == [("hccl_timeout", 68)]


def test_warning_from_the_agent_is_logged_once(running, tmp_path, caplog):
    running.agent.warnings = ["group 0 used half of its 20 s"]
    with started(running, tmp_path) as session:
        for i in range(3):
            session.step(i)
            session.dump("Add", "a", "input", 0, np.ones(1))
    said = [r.message for r in caplog.records if "half" in r.message]
    assert said == ["rankdump: group 0 used half of its 20 s"]
