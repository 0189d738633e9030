"""Who is let in, and for how long a session that nobody connects to is expected."""

from __future__ import annotations

import dataclasses
import sqlite3

import pytest

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import SessionState
from rankdump.errors import ExhaustedError, RejectedError, UnavailableError
from rankdumpd.agent.ingress.push_stream import StreamMailbox
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.records import QuietRank
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.server.metrics import MetricCounters


class House:
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
            meters=MetricCounters(),
            clock=lambda: self.now_s,
            **settings,
        )

    def open(self, rank: int, tree: str = "", **more) -> bytes:
        request = dataclasses.replace(self._request, session_id=f"s{rank}", rank=rank, **more)
        if tree:
            plan = DumpPlan(output=OutputSettings(root=tree))
            request = dataclasses.replace(request, plan_json=plan_to_json(plan))
        return self.registry.open(request).token

    def names(self) -> list[str]:
        return [session.request.session_id for session in self.registry.list_sessions()]


@pytest.fixture
def make_house(tmp_path, make_request):
    houses: list[House] = []

    def make(**settings) -> House:
        houses.append(House(tmp_path, make_request, **settings))
        return houses[-1]

    yield make
    for house in houses:
        house.ledger.close()


def test_who_never_connects_is_forgotten_after_a_minute(make_house):
    """With its row; who comes late opens again, and who came stays."""
    house = make_house()
    late, there = house.open(0), house.open(1)
    house.registry.connect("s1", there, StreamMailbox())
    house.now_s = 60.0
    assert house.names() == ["s0", "s1"]
    house.now_s = 60.1
    assert house.names() == ["s1"]
    assert house.ledger.unfinished() == ["s1"]
    with pytest.raises(UnavailableError, match="open it again"):
        house.registry.connect("s0", late, StreamMailbox())
    house.registry.connect("s0", house.open(0), StreamMailbox())


def test_the_limit_holds_no_one_out_for_ever(make_house):
    """Room that was only asked for is free again."""
    house = make_house(max_sessions=2)
    house.open(0)
    house.open(1)
    with pytest.raises(ExhaustedError, match=r"2 sessions are open, and agent.max_sessions is 2"):
        house.open(2)
    house.now_s = 61.0
    house.open(2)
    assert house.names() == ["s2"]


def test_a_session_that_was_here_is_lost_and_not_forgotten(make_house):
    """It opened again and did not come back."""
    house = make_house()
    mailbox = StreamMailbox()
    session = house.registry.connect("s0", house.open(0), mailbox)
    session.disconnect(mailbox)
    session.claim_frames({1})
    house.open(0)
    house.now_s = 61.0
    assert house.names() == ["s0"]
    assert session.status().state is SessionState.LOST


def test_a_ledger_that_cannot_be_written_keeps_a_row_too_many(make_house, monkeypatch, caplog):
    """Nobody who asks how things stand hears of it."""
    house = make_house()
    house.open(0)

    def fail(session_id: str) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(house.ledger, "withdraw", fail)
    house.now_s = 61.0
    assert house.names() == []
    assert "session s0 stays in the ledger: disk full" in caplog.text


def test_one_id_with_two_trees_is_refused(make_house, tmp_path):
    """Two jobs at once whose launcher gives both one name; one after another is no fault."""
    house = make_house()
    mailbox, other = StreamMailbox(), str(tmp_path / "other")
    session = house.registry.connect("s0", house.open(0), mailbox)
    with pytest.raises(RejectedError, match=r"'job' dumps into .*dump, .* names .*other: .*JOB_ID"):
        house.open(1, tree=other)
    house.open(1, tree=other, job_id="another")
    session.disconnect(mailbox)
    house.open(2, tree=other)


def test_a_session_is_quiet_when_all_that_came_is_committed(make_house):
    """Not while a frame is under way or within a record, nor while its rank may come back."""
    house = make_house()
    mailbox = StreamMailbox()
    token = house.open(0)
    session = house.registry.connect("s0", token, mailbox)
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
    house.open(0)
    assert session.quiet_rank is None
