"""The agent finder: an agent in the environment, on this host, or embedded."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rankdump._core.daemon_endpoint import DEFAULT_AGENT_ADDRESS
from rankdump._session.agent_finder import AgentAddress, AgentFinder, explain_missing_agent
from rankdump.errors import UnavailableError

ABSENT = "no agent runs on this host"


class FakeLease:
    """A share in a daemon that never runs."""

    address, started_it = "unix:/brought", True
    closed = waited = 0
    fault = ""

    def close(self) -> str:
        self.closed += 1
        return ""

    def is_starting(self) -> bool:
        if self.fault:
            raise UnavailableError(self.fault)
        return True

    def wait_until_serving(self) -> bool:
        self.waited += 1
        return not self.is_starting()


class FinderRig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, reason: str = ABSENT) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.share = FakeLease()
        self.at_exit: list[object] = []
        monkeypatch.setattr("atexit.register", lambda *call: self.at_exit.append(call))
        self.finder = AgentFinder(self.lease, lambda address: reason)  # pyright: ignore[reportArgumentType]

    def lease(self, job_id: str, merges: bool) -> FakeLease:
        self.asked.append((job_id, merges))
        return self.share


def test_finder_returns_the_agent_in_the_environment(monkeypatch):
    """A named agent is used even if it does not answer; there is no other one instead."""
    rig = FinderRig(monkeypatch)
    assert rig.finder.find({"RANKDUMP_AGENT": "unix:/named"}) == AgentAddress("unix:/named")
    assert rig.asked == []


def test_finder_returns_the_agent_of_this_host(monkeypatch):
    rig = FinderRig(monkeypatch, reason="")
    assert rig.finder.find({}) == AgentAddress(DEFAULT_AGENT_ADDRESS)
    assert rig.asked == []


def test_finder_starts_an_embedded_agent_once_and_logs_it(monkeypatch, caplog):
    """The agent serves all sessions of the process until it ends."""
    rig = FinderRig(monkeypatch)
    for _ in range(2):
        assert rig.finder.find({"RANKDUMP_JOB_ID": "a"}) == AgentAddress("unix:/brought")
    assert rig.asked == [("a", True)]
    assert caplog.messages == [
        f"rankdump: {ABSENT}: started an agent for this job at unix:/brought; it ends with the job"
    ]
    assert len(rig.at_exit) == 1


def test_finder_that_joins_an_embedded_agent_logs_nothing(monkeypatch, caplog):
    rig = FinderRig(monkeypatch)
    rig.share.started_it = False
    rig.finder.find({"RANKDUMP_JOB_ID": "a"})
    assert caplog.messages == []


def test_finder_warns_that_ranks_on_several_hosts_get_no_merged_order(monkeypatch, caplog):
    """Otherwise coordinators of several hosts would overwrite each other's order."""
    rig = FinderRig(monkeypatch)
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANKDUMP_JOB_ID": "a"}
    rig.finder.find(environ)
    assert rig.asked == [("a", False)]
    assert "the execution orders of the ranks are not merged" in caplog.text


def test_finder_starts_no_agent_if_embedded_is_false(monkeypatch):
    rig = FinderRig(monkeypatch)
    found = rig.finder.find({}, embedded=False)
    assert found == AgentAddress(DEFAULT_AGENT_ADDRESS, f"{ABSENT}, and rankdump.embedded is false")
    assert rig.asked == []


def test_finder_reports_an_agent_that_cannot_be_started_as_missing(monkeypatch):
    def refuse(job_id: str, merges: bool) -> FakeLease:
        raise UnavailableError("no daemon can be started")

    rig = FinderRig(monkeypatch)
    finder = AgentFinder(refuse, lambda address: ABSENT)  # pyright: ignore[reportArgumentType]
    assert finder.find({}).missing == f"{ABSENT}, and no daemon can be started"
    assert rig.at_exit == []


def test_prepared_agent_is_used_without_waiting_for_it(monkeypatch, caplog):
    """An API dump starts its agent at `api_dump_init`; no step waits until it serves."""
    rig, environ = FinderRig(monkeypatch), {"RANKDUMP_JOB_ID": "a"}
    for _ in range(2):
        rig.finder.prepare(environ)
    assert (rig.asked, caplog.messages) == ([("a", True)], [])
    found = rig.finder.find(environ, waits=False)
    assert found == AgentAddress("unix:/brought")
    assert found.is_starting is not None
    assert found.is_starting()
    assert (rig.asked, rig.share.waited, len(rig.at_exit)) == ([("a", True)], 0, 1)
    assert "started an agent for this job" in caplog.text


def test_nothing_is_prepared_where_an_agent_runs(monkeypatch):
    rig = FinderRig(monkeypatch)
    rig.finder.prepare({"RANKDUMP_AGENT": "unix:/named"})
    assert rig.asked == []
    rig = FinderRig(monkeypatch, reason="")
    rig.finder.prepare({})
    assert rig.asked == []


def test_prepared_agent_of_another_job_is_released(monkeypatch):
    """A process without a launcher's variables learns its job from its process group, later on."""
    rig = FinderRig(monkeypatch)
    rig.finder.prepare({"RANKDUMP_JOB_ID": "a"})
    rig.finder.find({"RANKDUMP_JOB_ID": "b"}, waits=False)
    assert (rig.asked, rig.share.closed) == ([("a", True), ("b", True)], 1)
    rig.finder.find({"RANKDUMP_JOB_ID": "c"})
    assert len(rig.asked) == 2, "sessions of one process share one agent"


def test_prepared_agent_that_ended_is_missing(monkeypatch):
    rig, environ = FinderRig(monkeypatch), {"RANKDUMP_JOB_ID": "a"}
    rig.finder.prepare(environ)
    rig.share.fault = "the embedded daemon ended before it was ready"
    found = rig.finder.find(environ, waits=False)
    assert found.missing == f"{ABSENT}, and the embedded daemon ended before it was ready"
    assert rig.share.closed == 1
    rig.share.fault = ""
    assert rig.finder.find(environ).missing == ""


def test_missing_agent_is_explained_by_its_socket(socket_folder: Path):
    """A killed agent's socket counts as missing; a busy agent's socket does not."""
    path = socket_folder / "agent.sock"
    address = f"unix:{path}"
    assert explain_missing_agent(address) == ABSENT
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert explain_missing_agent(address) == ABSENT
        listener.listen()
        assert explain_missing_agent(address) == ""


def test_finder_reports_an_agent_that_this_user_may_not_use(monkeypatch, socket_folder: Path):
    def refuse(self: socket.socket, path: str) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert "not permitted to use the agent of this host" in explain_missing_agent("unix:/a")
