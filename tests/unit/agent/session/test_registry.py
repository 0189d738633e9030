"""Tests of SessionRegistry: admission, and expiry of sessions that never connect."""

from __future__ import annotations

import dataclasses
import os
import socket
import sqlite3
import subprocess

import pytest

from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import SessionState
from rankdump.errors import ExhaustedError, RejectedError, UnavailableError
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.records import QuietRank
from rankdumpd.agent.session.rank_session import StreamMailbox
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.server.metrics import MetricCounters


class RegistryRig:
    """A registry with a clock and a ledger."""

    def __init__(self, folder, make_request, **settings) -> None:
        self.now_s = 0.0
        plan = plan_to_json(DumpPlan(output=OutputSettings(root=str(folder / "dump"))))
        self._request: SessionRequest = make_request(plan_json=plan, world_size=9)
        self.ledger = AgentLedger(folder / "state")
        self.registry = SessionRegistry(
            self.ledger,
            max_record_bytes=1,
            capacity_fault=lambda live: "",
            counters=MetricCounters(),
            clock=lambda: self.now_s,
            **settings,
        )

    def open(self, rank: int, tree: str = "", **more) -> bytes:
        about = {"session_id": f"s{rank}", "rank": rank} | more
        request = dataclasses.replace(self._request, **about)
        if tree:
            plan = DumpPlan(output=OutputSettings(root=tree))
            request = dataclasses.replace(request, plan_json=plan_to_json(plan))
        return self.registry.open(request).token

    def names(self) -> list[str]:
        return [session.request.session_id for session in self.registry.list_sessions()]


@pytest.fixture
def make_rig(tmp_path, make_request):
    rigs: list[RegistryRig] = []

    def make(**settings) -> RegistryRig:
        rigs.append(RegistryRig(tmp_path, make_request, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.ledger.close()


def test_registry_forgets_session_that_never_connects(make_rig):
    """Its row is removed and a late connection rejected; connected sessions stay."""
    rig = make_rig()
    late, there = rig.open(0), rig.open(1)
    rig.registry.connect("s1", there, StreamMailbox())
    rig.now_s = 60.0
    assert rig.names() == ["s0", "s1"]
    rig.now_s = 60.1
    assert rig.names() == ["s1"]
    assert rig.ledger.unfinished() == ["s1"]
    with pytest.raises(UnavailableError, match="open it again"):
        rig.registry.connect("s0", late, StreamMailbox())
    rig.registry.connect("s0", rig.open(0), StreamMailbox())


def test_registry_numbers_the_attempts_of_a_rank(make_rig, tmp_path):
    """By processes and the launcher's count; a session that opens again keeps its number."""
    rig = make_rig()

    def attempt(name: str, **more) -> int:
        rig.open(0, session_id=name, **more)
        return rig.registry.get(name).status().attempt

    assert attempt("first", pid=1) == 0
    assert attempt("second", pid=2) == 1
    assert attempt("third", pid=3, attempt=5) == 5
    assert attempt("first", pid=1) == 0
    assert attempt("within", pid=3, attempt=5) == 5
    rig.open(1, pid=4)
    assert rig.registry.get("s1").status().attempt == 0
    assert rig.ledger.find("second").request.attempt == 1
    found = (each.status for each in read_tree_sessions(tmp_path / "dump"))
    begun = {each.session_id: each.attempt for each in found}
    assert begun == {"first": 0, "second": 1, "third": 5, "within": 5, "s1": 0}


def test_session_limit_ignores_expired_sessions(make_rig):
    rig = make_rig(max_sessions=2)
    rig.open(0)
    rig.open(1)
    with pytest.raises(ExhaustedError, match=r"2 sessions are open, and agent.max_sessions is 2"):
        rig.open(2)
    rig.now_s = 61.0
    rig.open(2)
    assert rig.names() == ["s2"]


def test_reopened_session_that_does_not_connect_is_lost(make_rig):
    """It opened again and did not come back."""
    rig = make_rig()
    mailbox = StreamMailbox()
    session = rig.registry.connect("s0", rig.open(0), mailbox)
    session.disconnect(mailbox)
    session.claim_frames({1})
    rig.open(0)
    rig.now_s = 61.0
    assert rig.names() == ["s0"]
    assert session.status().state is SessionState.LOST


def test_failing_ledger_keeps_row_of_forgotten_session(make_rig, monkeypatch, caplog):
    """The failure is logged, and status calls do not fail."""
    rig = make_rig()
    rig.open(0)

    def fail(session_id: str) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(rig.ledger, "withdraw", fail)
    rig.now_s = 61.0
    assert rig.names() == []
    assert "session s0 stays in the ledger: disk full" in caplog.text


def test_registry_rejects_second_tree_of_a_job(make_rig, tmp_path):
    """Two jobs at once whose launcher gives both one name; one after another is no fault."""
    rig = make_rig()
    mailbox, other = StreamMailbox(), str(tmp_path / "other")
    session = rig.registry.connect("s0", rig.open(0), mailbox)
    with pytest.raises(RejectedError, match=r"'job' dumps into .*dump, .* names .*other: .*JOB_ID"):
        rig.open(1, tree=other)
    rig.open(1, tree=other, job_id="another")
    session.disconnect(mailbox)
    rig.open(2, tree=other)


def test_rank_is_opened_for_one_living_process_at_a_time(make_rig):
    """Of two jobs with one id that begin together, one must not end the session of the other."""
    rig, host = make_rig(), socket.gethostname()
    first = rig.open(0, host=host, pid=os.getpid())
    rig.open(1, host=host, pid=os.getppid())
    with pytest.raises(UnavailableError, match=f"process {os.getpid()} on host .* rank 0 of job"):
        rig.open(0, session_id="other", host=host, pid=os.getppid())
    assert rig.ledger.unfinished() == ["s0", "s1"]
    rig.registry.connect("s0", first, StreamMailbox())
    with pytest.raises(RejectedError, match="already connected"):
        rig.open(0, session_id="other", host=host, pid=os.getppid())


def test_process_that_died_before_it_connected_gives_its_rank_up(make_rig):
    rig, host = make_rig(), socket.gethostname()
    with subprocess.Popen(["true"]) as dead:
        pass
    rig.open(0, host=host, pid=dead.pid)
    rig.open(0, session_id="next", host=host, pid=os.getpid())
    assert rig.names() == ["s0", "next"]


def test_session_is_quiet_when_all_frames_are_committed(make_rig):
    """Not while a frame is under way or within a record, nor while its rank may come back."""
    rig = make_rig()
    mailbox = StreamMailbox()
    token = rig.open(0)
    session = rig.registry.connect("s0", token, mailbox)
    assert session.quiet_rank is None
    mailbox.at_rest = True
    assert session.quiet_rank == QuietRank("job", 0, "s0", 0)
    session.claim_frames({1})
    assert session.quiet_rank is None
    session.release_frames({1}, "")
    assert session.quiet_rank == QuietRank("job", 0, "s0", 0)
    session.disconnect(mailbox)
    assert session.quiet_rank is None
    session.mark_lost()
    assert session.quiet_rank == QuietRank("job", 0, "s0", 0)
    rig.open(0)
    assert session.quiet_rank is None
