"""What is ready, what is late, what is a repeat; on a clock that the test sets."""

from __future__ import annotations

import pytest

from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.status import (
    IterationStatus,
    Load,
    RankEvents,
    SessionState,
    SessionStatus,
)
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.gather.job import MAX_FINDINGS
from rankdumpd.coordinator.values import IterationView, Report

WORLD = ProcessGroup("world", (0, 1))


class Agent:
    """Numbers reports the way an agent does."""

    def __init__(self, gather: Gather, job: str = "j", world: int = 2) -> None:
        self.gather, self.job, self.world, self.sequence = gather, job, world, 0

    def report(self, *, now_s: float = 0.0, **parts) -> int:
        self.sequence += 1
        roots = {self.job: f"/tree/{self.job}"}
        report = Report(f"agent of {self.job}", self.sequence, roots=roots, **parts)
        return self.gather.take(report, now_s=now_s)

    def session(self, rank: int, state=SessionState.OPEN, **more) -> SessionStatus:
        name = more.pop("name", f"s{rank}")
        return SessionStatus(self.job, name, rank, self.world, rank, "host", 1, state, **more)

    def events(self, rank: int, *iterations: int, groups=()) -> tuple[RankEvents, EventColumns]:
        events = [
            Event(0, iteration, at, at, f"Op{at}", EventKind.OPERATOR, at, at)
            for at, iteration in enumerate(iterations)
        ]
        return RankEvents(self.job, rank), EventColumns.of(events, groups)

    def done(self, rank: int, iteration: int, **more) -> IterationStatus:
        return IterationStatus(self.job, more.pop("name", f"s{rank}"), rank, iteration, True)

    def everything(self, iteration: int, *, now_s: float = 0.0) -> None:
        """Report one iteration that all ranks finished."""
        ranks = range(self.world)
        self.report(
            now_s=now_s,
            sessions=tuple(self.session(rank) for rank in ranks),
            events=tuple(self.events(rank, iteration) for rank in ranks),
            iterations=tuple(self.done(rank, iteration) for rank in ranks),
        )


@pytest.fixture
def gather() -> Gather:
    return Gather(deadline_s=30.0)


@pytest.fixture
def agent(gather) -> Agent:
    it = Agent(gather)
    it.report(sessions=(it.session(0), it.session(1)))
    return it


def names(view: IterationView) -> dict[int, list[str]]:
    return {
        rank: [event.name for batch in batches for event in batch.events()]
        for rank, batches in view.events.items()
    }


def test_an_iteration_is_ready_when_every_rank_has_finished_it(gather, agent) -> None:
    """One rank of two is not enough; with the second it is handed out once, with all events."""
    agent.report(events=(agent.events(0, 4), agent.events(1, 4)), iterations=(agent.done(0, 4),))
    assert gather.next_ready(now_s=29.9) is None
    agent.report(iterations=(agent.done(1, 4),))
    view = gather.next_ready(now_s=29.9)
    assert (view.job_id, view.iteration, view.root) == ("j", 4, "/tree/j")
    assert names(view) == {0: ["Op0"], 1: ["Op0"]}
    assert (view.late, view.late_count, view.excluded) == ((), 0, frozenset())
    assert gather.next_ready(now_s=29.9) is None
    assert gather.backlog == 0


@pytest.mark.parametrize(
    ("state", "excluded", "ready"),
    [
        (SessionState.OPEN, "", False),
        (SessionState.LOST, "", False),
        (SessionState.CLOSED, "", True),
        (SessionState.OPEN, "support_device [0] excludes this rank's device 1", True),
    ],
)
def test_a_rank_that_will_send_no_more_is_not_waited_for(
    gather, agent, state, excluded, ready
) -> None:
    """Closed and excluded ranks do not hold an iteration up; lost ones may come back."""
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    agent.report(sessions=(agent.session(1, state, excluded=excluded),))
    view = gather.next_ready(now_s=1.0)
    assert (view is not None) is ready
    if view is not None:
        assert view.excluded == (frozenset({1}) if excluded else frozenset())


