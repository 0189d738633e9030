"""Crashes of a coordinator at any time: every iteration is published once, whole and in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reporting_agent import ReportedJob
from support.restarted_reports import RestartedReportStore

from rankdump._core.status import EventSource, SessionState
from rankdumpd.coordinator.fleet_views import AgentReport, PublicationResult, PublishedOffsets

WORLD = 3
ITERATIONS = 3
JOB = ReportedJob("j", "/tree", WORLD, operators=2, collectives=1)
ALL = [(at, dict.fromkeys(range(WORLD), 3)) for at in range(ITERATIONS)]


def items(rank: int) -> list[dict[str, tuple]]:
    """Return the items of the agent of one rank, in order; a rank may have no events."""
    found: list[dict[str, tuple]] = [{"sessions": (JOB.session(rank),)}]
    for iteration in range(ITERATIONS):
        events = JOB.events(rank, iteration)
        found.append({"events": ((EventSource("j", rank, f"j-s{rank}"), events),)})
        found.append({"iterations": (JOB.balance(rank, iteration),)})
    return [*found, {"sessions": (JOB.session(rank, SessionState.CLOSED),)}]


class SimulatedCoordinator(RestartedReportStore):
    """Coordinator with its state, agents and published files."""

    def __init__(self) -> None:
        super().__init__(WORLD)
        self.files: list[tuple[int, dict[int, int]]] = []
        self.logs = [items(rank) for rank in range(WORLD)]

    def send_items(self, rank: int, count: int) -> None:
        """Send the next items of an agent in one report."""
        parts = self.logs[rank][self.sent[rank] : self.sent[rank] + count]
        merged: dict[str, Any] = {}
        for part in parts:
            for name, values in part.items():
                merged[name] = (*merged.get(name, ()), *values)
        if parts:
            self.say(rank, len(parts), **merged)

    def publish(self, *, commits: bool) -> None:
        """Publish ready iterations; a crash before the commit leaves a torn file."""
        while (view := self.gather.take_next_ready(now_s=0.0)) is not None:
            counts = {rank: sum(map(len, parts)) for rank, parts in view.events.items()}
            offsets, _ = self.gather.get_last_publication("j")
            del self.files[offsets.position if offsets else 0 :]
            self.files.append((view.iteration, counts))
            self.gather.finish_publication(
                "j", PublicationResult(PublishedOffsets("/tree", {}, len(self.files)), True, (), "")
            )
            if commits:
                self.commit()


_MOST = 3 * ITERATIONS
_steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, WORLD - 1), st.integers(1, _MOST)),
    st.tuples(st.just("send all"), st.just(0), st.integers(1, _MOST)),
    st.sampled_from(["publish", "publish and die", "commit", "commit and die", "die"]).map(
        lambda what: (what, 0, 0)
    ),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(steps=st.lists(_steps, max_size=40))
def test_store_publishes_each_iteration_once_despite_crashes(steps) -> None:
    """Reports, commits and crashes in any order lead to the result of an undisturbed run."""
    world = SimulatedCoordinator()
    for what, rank, count in steps:
        if what == "send":
            world.send_items(rank, count)
        elif what == "send all":
            for each in range(WORLD):
                world.send_items(each, count)
        elif what.startswith("commit"):
            world.commit()
        elif what.startswith("publish"):
            world.publish(commits=what == "publish")
        if what.endswith("die"):
            world.die()
    for rank in range(WORLD):
        world.send_items(rank, len(world.logs[rank]))
    world.publish(commits=True)
    world.commit()
    assert world.files == ALL
    view = world.gather.build_fleet_view(now_s=0.0).jobs["j"]
    assert (view.merge.published_iterations, view.merge.pending_iterations) == (ITERATIONS, 0)
    assert view.findings == ()
    for rank, log in enumerate(world.logs):
        answer = world.gather.add_report(AgentReport(f"a{rank}", 0), now_s=0.0)
        assert answer.acknowledged == answer.received == len(log)
