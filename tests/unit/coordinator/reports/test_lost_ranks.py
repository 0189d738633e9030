"""Ranks whose session was lost: their end is one finding, in the iteration that it belongs to."""

from __future__ import annotations

import pytest

from rankdump._core.events import (
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
    RankEvent,
)
from rankdump._core.status import EventSource, IterationStatus, SessionState, SessionStatus
from rankdumpd.coordinator.fleet_views import AgentReport, IterationView, PublicationResult
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.reports.report_store import ReportStore

WORLD = ProcessGroup("world", (0, 1))
EVENTS = 3
"""Events of a rank in an iteration, the last one a collective."""


class LostRankJob:
    """Job of two ranks of which rank 1 is lost, and the store that its reports go to."""

    def __init__(self) -> None:
        self.store = ReportStore(deadline_s=300.0)
        self._sequence = 0
        self.report(sessions=(self.session(0), self.session(1)))

    def report(self, *, now_s: float = 0.0, **parts) -> None:
        report = AgentReport("agent", 0, roots={"j": "/tree"}, **parts)
        self._sequence += report.items
        self.store.add_report(
            AgentReport("agent", self._sequence, roots={"j": "/tree"}, **parts), now_s=now_s
        )

    def session(self, rank: int, state=SessionState.OPEN, **more) -> SessionStatus:
        return SessionStatus("j", f"s{rank}", rank, 2, rank, "host", 1, state, **more)

    def iterate(self, rank: int, *iterations: int, ends: bool = True, now_s: float = 0.0) -> None:
        """Report iterations of a rank, with or without their ends."""
        for iteration in iterations:
            first = EVENTS * iteration + 1
            last = first + EVENTS - 1
            events = [
                RankEvent(0, iteration, at, at, f"Op{at}", EventKind.OPERATOR, at, at)
                for at in range(first, last)
            ]
            call = RankEvent(
                *(0, iteration, last, last, "Sum", EventKind.ALL_REDUCE, last, last),
                group="world",
                sequence=iteration,
            )
            columns = EventColumns.from_events([*events, call], (WORLD,))
            done = IterationStatus(
                *("j", f"s{rank}", rank, iteration, True), first_position=first, last_position=last
            )
            self.report(
                now_s=now_s,
                events=((EventSource("j", rank, f"s{rank}"), columns),),
                iterations=(done,) if ends else (),
            )

    def lose(self, *, known: bool) -> None:
        self.report(sessions=(self.session(1, SessionState.LOST, last_events_known=known),))

    def publish(self, *, now_s: float = 0.0, every: bool = True) -> list[Finding]:
        """Publish what is due; return the ends of ranks among the findings."""
        found: list[Finding] = []
        while (view := self.store.take_next_ready(now_s=now_s, every=every)) is not None:
            findings = merge_iteration(view).findings
            self.store.finish_publication("j", PublicationResult(None, True, findings, ""))
            found += findings
        return list_ends(found)

    def list_unpublished(self) -> list[IterationView]:
        return self.store.list_unpublished("j")[1]


def list_ends(findings) -> list[Finding]:
    return [each for each in findings if each.kind is FindingKind.ENDED_RANK]


@pytest.fixture
def job() -> LostRankJob:
    return LostRankJob()


@pytest.mark.parametrize("known", [True, False])
def test_end_of_rank_is_told_once_where_it_was(job, known) -> None:
    """It left no ends of iterations, and rank 0 goes on without it."""
    job.iterate(1, 0, 1, 2, ends=False)
    job.iterate(0, 0, 1, 2, 3, 4)
    job.lose(known=known)
    assert len(job.list_unpublished()) == 5
    while_running = [f for view in job.list_unpublished() for f in merge_iteration(view).findings]
    assert [each.iteration for each in list_ends(while_running)] == [2]
    assert [(each.iteration, each.ranks) for each in job.publish()] == [(2, (1,))]


@pytest.mark.parametrize("known", [True, False])
def test_end_of_rank_is_told_once_where_it_is_first_absent(job, known) -> None:
    """It had finished its last iteration, which is published."""
    job.iterate(1, 0, 1)
    job.iterate(0, 0, 1)
    assert job.publish() == []
    job.lose(known=known)
    job.iterate(0, 2, 3)
    assert [each.iteration for each in job.publish()] == [2]


def test_end_of_rank_is_not_told_by_an_iteration_that_is_published_out_of_turn(job) -> None:
    job.iterate(1, 0, ends=False, now_s=100.0)
    job.iterate(0, 1, 2, now_s=0.0)
    job.lose(known=False)
    assert job.publish(now_s=301.0, every=False) == []
    assert [each.iteration for each in job.publish(now_s=301.0)] == [0]


def test_rank_that_went_on_is_missing_where_it_skipped_a_call(job) -> None:
    """That is not its end: it executed a later iteration."""
    columns = EventColumns.from_events(
        [RankEvent(0, 0, 1, 1, "Op1", EventKind.OPERATOR, 1, 1)], (WORLD,)
    )
    job.report(events=((EventSource("j", 1, "s1"), columns),))
    job.iterate(1, 1, ends=False)
    job.iterate(0, 0, 1)
    job.lose(known=True)
    view = job.list_unpublished()[0]
    kinds = {each.kind for each in merge_iteration(view).findings}
    assert FindingKind.MISSING_MEMBER in kinds
    assert FindingKind.ENDED_RANK not in kinds
    assert [each.iteration for each in job.publish()] == [1]


def test_end_of_a_rank_that_started_over_is_told_again(job) -> None:
    job.iterate(1, 0, ends=False)
    job.iterate(0, 0)
    job.lose(known=False)
    assert [each.iteration for each in job.publish()] == [0]
    again = SessionStatus("j", "t1", 1, 2, 1, "host", 1, SessionState.OPEN, attempt=1)
    job.report(sessions=(again,))
    events = [RankEvent(0, 0, 1, 1, "Op1", EventKind.OPERATOR, 1, 1)]
    columns = EventColumns.from_events(events, (WORLD,))
    job.report(events=((EventSource("j", 1, "t1"), columns),))
    lost = SessionStatus("j", "t1", 1, 2, 1, "host", 1, SessionState.LOST, attempt=1)
    job.report(sessions=(lost,))
    assert [(each.iteration, each.attempt) for each in job.publish()] == [(0, 1)]
