"""Readiness, late events and acknowledgements of the report store, on a test clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.event_lists import list_events

from rankdump._core.black_box import FaultKind, RankStep
from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
    RankEvent,
    UnseenCollectives,
)
from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
)
from rankdump._core.status import (
    AgentLoad,
    ClockEstimate,
    EventSource,
    IterationStatus,
    MergeStatus,
    SessionState,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.status_messages import finding_from_wire, finding_to_wire
from rankdump.errors import ExhaustedError
from rankdumpd.coordinator.fleet_views import (
    AgentReport,
    IterationView,
    PublicationResult,
    PublishedOffsets,
    ReportAnswer,
    ReportedRankCoverage,
)
from rankdumpd.coordinator.reports import job as jobs
from rankdumpd.coordinator.reports import report_store
from rankdumpd.coordinator.reports import report_store as rooms
from rankdumpd.coordinator.reports.job import CLOSED_JOB_TIMEOUT_S, MAX_FINDINGS
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.state import AgentRow, StateRow

WORLD = ProcessGroup("world", (0, 1))
DEADLINE_S = 300.0
NOW_US = 10**15


class Agent:
    """Agent that numbers its items."""

    def __init__(self, gather: ReportStore, job: str = "j", world: int = 2, name: str = "") -> None:
        self.gather, self.job, self.world, self.sequence = gather, job, world, 0
        self.name = name or f"agent of {job}"

    def report(self, *, now_s: float = 0.0, **parts) -> ReportAnswer:
        roots = parts.pop("roots", {self.job: f"/tree/{self.job}"})
        report = AgentReport(self.name, 0, roots=roots, **parts)
        self.sequence += report.items
        sequence = self.sequence if report.items else 0
        return self.gather.add_report(dataclasses.replace(report, sequence=sequence), now_s=now_s)

    def session(self, rank: int, state=SessionState.OPEN, **more) -> SessionStatus:
        name, host = more.pop("name", f"s{rank}"), more.pop("host", "host")
        return SessionStatus(self.job, name, rank, self.world, rank, host, 1, state, **more)

    def events(
        self, rank: int, *iterations: int, groups=(), session: str = "", end=None, first: int = 0
    ) -> tuple[EventSource, EventColumns]:
        events = [
            RankEvent(
                0, iteration, at, at if end is None else end, f"Op{at}", EventKind.OPERATOR, at, at
            )
            for at, iteration in enumerate(iterations, first)
        ]
        return EventSource(self.job, rank, session), EventColumns.from_events(events, groups)

    def done(self, rank: int, iteration: int, **more) -> IterationStatus:
        name = more.pop("name", f"s{rank}")
        return IterationStatus(self.job, name, rank, iteration, True, **more)

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
def gather() -> ReportStore:
    return ReportStore(deadline_s=DEADLINE_S)


@pytest.fixture
def agent(gather) -> Agent:
    it = Agent(gather)
    it.report(sessions=(it.session(0), it.session(1)))
    return it


def names(view: IterationView) -> dict[int, list[str]]:
    return {
        rank: [event.name for batch in batches for event in list_events(batch)]
        for rank, batches in view.events.items()
    }


def published(gather: ReportStore, *, now_s: float = 0.0, **more) -> int | None:
    """Publish one iteration; return its number."""
    view = gather.take_next_ready(now_s=now_s, every=more.pop("every", False))
    if view is None:
        return None
    written = more.pop("written", True)
    settled = PublicationResult(
        PublishedOffsets(view.root, {"a": 1}, 1), written, more.pop("findings", ()), "{}"
    )
    gather.finish_publication(view.job_id, settled)
    return view.iteration


def commit(gather: ReportStore, *, now_s: float = 0.0) -> list[StateRow]:
    rows = gather.collect_changes(now_s=now_s, now_us=NOW_US)
    gather.mark_committed(rows.values())
    return list(rows.values())


def remembered(*commits: list[StateRow]) -> ReportStore:
    """Return the store of a new process, restored from these rows."""
    order = ("AgentRow", "JobRow", "PublishedIterationRow")
    rows = [row for each in commits for row in each]
    rows.sort(key=lambda row: order.index(k) if (k := type(row).__name__) in order else 9)
    gather = ReportStore(deadline_s=DEADLINE_S)
    gather.restore(rows, now_s=0.0, now_us=NOW_US)
    return gather


def findings(gather: ReportStore, job: str = "j") -> tuple[Finding, ...]:
    return gather.build_fleet_view(now_s=0.0).jobs[job].findings


def test_store_bounds_agents_and_jobs(gather, monkeypatch) -> None:
    """Known agents and jobs can still report."""
    monkeypatch.setattr(report_store, "MAX_AGENTS", 1)
    monkeypatch.setattr(rooms, "MAX_JOBS", 1)
    known = Agent(gather)
    known.report(sessions=(known.session(0),))
    for stranger in (Agent(gather, name="another"), Agent(gather, job="k", name=known.name)):
        stranger.sequence = known.sequence
        with pytest.raises(ExhaustedError, match=r"1 (agents|jobs) have reported"):
            stranger.report(sessions=(stranger.session(0),))
    known.report(sessions=(known.session(1),))
    assert gather.list_job_ids() == ["j"]


def test_iteration_is_ready_when_every_rank_has_finished_it(gather, agent) -> None:
    """One rank of two is not enough; afterwards it is returned once, with all events."""
    agent.report(events=(agent.events(0, 4), agent.events(1, 4)), iterations=(agent.done(0, 4),))
    assert gather.take_next_ready(now_s=29.9) is None
    agent.report(iterations=(agent.done(1, 4, first_position=3, last_position=9),))
    view = gather.take_next_ready(now_s=29.9)
    assert (view.job_id, view.iteration, view.root) == ("j", 4, "/tree/j")
    assert names(view) == {0: ["Op0"], 1: ["Op0"]}
    assert (view.late, view.late_count, view.excluded) == ((), 0, frozenset())
    assert (view.spans, view.clocks) == ({1: (3, 9)}, {0: "host", 1: "host"})
    assert not view.provisional
    assert gather.take_next_ready(now_s=29.9) is None
    assert gather.backlog == 1  # until it is settled
    gather.finish_publication("j", PublicationResult(None, False, (), ""))
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
def test_closed_and_excluded_ranks_do_not_delay_an_iteration(
    gather, agent, state, excluded, ready
) -> None:
    """Lost sessions do, because they may continue."""
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    agent.report(sessions=(agent.session(1, state, excluded=excluded),))
    view = gather.take_next_ready(now_s=1.0)
    assert (view is not None) is ready
    if view is not None:
        assert view.excluded == (frozenset({1}) if excluded else frozenset())


def test_iteration_is_ready_after_deadline_with_late_ranks(gather, agent) -> None:
    """The deadline starts at the last report about the iteration."""
    agent.report(now_s=100.0, events=(agent.events(1, 4),))
    agent.report(now_s=350.0, events=(agent.events(0, 4),))
    agent.report(now_s=500.0, iterations=(agent.done(0, 4),))
    assert gather.take_next_ready(now_s=799.9) is None
    view = gather.take_next_ready(now_s=800.0)
    assert (view.late, view.late_count) == ((1,), 1)


def test_iteration_of_closed_job_is_ready_after_a_moment(gather) -> None:
    """Not all ranks of the world ever connected."""
    agent = Agent(gather, world=4)
    agent.report(sessions=(agent.session(0),), events=(agent.events(0, 4, 5),))
    agent.report(sessions=(agent.session(0, SessionState.CLOSED),))
    assert gather.take_next_ready(now_s=CLOSED_JOB_TIMEOUT_S - 0.1) is None
    assert [published(gather, now_s=CLOSED_JOB_TIMEOUT_S) for _ in range(3)] == [4, 5, None]


def test_iterations_are_ready_in_rising_order_unless_overdue(gather, agent) -> None:
    """A finished iteration waits for the one before it, at most until the deadline."""
    agent.report(now_s=0.0, events=(agent.events(0, 1),))
    agent.everything(3, now_s=1.0)
    agent.everything(2, now_s=2.0)
    assert gather.take_next_ready(now_s=299.0) is None
    assert [published(gather, now_s=300.0) for _ in range(3)] == [1, 2, 3]


def test_overdue_iteration_does_not_wait_for_lower_one(gather, agent) -> None:
    agent.report(now_s=0.0, events=(agent.events(0, 5),))
    agent.report(now_s=10.0, events=(agent.events(0, 4),))
    assert published(gather, now_s=301.0) == 5
    assert published(gather, now_s=301.0) is None


def test_take_next_ready_with_every_returns_incomplete_iterations(gather, agent) -> None:
    """In rising order."""
    agent.report(events=(agent.events(0, 6, 5, 5),))
    assert names(gather.list_unpublished("j")[1][0]) == {0: ["Op1", "Op2"]}
    assert [published(gather, every=True) for _ in range(3)] == [5, 6, None]


def test_repeated_report_changes_nothing(gather, agent) -> None:
    """The sequence numbers of another agent are independent."""
    one = AgentReport("a", 7, events=(agent.events(0, 4),))
    assert gather.add_report(one, now_s=0.0).received == 7
    assert gather.add_report(one, now_s=0.0).received == 7
    assert (
        gather.add_report(AgentReport("a", 3, events=(agent.events(0, 9),)), now_s=0.0).received
        == 7
    )
    assert gather.add_report(AgentReport("a", 0), now_s=0.0).received == 7
    assert (
        gather.add_report(AgentReport("b", 3, events=(agent.events(1, 4),)), now_s=0.0).received
        == 3
    )
    (view,) = gather.list_unpublished("j")[1]
    assert names(view) == {0: ["Op0"], 1: ["Op0"]}
    assert view.provisional


def test_store_separates_jobs(gather, agent) -> None:
    """Each job has its own ranks, trees and readiness; the latest one reported last."""
    other = Agent(gather, job="k", world=1)
    other.everything(4)
    agent.report(events=(agent.events(0, 4),))
    assert gather.build_fleet_view(now_s=0.0).latest == "j"
    view = gather.take_next_ready(now_s=0.0)
    assert (view.job_id, view.root) == ("k", "/tree/k")
    assert gather.take_next_ready(now_s=0.0) is None
    assert [view.job_id for view in gather.list_unpublished("j")[1]] == ["j"]
    assert gather.list_unpublished("unheard of") == (None, [])
    assert set(gather.build_fleet_view(now_s=0.0).jobs) == {"j", "k"}


def test_store_acknowledges_only_committed_items(gather, agent) -> None:
    """Events, and all items after them, are acknowledged when their iteration is committed."""
    assert agent.report().acknowledged == 0
    commit(gather)
    assert agent.report().acknowledged == 2
    agent.report(events=(agent.events(0, 4),))
    agent.report(iterations=(agent.done(0, 4),))
    commit(gather)
    answer = agent.report()
    assert (answer.acknowledged, answer.received) == (2, 4)
    agent.report(events=(agent.events(1, 4),), iterations=(agent.done(1, 4),))
    assert published(gather) == 4
    assert agent.report().acknowledged == 2
    rows = gather.collect_changes(now_s=0.0, now_us=NOW_US)
    gather.restore_changes(rows)
    assert agent.report().acknowledged == 2
    written = commit(gather)
    assert agent.report().acknowledged == 6
    assert {type(row) for row in rows.values()} <= {type(row) for row in written}
    assert commit(gather) == []


def test_acknowledgement_of_agent_depends_on_its_own_events(gather, agent) -> None:
    other = Agent(gather, name="other")
    agent.report(events=(agent.events(0, 5),))
    other.report(events=(other.events(1, 4),))
    assert published(gather, every=True) == 4
    commit(gather)
    assert agent.report().acknowledged == 2
    assert other.report().acknowledged == 1


def test_restored_store_waits_for_unacknowledged_items(gather, agent) -> None:
    """Restored balances and ends of sessions count only if no event before them is outstanding."""
    other = Agent(gather, name="other")
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    other.report(events=(other.events(1, 4),), iterations=(other.done(1, 4),))
    other.report(sessions=(other.session(1, SessionState.CLOSED),))
    again = remembered(commit(gather))
    assert {each.state for each in again.build_fleet_view(now_s=0.0).jobs["j"].sessions} == {
        SessionState.OPEN,
        SessionState.CLOSED,
    }
    one = Agent(again)
    one.sequence = one.report().acknowledged
    assert one.sequence == 2
    one.report(events=(one.events(0, 4),), iterations=(one.done(0, 4),))
    assert again.take_next_ready(now_s=0.0) is None
    two = Agent(again, name="other")
    assert two.report().acknowledged == 0
    two.report(events=(two.events(1, 4),), iterations=(two.done(1, 4),))
    two.report(sessions=(two.session(1, SessionState.CLOSED),))
    view = again.take_next_ready(now_s=0.0)
    assert view is not None
    assert names(view) == {0: ["Op0"], 1: ["Op0"]}


def test_restored_store_does_not_wait_for_rank_without_events(gather, agent) -> None:
    """Its balance was acknowledged and will not be reported again."""
    other = Agent(gather, name="other")
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    other.report(iterations=(other.done(1, 4),))
    again = remembered(commit(gather))
    one = Agent(again)
    one.sequence = one.report().acknowledged
    one.report(events=(one.events(0, 4),), iterations=(one.done(0, 4),))
    assert published(again) == 4


def test_events_that_are_sent_again_are_counted_once(gather, agent) -> None:
    """By an agent that was restarted, or because their calls have ended since."""
    opened = agent.events(0, 4, first=3, end=OPEN_END_POSITION)
    agent.report(events=(agent.events(0, 4, 4, 4), agent.events(1, 4), opened))
    agent.report(events=(agent.events(0, 4, 4, 4, 4, 4), agent.events(1, 4, first=9)))
    agent.report(events=(agent.events(0, 4, 4, first=1),))

    def merge() -> MergeStatus:
        return gather.build_fleet_view(now_s=0.0).jobs["j"].merge

    assert merge().pending_events == 7
    agent.report(iterations=(agent.done(0, 4), agent.done(1, 4)))
    assert published(gather) == 4
    assert (merge().pending_events, merge().published_events) == (0, 7)


def test_restored_store_does_not_publish_again(gather, agent) -> None:
    """Repeated events of a published iteration are recognised."""
    agent.everything(4)
    agent.report(events=(agent.events(0, 5),))
    assert published(gather) == 4
    again = remembered(commit(gather))
    view = again.build_fleet_view(now_s=0.0).jobs["j"]
    assert (view.merge.published_iterations, view.merge.published_events) == (1, 2)
    one = Agent(again)
    one.sequence = one.report().acknowledged
    one.report(events=(one.events(0, 4), one.events(1, 4), one.events(0, 5)))
    assert [each.iteration for each in again.list_unpublished("j")[1]] == [5]
    assert findings(again) == ()
    assert again.get_last_publication("j") == (PublishedOffsets("/tree/j", {"a": 1}, 1), "{}")


def test_store_without_state_accepts_any_sequence(gather) -> None:
    agent = Agent(gather)
    agent.sequence = 1000
    answer = agent.report(sessions=(agent.session(0), agent.session(1)))
    assert (answer.acknowledged, answer.received) == (0, 1002)
    commit(gather)
    assert agent.report().acknowledged == 1002


def test_late_events_are_counted_unless_repeated(gather, agent) -> None:
    """The finding has their number."""
    agent.report(events=(agent.events(0, 4),), iterations=(agent.done(0, 4),))
    agent.report(events=(agent.events(1, 4),))
    assert gather.take_next_ready(now_s=999.0).late == (1,)
    gather.finish_publication("j", PublicationResult(PublishedOffsets("/t", {}, 0), True, (), ""))
    agent.report(events=(agent.events(0, 4), agent.events(1, 4)))
    assert findings(gather) == ()
    agent.report(events=(agent.events(1, 4, 4, 4),))
    agent.report(events=(agent.events(1, 4, first=3), agent.events(1, 4, 4)))
    again = remembered(commit(gather))
    for each in (gather, again):
        (finding,) = findings(each)
        assert finding.kind is FindingKind.LATE
        assert finding.ranks == (1,)
        assert "iteration 4: 3 events of rank 1" in finding.text
    assert gather.backlog == 0


def test_late_events_during_publication_are_committed_with_it(gather, agent) -> None:
    """A crash in between must not leave an iteration that looks published."""
    agent.report(events=(agent.events(0, 4),))
    view = gather.take_next_ready(now_s=999.0)
    agent.report(events=(agent.events(1, 4),))
    before = commit(gather)
    assert not any(
        type(row).__name__ in ("PublishedIterationRow", "LateEventsRow") for row in before
    )
    assert agent.report().acknowledged == 2
    gather.finish_publication(
        view.job_id, PublicationResult(PublishedOffsets("/t", {}, 0), True, (), "")
    )
    after = [type(row).__name__ for row in commit(gather)]
    assert sorted(after) == ["AgentRow", "JobResultRow", "LateEventsRow", "PublishedIterationRow"]


def test_restarted_rank_publishes_earlier_iterations(gather, agent) -> None:
    """The new session numbers its iterations from the start."""
    agent.everything(0)
    assert published(gather) == 0
    agent.report(events=(agent.events(0, 1, session="s0"),))
    again = tuple(agent.session(rank, name=f"again{rank}") for rank in (0, 1))
    agent.report(sessions=again, events=(agent.events(0, 0, session="again0"),))
    agent.report(events=(agent.events(0, 1, session="s0", first=7),))
    sealed, running = gather.list_unpublished("j")[1]
    assert (sealed.iteration, running.iteration) == (1, 0)
    assert names(sealed) == {0: ["Op0", "Op7"]}
    assert published(gather) == 1
    agent.report(events=(agent.events(0, 1, session="s0", first=8),))
    assert gather.take_next_ready(now_s=0.0) is None
    agent.report(iterations=tuple(agent.done(rank, 0, name=f"again{rank}") for rank in (0, 1)))
    assert published(gather) == 0
    (finding,) = findings(gather)
    assert "1 events of rank 0" in finding.text
    view = remembered(commit(gather)).build_fleet_view(now_s=0.0).jobs["j"]
    assert view.merge.published_iterations == 3


def elastic(agent: Agent, rank: int, attempt: int) -> SessionStatus:
    """Return a session whose launcher restarts all ranks together."""
    return agent.session(rank, name=f"s{rank}.{attempt}", attempt=attempt, is_elastic=True)


def test_attempts_of_all_ranks_are_not_mixed(gather) -> None:
    """Events of rank 1 arrive after rank 0 has been restarted, and rank 1 has not been yet."""
    agent = Agent(gather)
    agent.report(sessions=tuple(elastic(agent, rank, 0) for rank in (0, 1)))
    agent.report(events=(agent.events(0, 0, session="s0.0"),))
    agent.report(sessions=(elastic(agent, 0, 1),), events=(agent.events(0, 0, session="s0.1"),))
    agent.report(events=(agent.events(1, 0, session="s1.0", first=5),))
    first, second = gather.list_unpublished("j")[1]
    assert (first.attempt, second.attempt) == (0, 1)
    assert names(first) == {0: ["Op0"], 1: ["Op5"]}
    assert names(second) == {0: ["Op0"]}
    assert published(gather) == 0
    agent.report(iterations=(agent.done(0, 0, name="s0.1"), agent.done(1, 0, name="s1.0")))
    assert gather.take_next_ready(now_s=0.0) is None, "rank 1 has not begun its second attempt"
    agent.report(sessions=(elastic(agent, 1, 1),), events=(agent.events(1, 0, session="s1.1"),))
    agent.report(iterations=(agent.done(1, 0, name="s1.1"),))
    view = gather.take_next_ready(now_s=0.0)
    assert (view.attempt, sorted(view.events)) == (1, [0, 1])


def test_restart_of_all_ranks_begins_a_run_with_a_rank_that_is_new(gather) -> None:
    """A job may come back with other ranks: the one that reports first had no attempt before."""
    agent = Agent(gather, world=3)
    agent.report(sessions=(elastic(agent, 0, 0),), events=(agent.events(0, 0, session="s0.0"),))
    agent.report(sessions=(elastic(agent, 2, 1),), events=(agent.events(2, 0, session="s2.1"),))
    assert [view.attempt for view in gather.list_unpublished("j")[1]] == [0, 1]


def test_rank_that_was_not_restarted_goes_on_in_the_next_attempt(gather) -> None:
    agent = Agent(gather)
    agent.report(sessions=tuple(agent.session(rank) for rank in (0, 1)))
    agent.report(events=(agent.events(0, 0, session="s0"), agent.events(1, 0, session="s1")))
    agent.report(sessions=(agent.session(1, name="again", attempt=1),))
    agent.report(events=(agent.events(0, 1, session="s0", first=3),))
    first, second = gather.list_unpublished("j")[1]
    assert (first.attempt, first.iteration) == (0, 0)
    assert (second.attempt, second.iteration, sorted(second.events)) == (1, 1, [0])


def test_events_without_sessions_wait_for_deadline(gather) -> None:
    agent = Agent(gather)
    agent.report(events=(agent.events(0, 4),))
    assert gather.take_next_ready(now_s=1.0) is None
    assert gather.take_next_ready(now_s=300.0).late_count == 0
    agent.report(events=(agent.events(0, 4, first=1),))
    assert "1 events of rank 0" in findings(gather)[0].text


def test_iteration_without_tree_waits_for_deadline(gather) -> None:
    """A later report may name the tree."""
    agent = Agent(gather, world=1)
    one, done = (agent.session(0),), (agent.done(0, 0),)
    agent.report(roots={}, sessions=one, events=(agent.events(0, 0),), iterations=done)
    assert gather.take_next_ready(now_s=1.0) is None
    assert gather.take_next_ready(now_s=300.0).root == ""


def test_declared_groups_are_known_in_later_batches(gather, agent) -> None:
    agent.report(events=(agent.events(0, 4, groups=(WORLD,)),))
    agent.report(events=(agent.events(0, 5, 6),))
    for view in gather.list_unpublished("j")[1]:
        assert [batch.groups for batch in view.events[0]] == [(WORLD,)]


def test_batch_without_events_updates_stall_of_rank(gather, agent) -> None:
    """A rank that is stuck in its first tensor has no events."""
    source, empty = agent.events(1, groups=(WORLD,))
    said = [(source, dataclasses.replace(empty, stalled_us=stalled)) for stalled in (5, 9)]
    agent.report(events=(agent.events(0, 4), *said))
    (view,) = gather.list_unpublished("j")[1]
    assert view.stalls == {0: 0, 1: 9}
    agent.report(events=(agent.events(1, 4),))
    (view,) = gather.list_unpublished("j")[1]
    assert view.events[1][0].groups == (WORLD,)


def report_of(job_id: str) -> AgentReport:
    return AgentReport("any agent", 0, roots={job_id: "/tree"})


def test_store_has_a_backlog_while_next_iteration_is_complete(gather, agent) -> None:
    """Memory holds the iteration in publication and the next one, not the backlog of agents."""
    agent.report(sessions=tuple(map(agent.session, (0, 1))))
    for iteration in (4, 5):
        assert not gather.has_unpublished_backlog(report_of("j"))
        agent.report(events=(agent.events(0, iteration), agent.events(1, iteration)))
        agent.report(iterations=tuple(agent.done(rank, iteration) for rank in (0, 1)))
        if iteration == 4:
            assert not gather.has_unpublished_backlog(report_of("j"))
            assert gather.take_next_ready(now_s=0.0) is not None
    assert gather.has_unpublished_backlog(report_of("j"))
    assert not gather.has_unpublished_backlog(report_of("another job"))
    gather.finish_publication("j", PublicationResult(PublishedOffsets("/t", {}, 0), True, (), ""))
    assert not gather.has_unpublished_backlog(report_of("j"))


def test_iterations_may_wait_for_one_that_cannot_be_written(gather, agent, monkeypatch) -> None:
    """What agents report of other jobs must not wait for a full disk."""
    monkeypatch.setattr(jobs, "MAX_DELAYED_EVENTS", 4)
    agent.report(sessions=tuple(map(agent.session, (0, 1))))
    for iteration in (4, 5, 6, 7):
        agent.report(events=(agent.events(0, iteration), agent.events(1, iteration)))
        agent.report(iterations=tuple(agent.done(rank, iteration) for rank in (0, 1)))
        if iteration == 4:
            assert gather.take_next_ready(now_s=0.0) is not None
            gather.delay_publication("j")
        assert gather.has_unpublished_backlog(report_of("j")) is (iteration == 7)
    gather.finish_publication("j", PublicationResult(PublishedOffsets("/t", {}, 0), True, (), ""))
    assert gather.take_next_ready(now_s=0.0) is not None
    assert gather.has_unpublished_backlog(report_of("j"))


def test_waiting_iterations_have_open_calls(gather, agent) -> None:
    agent.report(events=(agent.events(0, 4), agent.events(0, 5, end=OPEN_END_POSITION)))
    assert [view.iteration for view in gather.list_waiting_iterations(now_s=0.0)] == [5]


def test_rank_coverage_ends_at_newest_event_or_reported_time(gather, agent) -> None:
    """The reported time of an earlier session does not count."""
    agent.report(sessions=(agent.session(0), agent.session(1)))
    agent.report(events=(agent.events(0, 5, 5, end=OPEN_END_POSITION, first=7_000_000),))
    assert known(gather) == {0: 6_000_001}
    stalled = dataclasses.replace(EventColumns.from_events([]), stalled_us=9, sent_us=8_500_000)
    agent.report(events=((EventSource("j", 0), stalled),))
    assert known(gather) == {0: 7_500_000}
    agent.report(
        coverage=(
            ReportedRankCoverage("j", 0, "s0", 9_000_000),
            ReportedRankCoverage("j", 1, "s1", 8_000_000),
        )
    )
    assert known(gather) == {0: 9_000_000, 1: 8_000_000}
    agent.report(sessions=(agent.session(1, name="again"),))
    agent.report(events=(agent.events(1, 5, end=OPEN_END_POSITION, session="again"),))
    agent.report(
        coverage=(
            ReportedRankCoverage("j", 1, "s1", 9_500_000),
            ReportedRankCoverage("j", 0, "s0", 1),
        )
    )
    assert known(gather) == {0: 9_000_000, 1: 8_000_000}
    agent.report(sessions=(agent.session(1, SessionState.CLOSED, name="again"),))
    assert known(gather)[1] == OPEN_END_POSITION


def known(gather: ReportStore) -> dict[int, int]:
    """Return the time up to which each rank is known."""
    (view,) = gather.list_waiting_iterations(now_s=0.0)
    return {rank: heard.until_us for rank, heard in view.coverage.items()}


def test_rank_coverage_describes_state_of_agent(gather, agent) -> None:
    """The number of items to report, or the time of its last report."""
    agent.report(sessions=(agent.session(0),), held_events=4000, load=AgentLoad(17), host="b")
    agent.report(
        events=(agent.events(0, 5, end=OPEN_END_POSITION, first=5),),
        held_events=4000,
        load=AgentLoad(17),
        host="b",
    )
    (view,) = gather.list_waiting_iterations(now_s=1.0)
    assert (
        view.coverage[0].agent == "the agent of b has 4,000 events to report and 17 records queued"
    )
    (view,) = gather.list_waiting_iterations(now_s=58.0)
    assert view.coverage[0].agent == "the agent of b last reported 58 s ago"


@pytest.mark.parametrize(
    ("ids", "called"),
    [
        (("1a", "2b"), ("localhost (1a)", "localhost (2b)")),
        (("1a", "1a"), ("localhost", "localhost")),
    ],
)
def test_hosts_with_same_name_have_distinct_clocks(gather, ids, called) -> None:
    """Agents of one host, such as workers, share its clock."""
    for rank, host_id in enumerate(ids):
        one = Agent(gather, name=f"a{rank}")
        about: dict[str, Any] = {"host": "localhost", "host_id": host_id}
        one.report(sessions=(one.session(rank, host="localhost"),), **about)
        one.report(events=(one.events(rank, 5, session=f"s{rank}"),), **about)
    assert tuple(agent.host for agent in gather.build_fleet_view(now_s=0.0).agents) == called
    (view,) = gather.list_unpublished("j")[1]
    assert view.clocks == dict(enumerate(called))


def test_rank_with_other_host_name_has_separate_clock(gather, agent) -> None:
    """The rank is in a container on the agent's host, or on another host."""
    agent.report(sessions=(agent.session(0, host="pod"),), host="node", host_id="1a")
    agent.report(events=(agent.events(0, 5, session="s0"),), host="node", host_id="1a")
    (view,) = gather.list_unpublished("j")[1]
    assert view.clocks[0] == "pod at node"


