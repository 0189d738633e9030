"""The session of a loop that a framework owns: opened, closed, and shielded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies
from support.configurations import body_of

import rankdump
from rankdump._core.log_once import LogOnce
from rankdump._session import default_session
from rankdump.errors import ExhaustedError
from rankdump.integrations import _loop_session
from rankdump.integrations._loop_session import LoopSession, shield

from .conftest import SessionJournal


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own: no default session, nothing logged before."""
    monkeypatch.setattr(default_session, "_default", None)
    monkeypatch.setattr(_loop_session, "_log_once", LogOnce(logging.getLogger("rankdump")))


@pytest.fixture
def configured(
    tmp_path: Path, running: RunningFakeAgent, monkeypatch: pytest.MonkeyPatch
) -> RunningFakeAgent:
    path = tmp_path / "data_dump.json"
    path.write_text(json.dumps(body_of()))
    monkeypatch.setenv("RANKDUMP_CONFIG", str(path))
    monkeypatch.setenv("RANKDUMP_AGENT", running.address)
    return running


def test_loop_without_a_configuration_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        loop = LoopSession("rankdump.integrations.transformers")
        for i in range(3):
            loop.begin_step(i, (object(),), accumulates=False)
        loop.close()
    assert [record.getMessage() for record in caplog.records] == [
        "rankdump: rankdump.integrations.transformers dumps nothing, because there is no "
        "configuration: name it in RANKDUMP_CONFIG, or start the job with "
        "`rankdump run --config FILE`"
    ]


def test_loop_without_a_configuration_logs_on_rank_0_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    LoopSession("x").begin_step(0, (), accumulates=False)
    assert caplog.records == []


def test_loop_opens_the_session_of_the_environment_and_closes_it(
    configured: RunningFakeAgent,
) -> None:
    loop = LoopSession("x")
    for i in range(3):
        loop.begin_step(i, (), accumulates=False)
        loop.session.dump("Op", "a", "output", 0, np.ones(2))
    session = loop.session
    loop.close()
    assert session.closed
    assert len(configured.agent.opened) == 1
    assert len(bodies(configured, "iteration_end")) == 3


def test_loop_leaves_the_session_of_the_script_open(configured: RunningFakeAgent) -> None:
    """Law: a session that was open before the loop is open after it."""
    session = default_session.open_default_session()
    loop = LoopSession("x")
    loop.begin_step(0, (), accumulates=False)
    loop.close()
    assert loop.session is session
    assert not session.closed
    session.close()


def test_loop_opens_no_session_again_that_the_script_closed(
    configured: RunningFakeAgent,
) -> None:
    loop = LoopSession("x")
    loop.begin_step(0, (), accumulates=False)
    loop.session.close()
    loop.begin_step(1, (), accumulates=False)
    loop.begin_microbatch(1)
    assert loop.session.closed
    assert len(configured.agent.opened) == 1


def test_loop_attaches_models_once_and_not_beside_the_script(session: SessionJournal) -> None:
    first, second = object(), object()
    loop = LoopSession("x", session)
    for i in range(2):
        loop.begin_step(i, (first, second), accumulates=False)
    assert session.attached == [first, second]
    LoopSession("x", session).begin_step(0, (first,), accumulates=False)
    assert session.attached == [first, second]


def test_loop_numbers_micro_batches_of_accumulating_steps(session: SessionJournal) -> None:
    loop = LoopSession("x", session)
    loop.begin_step(4, (), accumulates=True)
    loop.begin_microbatch(1)
    loop.begin_step(5, (), accumulates=False)
    loop.close()
    assert session.calls == [4, "micro 0", "micro 1", 5]


def test_errors_do_not_reach_the_loop_and_are_logged_once(
    failing_session: SessionJournal, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LoopSession("x", failing_session)
    for i in range(3):
        loop.begin_step(i, (), accumulates=False)
    (record,) = caplog.records
    assert "internal error in LoopSession.begin_step" in record.getMessage()


def test_loss_of_a_strict_plan_reaches_the_loop() -> None:
    @shield
    def lose() -> None:
        raise ExhaustedError("2 tensors were lost and the plan is strict")

    with pytest.raises(ExhaustedError, match="2 tensors"):
        lose()


def test_sessions_of_integrations_are_public() -> None:
    assert rankdump.integrations.accelerate.attach is not None
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = rankdump.integrations.keras