def test_after_the_deadline_it_is_handed_out_with_those_who_are_late(gather, agent) -> None:
    """The deadline runs from the first report of the iteration, not from the latest."""
    agent.report(now_s=100.0, events=(agent.events(1, 4),))
    agent.report(now_s=129.0, events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    assert gather.next_ready(now_s=129.9) is None
    view = gather.next_ready(now_s=130.0)
    assert (view.late, view.late_count) == ((1,), 1)


def test_iterations_come_in_rising_order_unless_one_is_overdue(gather, agent) -> None:
    """A finished iteration waits for the one before it, at most until the deadline."""
    agent.report(now_s=0.0, events=(agent.events(0, 1),))
    agent.everything(3, now_s=1.0)
    agent.everything(2, now_s=2.0)
    assert gather.next_ready(now_s=29.0) is None
    overdue = [gather.next_ready(now_s=30.0).iteration for _ in range(3)]
    assert overdue == [1, 2, 3]


def test_an_overdue_iteration_does_not_wait_for_a_lower_one(gather, agent) -> None:
    """What came first is published first when its time is up."""
    agent.report(now_s=0.0, events=(agent.events(0, 5),))
    agent.report(now_s=10.0, events=(agent.events(0, 4),))
    assert gather.next_ready(now_s=31.0).iteration == 5
    assert gather.next_ready(now_s=31.0) is None


def test_every_hands_out_what_is_not_complete(gather, agent) -> None:
    """At the end all that has events goes, in rising order."""
    agent.report(events=(agent.events(0, 6, 5, 5),))
    views = [gather.next_ready(now_s=0.0, every=True) for _ in range(3)]
    assert [view and view.iteration for view in views] == [5, 6, None]
    assert names(views[0]) == {0: ["Op1", "Op2"]}


def test_a_repeated_report_changes_nothing(gather, agent) -> None:
    """The same number of the same agent is answered and not taken again."""
    report = Report("a", 7, events=(agent.events(0, 4),))
    assert gather.take(report, now_s=0.0) == 7
    assert gather.take(report, now_s=0.0) == 7
    assert gather.take(Report("a", 3, events=(agent.events(0, 9),)), now_s=0.0) == 7
    assert gather.take(Report("b", 3, events=(agent.events(1, 4),)), now_s=0.0) == 3
    (view,) = gather.pending("j")
    assert names(view) == {0: ["Op0"], 1: ["Op0"]}


def test_two_jobs_do_not_mix(gather, agent) -> None:
    """Each job has its own ranks, trees and readiness; the latest is the last to report."""
    other = Agent(gather, job="k", world=1)
    other.everything(4)
    agent.report(events=(agent.events(0, 4),))
    assert gather.fleet().latest == "j"
    view = gather.next_ready(now_s=0.0)
    assert (view.job_id, view.root) == ("k", "/tree/k")
    assert gather.next_ready(now_s=0.0) is None
    assert [view.job_id for view in gather.pending("j")] == ["j"]
    assert gather.pending("unheard of") == []
    assert set(gather.fleet().jobs) == {"j", "k"}


def test_events_after_publication_are_counted_unless_they_are_repeats(gather, agent) -> None:
    """A late rank's events are a finding with their number; a finished rank only repeats."""
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    assert gather.next_ready(now_s=99.0).late == (1,)
    agent.report(events=(agent.events(0, 4),))
    assert gather.fleet().jobs["j"].findings == ()
    agent.report(events=(agent.events(1, 4, 4),))
    agent.report(events=(agent.events(1, 4),))
    (finding,) = gather.fleet().jobs["j"].findings
    assert "iteration 4: 3 events of rank 1" in finding
    assert gather.backlog == 0


def test_a_rank_that_starts_over_may_report_its_iterations_again(gather, agent) -> None:
    """A new session of a rank begins a new count; the old session's balances do not speak."""
    agent.everything(0)
    assert gather.next_ready(now_s=0.0).iteration == 0
    again = tuple(agent.session(rank, name=f"again{rank}") for rank in (0, 1))
    agent.report(sessions=again, events=(agent.events(0, 0),))
    assert gather.next_ready(now_s=0.0) is None
    agent.report(iterations=tuple(agent.done(rank, 0, name=f"again{rank}") for rank in (0, 1)))
    assert gather.next_ready(now_s=0.0).iteration == 0


def test_without_sessions_nothing_is_complete_and_late_events_still_count(gather) -> None:
    """Events of ranks nobody introduced wait for the deadline."""
    agent = Agent(gather)
    agent.report(events=(agent.events(0, 4),))
    assert gather.next_ready(now_s=1.0) is None
    assert gather.next_ready(now_s=30.0).late_count == 0
    agent.report(events=(agent.events(0, 4),))
    assert "1 events of rank 0" in gather.fleet().jobs["j"].findings[0]


def test_without_a_tree_an_iteration_waits_for_the_deadline(gather) -> None:
    """A root may come with a later report; without one the iteration is not kept for ever."""
    agent = Agent(gather, world=1)
    report = Report("a", 1, (agent.session(0),), (agent.done(0, 0),), (agent.events(0, 0),))
    gather.take(report, now_s=0.0)
    assert gather.next_ready(now_s=1.0) is None
    assert gather.next_ready(now_s=30.0).root == ""


def test_groups_declared_once_are_known_in_later_batches(gather, agent) -> None:
    """A rank need not repeat its communicators with every batch."""
    agent.report(events=(agent.events(0, 4, groups=(WORLD,)),))
    agent.report(events=(agent.events(0, 5, 6),))
    for view in gather.pending("j"):
        assert [batch.groups for batch in view.events[0]] == [(WORLD,)]


def test_the_fleet_adds_up_loads_and_keeps_the_newest_state(gather, agent) -> None:
    """Queues add up over agents, the fullest disk counts, a session is listed once."""
    gather.take(Report("a", 1, load=Load(1, 10, 500, 1000)), now_s=0.0)
    gather.take(Report("b", 1, load=Load(2, 20, 300, 2000)), now_s=0.0)
    agent.report(sessions=(agent.session(0, SessionState.CLOSED),), load=Load(0, 0, 900, 1000))
    fleet = gather.fleet()
    assert fleet.load == Load(3, 30, 300, 2000)
    states = {session.session_id: session.state for session in fleet.jobs["j"].sessions}
    assert states == {"s0": SessionState.CLOSED, "s1": SessionState.OPEN}


def test_findings_are_bounded_and_the_rest_is_counted(gather, agent) -> None:
    """A job that finds without end does not fill the memory, and says how many more."""
    gather.settle("j", findings=["x"] * (MAX_FINDINGS + 5))
    job = gather.fleet().jobs["j"]
    assert len(job.findings) == MAX_FINDINGS + 1
    assert job.findings[-1].startswith("5 more findings")