def test_fleet_view_contains_reported_state_of_agents(gather, agent) -> None:
    """Agents are connected while a stream is open."""
    gather.count_stream("a", 1, now_s=1.0)
    clock = ClockEstimate(7, 3, 1, True)
    report = AgentReport(
        "a",
        0,
        host="h1",
        load=AgentLoad(1, 10, 500, 1000),
        clock=clock,
        held_events=4,
        lost_events=2,
    )
    gather.add_report(report, now_s=1.0)
    (one,) = (a for a in gather.build_fleet_view(now_s=3.5).agents if a.agent_id == "a")
    assert (one.host, one.heard_s, one.connected, one.clock) == ("h1", 2.5, True, clock)
    assert (one.held_events, one.lost_events, one.load) == (4, 2, AgentLoad(1, 10, 500, 1000))
    gather.count_stream("a", -1, now_s=4.0)
    assert not any(each.connected for each in gather.build_fleet_view(now_s=4.0).agents)


def test_job_facts_have_limits_and_newest_session_of_ranks(gather, agent) -> None:
    """Newer timeouts replace earlier ones and are restored."""
    timeouts = RankTimeouts({"HCCL_EXEC_TIMEOUT": "68"})
    agent.report(timeouts=(("j", 1, RankTimeouts()), ("j", 1, timeouts)))
    agent.report(sessions=(agent.session(1, name="again"),))
    for each in (gather, remembered(commit(gather))):
        facts = each.build_job_facts("j")
        assert facts.timeouts == {1: timeouts}
        assert {rank: s.session_id for rank, s in facts.sessions.items()} == {0: "s0", 1: "again"}


