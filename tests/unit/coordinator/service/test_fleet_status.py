"""Metrics and totals of the fleet: which agents they count."""

from __future__ import annotations

import dataclasses

import pytest

from rankdump._core.status import AgentLoad, SessionState, SessionStatus
from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.reports.job import ABANDONED_JOB_TIMEOUT_S
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import (
    build_status_view,
    collect_fleet_samples,
    select_jobs,
)

LOAD = AgentLoad(2, 20, 500, 1000)


class Fleet:
    """Agents with one rank each, which report to one store."""

    def __init__(self) -> None:
        self.store = ReportStore(deadline_s=300.0)
        self.sequences: dict[str, int] = {}

    def report(
        self, name: str, job: str, rank: int, state: SessionState = SessionState.OPEN
    ) -> None:
        number = self.sequences[name] = self.sequences.get(name, 0) + 1
        status = SessionStatus(job, f"{job}{rank}", rank, 2, rank, name, 1, state)
        if state is SessionState.CLOSED:
            status = dataclasses.replace(status, last_events_known=True)
        self.store.add_report(
            AgentReport(name, number, sessions=(status,), load=LOAD, roots={job: "/tree"}),
            now_s=0.0,
        )

    def connect(self, name: str, change: int = 1) -> None:
        self.store.count_stream(name, change, now_s=0.0)

    def count_agents(self, *, now_s: float = 10.0) -> dict[str, float]:
        return {
            each.labels["state"]: each.value
            for each in collect_fleet_samples(self.store.build_fleet_view(now_s=now_s))
            if each.name == "rankdump_coordinator_agents"
        }

    def load(self, job_id: str = "") -> AgentLoad:
        view = self.store.build_fleet_view(now_s=10.0)
        return build_status_view(view, select_jobs(view, job_id), "").load


@pytest.fixture
def fleet() -> Fleet:
    """Agents a and b with a rank of a job each, and c with one of another job."""
    made = Fleet()
    for rank, name in enumerate("ab"):
        made.connect(name)
        made.report(name, "j", rank)
    made.connect("c")
    made.report("c", "k", 0)
    return made


def test_agent_without_connection_is_silent_while_its_sessions_are_open(fleet: Fleet):
    assert fleet.count_agents() == {"connected": 3, "silent": 0}
    fleet.connect("b", -1)
    assert fleet.count_agents() == {"connected": 2, "silent": 1}


def test_agent_whose_sessions_have_ended_is_gone_and_not_silent(fleet: Fleet):
    fleet.report("b", "j", 1, SessionState.CLOSED)
    fleet.connect("b", -1)
    assert fleet.count_agents() == {"connected": 2, "silent": 0}


def test_agents_of_abandoned_job_are_not_silent(fleet: Fleet):
    """All hosts of a job may end without a word."""
    fleet.connect("a", -1)
    fleet.connect("b", -1)
    assert fleet.count_agents()["silent"] == 2
    assert fleet.count_agents(now_s=ABANDONED_JOB_TIMEOUT_S)["silent"] == 0


def test_restored_agent_is_silent_until_it_connects(fleet: Fleet):
    """A coordinator that was restarted knows from its state whose sessions are open."""
    rows = fleet.store.collect_changes(now_s=0.0, now_us=0)
    again = Fleet()
    again.store.restore(
        sorted(rows.values(), key=lambda row: type(row).__name__), now_s=0.0, now_us=0
    )
    assert again.count_agents() == {"connected": 0, "silent": 3}
    again.connect("a")
    assert again.count_agents() == {"connected": 1, "silent": 2}


def test_totals_are_those_of_connected_agents_of_the_job(fleet: Fleet):
    assert fleet.load() == AgentLoad(6, 60, 500, 1000)
    assert fleet.load("j") == AgentLoad(4, 40, 500, 1000)
    fleet.connect("b", -1)
    assert fleet.load("j") == LOAD
    fleet.connect("a", -1)
    assert fleet.load("j") == AgentLoad()
