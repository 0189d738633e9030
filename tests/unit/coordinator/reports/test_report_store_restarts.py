"""Restarts of ranks and crashes of the coordinator in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.event_lists import list_events
from support.restarted_reports import RestartedReportStore

from rankdump._core.events import EventColumns, EventKind, FindingKind, RankEvent
from rankdump._core.status import EventSource, IterationStatus, SessionState, SessionStatus
from rankdumpd.coordinator.fleet_views import PublicationResult, PublishedOffsets

pytestmark = pytest.mark.slow

WORLD = 3
OPERATORS = 2
_LATE = re.compile(r"(\d+) events of rank")
_Place: TypeAlias = "tuple[int, int, str]"
"""Rank, iteration, and the name of an operator, which says its life."""


def items_of_start(
    rank: int, life: int, iterations: int, *, ends: bool
) -> Iterator[dict[str, Any]]:
    """Yield the items of the agent of a rank for one start of it, in order."""

    def session(state: SessionState) -> dict[str, Any]:
        status = SessionStatus("j", f"s{rank}.{life}", rank, WORLD, rank, "host", 1, state)
        return {"sessions": (status,)}

    yield session(SessionState.OPEN)
    for iteration in range(iterations):
        for at in range(OPERATORS):
            position = iteration * OPERATORS + at + 1
            place = 0, iteration, position, position
            name = f"life{life}-op{position}"
            event = RankEvent(
                *place, name, EventKind.OPERATOR, 1000 * position, 1000 * position + 400
            )
            source = EventSource("j", rank, f"s{rank}.{life}")
            yield {"events": ((source, EventColumns.from_events([event])),)}
        balance = IterationStatus("j", f"s{rank}.{life}", rank, iteration, True)
        yield {"iterations": (balance,)}
    yield session(SessionState.CLOSED if ends else SessionState.LOST)


class SimulatedRestarts(RestartedReportStore):
    """Coordinator with its state, agents and published files."""

    def __init__(self, lives: tuple[tuple[int, ...], ...]) -> None:
        """`lives` has for each rank the number of iterations of each of its starts."""
        super().__init__(WORLD)
        self.files: list[list[_Place]] = []
        self.logs = [
            [
                item
                for life, iterations in enumerate(of_rank)
                for item in items_of_start(rank, life, iterations, ends=life == len(of_rank) - 1)
            ]
            for rank, of_rank in enumerate(lives)
        ]

    def send_items(self, rank: int, count: int) -> None:
        """Send the next items of an agent, one report each."""
        for part in self.logs[rank][self.sent[rank] : self.sent[rank] + count]:
            self.say(rank, **part)

    def publish(self, *, every: bool, most: int = 1000) -> None:
        """Publish ready iterations; uncommitted bytes are cut off."""
        while most and (view := self.gather.take_next_ready(now_s=0.0, every=every)) is not None:
            offsets, _ = self.gather.get_last_publication("j")
            del self.files[offsets.position if offsets else 0 :]
            # The merge leaves out what was said twice.
            self.files.append(
                [
                    *{
                        (rank, view.iteration, event.name)
                        for rank, parts in view.events.items()
                        for part in parts
                        for event in list_events(part)
                    }
                ]
            )
            self.gather.finish_publication(
                "j", PublicationResult(PublishedOffsets("/tree", {}, len(self.files)), True, (), "")
            )
            most -= 1

    def late(self) -> Counter[tuple[int, int]]:
        """Return the number of late events of a rank in an iteration."""
        found: Counter[tuple[int, int]] = Counter()
        for finding in self.gather.build_fleet_view(now_s=0.0).jobs["j"].findings:
            count = _LATE.search(finding.text)
            if finding.kind is FindingKind.LATE and count:
                found[finding.ranks[0], finding.iteration] += int(count[1])
        return found

    def executed(self) -> Counter[_Place]:
        return Counter(
            (rank, int(event.iteration), event.name)
            for rank, log in enumerate(self.logs)
            for item in log
            for _, columns in item.get("events", ())
            for event in list_events(columns)
        )


_lives = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
_steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, WORLD - 1), st.integers(1, 12)),
    st.tuples(st.just("send all"), st.just(0), st.integers(1, 12)),
    st.tuples(st.just("kill agent"), st.integers(0, WORLD - 1), st.just(0)),
    st.sampled_from(["publish", "publish one", "publish every", "commit", "die"]).map(
        lambda what: (what, 0, 0)
    ),
)


@settings(max_examples=400, deadline=None)
@given(lives=st.tuples(*[_lives] * WORLD), steps=st.lists(_steps, max_size=40))
@example(
    lives=((0,),) * WORLD,
    steps=[
        ("send all", 0, 2),
        ("kill agent", 0, 0),
        ("commit", 0, 0),
        ("send", 0, 1),
        ("kill agent", 0, 0),
    ],
)
def test_operator_is_in_order_once_or_counted_as_late(lives, steps) -> None:
    world = SimulatedRestarts(lives)
    for what, rank, count in steps:
        if what == "send":
            world.send_items(rank, count)
        elif what == "send all":
            for each in range(WORLD):
                world.send_items(each, count)
        elif what.startswith("publish"):
            world.publish(every=what.endswith("every"), most=1 if what.endswith("one") else 1000)
        elif what == "commit":
            world.commit()
        elif what == "kill agent":
            world.kill_agent(rank)
        else:
            world.die()
    for rank in range(WORLD):
        world.send_items(rank, len(world.logs[rank]))
    world.publish(every=True)
    world.commit()
    there = Counter(place for file in world.files for place in file)
    assert [place for place, count in there.items() if count > 1] == []
    missing = world.executed() - there
    assert there - world.executed() == Counter()
    late = world.late()
    gone = Counter[tuple[int, int]]()
    for (rank, iteration, _), count in missing.items():
        gone[rank, iteration] += count
    assert gone - late == Counter()
    lengths = [len(log) for log in world.logs]
    assert world.list_acknowledged() == [(length, length) for length in lengths]


@settings(max_examples=200, deadline=None)
@given(
    lives=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    steps=st.lists(
        st.sampled_from(["send", "publish", "publish one", "commit", "die"]), max_size=30
    ),
)
# The beginning of the second session is restored; its end will be reported again.
@example(lives=(1, 1), steps=["send"] * 4 + ["publish one", "commit"])
# A rank's first session is reported as lost after another rank's second one has begun.
@example(lives=(1, 1, 1), steps=["send"] * 4 + ["publish", "commit"])
@example(
    lives=(1, 1),
    steps=["send", "commit", "die", "send", "send", "publish", "commit"],
)
def test_no_operator_is_late_when_all_ranks_restart_together(lives, steps) -> None:
    """Law: the runs have equal lengths and are reported in step."""
    world = SimulatedRestarts((lives,) * WORLD)
    for what in steps:
        if what == "send":
            for rank in range(WORLD):
                world.send_items(rank, max(1, min(world.sent) + 3 - world.sent[rank]))
        elif what.startswith("publish"):
            world.publish(every=False, most=1 if what.endswith("one") else 1000)
        elif what == "commit":
            world.commit()
        else:
            world.die()
    world.die()
    while any(world.sent[rank] < len(world.logs[rank]) for rank in range(WORLD)):
        for rank in range(WORLD):
            world.send_items(rank, 1)
        world.publish(every=False)
    world.publish(every=True)
    assert Counter(place for file in world.files for place in file) == world.executed()
    assert world.late() == Counter()