def test_warnings_are_sent_to_agents_of_their_job(gather, agent) -> None:
    """Each answer repeats them."""
    other = Agent(gather, job="k")
    other.report(sessions=(other.session(0),))
    assert not gather.set_hints("j", hints=(), warnings=("rank 1 is late",))
    assert agent.report().warnings == (("j", "rank 1 is late"),)
    assert other.report().warnings == ()


def test_store_bounds_findings_and_counts_the_rest(gather, agent) -> None:
    agent.everything(4)
    many = (Finding(FindingKind.GAP, 4, "x"),) * (MAX_FINDINGS + 5)
    assert published(gather, findings=many) == 4
    for each in (gather, remembered(commit(gather))):
        job = each.build_fleet_view(now_s=0.0).jobs["j"]
        assert (len(job.findings), job.more_findings) == (MAX_FINDINGS, 5)


def test_unwritten_iteration_is_not_counted_as_published(gather, agent) -> None:
    """Its events are lost, and a finding says so."""
    agent.everything(4)
    assert published(gather, written=False) == 4
    for each in (gather, remembered(commit(gather))):
        assert each.build_fleet_view(now_s=0.0).jobs["j"].merge.published_iterations == 0
    assert published(gather) is None


def test_finished_jobs_are_listed_and_forgotten(gather, agent) -> None:
    """A job is finished when it is closed and published, or silent for long."""
    agent.everything(4, now_s=5.0)
    other = Agent(gather, job="k", world=1)
    other.report(now_s=7.0, sessions=(other.session(0, SessionState.CLOSED),))
    assert gather.list_finished_jobs(now_s=10.0, silent_s=100.0) == [("k", 3.0)]
    assert published(gather) == 4
    assert gather.list_finished_jobs(now_s=110.0, silent_s=100.0) == [("j", 105.0), ("k", 103.0)]
    assert gather.build_fleet_view(now_s=0.0).latest == "k"
    gather.forget_job("k")
    assert gather.build_fleet_view(now_s=0.0).latest == "j"
    gather.count_stream("agent of j", 1, now_s=0.0)
    assert gather.forget_agents(before_s=9.0) == ["agent of k"]


def test_events_of_forgotten_agent_are_published(gather, agent) -> None:
    agent.report(events=(agent.events(0, 4),))
    gather.forget_agents(before_s=9.0)
    assert not any(isinstance(row, AgentRow) for row in commit(gather))
    assert published(gather, every=True) == 4


def test_order_moves_to_tree_of_running_job(gather, agent):
    """A later job may have the same id and another tree, as within one Slurm job."""
    agent.everything(0)
    agent.report(sessions=tuple(agent.session(rank, SessionState.CLOSED) for rank in (0, 1)))
    first = gather.take_next_ready(now_s=0.0)
    assert first is not None
    assert first.root == "/tree/j"
    gather.finish_publication(
        "j", PublicationResult(PublishedOffsets(first.root, {}, 0), True, (), "")
    )
    again = tuple(agent.session(rank, name=f"again{rank}") for rank in (0, 1))
    events = tuple(agent.events(rank, 0, session=f"again{rank}") for rank in (0, 1))
    done = tuple(agent.done(rank, 0, name=f"again{rank}") for rank in (0, 1))
    agent.report(sessions=again, roots={"j": "/tree/later"})
    agent.report(events=events, iterations=done, roots={})
    second = gather.take_next_ready(now_s=0.0)
    assert second is not None
    assert second.root == "/tree/later"
    (job,) = gather.build_fleet_view(now_s=0.0).jobs.values()
    assert job.findings == ()


def test_two_trees_of_one_job_are_a_finding(gather, agent):
    """An agent rejects the second tree on its host, so this happens between hosts."""
    agent.report(sessions=(agent.session(0),), roots={"j": "/tree/other"})
    view = gather.build_fleet_view(now_s=0.0).jobs["j"]
    (finding,) = view.findings
    assert finding.kind is FindingKind.TWO_TREES
    assert "'j' dumps into /tree/j and /tree/other, and its order is in /tree/j" in finding.text
    assert view.roots == ("/tree/j", "/tree/other")
    # It is about no iteration, and a status has it like any other.
    assert finding_from_wire(finding_to_wire(finding)) == finding


def test_rank_that_is_known_to_its_end_delays_no_iteration(gather, agent) -> None:
    """Its process is gone and everything it did is known; otherwise the deadline is waited for."""
    agent.report(
        sessions=(agent.session(0, SessionState.CLOSED), agent.session(1, SessionState.LOST)),
        events=(agent.events(0, 4), agent.events(1, 4)),
    )
    assert gather.take_next_ready(now_s=1.0) is None
    agent.report(sessions=(agent.session(1, SessionState.LOST, last_events_known=True),))
    view = gather.take_next_ready(now_s=1.0)
    assert (view.lost, view.late) == ({1: True}, ())


def test_last_events_stay_known_when_an_agent_restarts(gather, agent) -> None:
    """The agent that comes after does not know what its predecessor read; a new start undoes it."""
    agent.report(sessions=(agent.session(0, SessionState.CLOSED),), events=(agent.events(1, 4),))
    agent.report(sessions=(agent.session(1, SessionState.LOST, last_events_known=True),))
    agent.report(sessions=(agent.session(1, SessionState.LOST),))
    (view,) = gather.list_unpublished("j")[1]
    assert view.lost == {1: True}
    agent.report(sessions=(agent.session(1),))
    agent.report(sessions=(agent.session(1, SessionState.LOST),))
    (view,) = gather.list_unpublished("j")[1]
    assert view.lost == {1: False}


def test_unseen_collectives_reach_their_iteration_without_an_event(gather, agent):
    """A batch names those of iterations of which it has no event, and they are never late."""
    unseen = tuple(UnseenCollectives(iteration, "0", 2, "backend_call") for iteration in (0, 1))
    source, columns = agent.events(0, 1)
    report = (source, dataclasses.replace(columns, unseen=unseen))
    agent.report(events=(report,))
    for iteration in (0, 1):
        agent.report(
            events=tuple(agent.events(rank, iteration, first=5 * iteration + 3) for rank in (0, 1)),
            iterations=tuple(agent.done(rank, iteration) for rank in (0, 1)),
        )
        (view,) = (each for each in gather.list_unpublished("j")[1] if each.iteration == iteration)
        found = {rank: [e for b in own for e in b.unseen] for rank, own in view.events.items()}
        assert found == {0: [unseen[iteration]], 1: []}
        assert published(gather) == iteration
    empty = {name: column[:0] for name, column in columns.columns.items()}
    agent.report(events=((source, dataclasses.replace(report[1], columns=empty)),))
    assert gather.build_fleet_view(now_s=0.0).jobs["j"].findings == ()
    assert published(gather) is None


FREEZE = JobFreeze("j", 0, 3, FrozenCause(FaultKind.JUMP, 3, "it jumped", 7, 0))


def test_freeze_is_handed_to_the_agents_of_its_job_alone(gather) -> None:
    """The answers name agents that are silent, with their ranks, as soon as it is their turn."""
    one, two, other = (Agent(gather, name=name, world=4) for name in ("a", "b", "c"))
    other.job = "k"
    one.report(sessions=(one.session(0), one.session(1)), host="here")
    two.report(sessions=(two.session(2), two.session(3)), host="there")
    other.report(sessions=(other.session(0),))
    answer = one.report(now_s=9.0, freezes=(FREEZE,))
    [relayed] = answer.freezes
    assert relayed == RelayedFreeze(FREEZE, FreezeReach(2, 1))
    assert other.report(now_s=9.0).freezes == ()
    [relayed] = one.report(now_s=11.0, freezes=(FREEZE,)).freezes
    silent = UnreachedAgent("there", (2, 3), "its agent last reported 11 s ago")
    assert relayed.reach == FreezeReach(2, 1, (silent,))
    [relayed] = two.report(now_s=12.0, freezes=(FREEZE,)).freezes
    assert relayed.reach == FreezeReach(2, 2)


def test_freeze_of_an_unknown_job_is_ignored(gather, agent) -> None:
    unknown = dataclasses.replace(FREEZE, job_id="k")
    assert agent.report(freezes=(unknown,)).freezes == ()
    assert not gather.add_alarm(unknown, now_s=0.0)


def test_ranks_whose_sessions_have_closed_are_not_awaited(gather) -> None:
    one, two = (Agent(gather, name=name) for name in ("a", "b"))
    one.report(sessions=(one.session(0),))
    two.report(sessions=(two.session(1, SessionState.CLOSED),))
    [relayed] = one.report(freezes=(FREEZE,)).freezes
    assert relayed.reach == FreezeReach(1, 1)


def test_outliers_of_reported_steps_are_alarms_that_are_handed_on(gather, agent) -> None:
    losses = enumerate((1.0, 1.0, 1.0, 1.0, 90.0))
    steps = tuple(RankStep("j", rank, 0, 8, {"loss": loss}) for rank, loss in losses)
    agent.report(steps=(*steps, RankStep("k", 0, 0, 8, {"loss": 1.0})))
    [alarm] = gather.find_outliers(now_us=NOW_US)
    assert alarm.cause.rank == 4
    assert gather.add_alarm(alarm, now_s=1.0)
    assert [each.freeze for each in agent.report(now_s=1.0).freezes] == [alarm]
