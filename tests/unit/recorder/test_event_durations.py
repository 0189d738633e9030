"""Position ranges of iterations, open events, and stalls, as a rank sends them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, introduction_of, kinds
from support.event_lists import list_events

import rankdump
from rankdump._core.events import OPEN_END_POSITION, EventKind, ProcessGroup, RankEvent
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OutputSettings,
    TensorSelection,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import CollectiveCall, TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.pipeline import DumpPipeline
from rankdump._wire.metadata_messages import events_from_wire

ONE = np.ones(1)


def a_plan(content: ContentSettings | None = None, **selection) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(**selection),
        content=content or ContentSettings(),
    )


def started(
    running: RunningFakeAgent, content: ContentSettings | None = None, **selection
) -> rankdump.Session:
    return rankdump.Session(a_plan(content, **selection), agent=running.address)


def spans(running: RunningFakeAgent) -> list[tuple[int, int, int]]:
    ends = bodies(running, "iteration_end")
    return [(end.iteration, end.first_position, end.last_position) for end in ends]


def events(running: RunningFakeAgent) -> list[RankEvent]:
    return [e for batch in bodies(running, "events") for e in list_events(events_from_wire(batch))]


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "never became true"
        time.sleep(0.01)


def test_iteration_span_covers_all_its_events(running):
    with started(running, iterations=IterationSelection("0,2", ((0, 0), (2, 2)))) as session:
        for i in range(4):
            session.step(i)
            for name in "abc"[: 1 + i]:
                session.dump("Add", name, "input", 0, ONE)
    assert spans(running) == [(0, 1, 1), (2, 2, 4)]
    assert [(e.iteration, e.position) for e in events(running)] == [(0, 1), (2, 2), (2, 3), (2, 4)]


def test_iteration_span_is_whole_with_a_switch_inside(running):
    with started(running, iterations=IterationSelection("9", ((9, 9),))) as session:
        session.step(0)
        session.dump("Add", "off", "input", 0, ONE)
        for name in "ab":
            session.dump_start()
            session.dump("Add", name, "input", 0, ONE)
            session.dump_stop()
            session.dump("Add", "off", "input", 0, ONE)
        session.step(1)
        session.dump_start()
        session.step(2)
        session.dump("Add", "c", "input", 0, ONE)
    assert spans(running) == [(0, 1, 2), (1, 0, 0), (2, 3, 3)]


def test_iteration_span_is_empty_if_the_plan_keeps_no_events(running):
    pipeline = DumpPipeline(a_plan(trigger="exception"), introduction_of(a_plan()), running.address)
    pipeline.start()
    pipeline.recorder.observe(
        TensorObservation(0, "Add", "a", TensorSide.INPUT, 0, "", ArraySource(ONE)),
    )
    pipeline.recorder.finish_event(pipeline.recorder.start_event(graph=0, name="a"))
    pipeline.recorder.end_call(0, "a", raised=True)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert spans(running) == [(0, 0, 0)]
    assert events(running) == []


def call(sequence: int) -> CollectiveCall:
    return CollectiveCall(EventKind.ALL_REDUCE, ProcessGroup("0", (0, 1)), sequence)


def test_open_events_are_sent_while_training_hangs_and_before_the_iteration_ends(
    running, monkeypatch
):
    monkeypatch.setattr("rankdump._recorder.event_trace.OPEN_AFTER_US", 0)
    with started(running) as session:
        session.step(0)
        pipeline = session._pipeline
        assert pipeline is not None
        recorder = pipeline.recorder
        hangs = recorder.start_event(graph=0, name="hangs", collective=call(0))
        eventually(lambda: events(running))
        monkeypatch.setattr("rankdump._recorder.event_trace.OPEN_AFTER_US", 10**12)
        recorder.finish_event(hangs)
        later = recorder.start_event(graph=0, name="later", collective=call(1))
        recorder.start_event(graph=0, name="never")
        session.step(1)
        recorder.finish_event(later)
    places = [
        (e.name, e.iteration, e.position, e.end_position == OPEN_END_POSITION)
        for e in events(running)
    ]
    assert places == [
        ("hangs", 0, 1, True),
        ("hangs", 0, 1, False),
        ("later", 0, 2, True),
        ("never", 0, 3, True),
        ("later", 0, 2, False),
    ]
    assert spans(running) == [(0, 1, 3), (1, 0, 0)]
    found = [kind for kind in kinds(running) if kind in ("events", "iteration_end")]
    assert found[:3] == ["events", "events", "iteration_end"]


def test_open_events_are_sent_when_a_session_ends_with_an_error(running):

    def job() -> None:
        with started(running) as session:
            assert session._pipeline is not None
            session._pipeline.recorder.start_event(graph=0, name="a", collective=call(0))
            raise KeyError

    with pytest.raises(KeyError):
        job()
    assert [(e.name, e.end_position) for e in events(running)] == [("a", OPEN_END_POSITION)]
    assert spans(running) == []


class SlowSource(ArraySource):
    """An array whose copy waits for the test."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__(ONE)
        self._go = go

    def copy_into(self, target: memoryview) -> None:
        assert self._go.wait(20)
        super().copy_into(target)


def test_stall_of_a_running_copy_is_sent(running, monkeypatch):
    """Law: the stall is in batches sent meanwhile, in calls that begin after it, and in the
    iteration's end."""
    monkeypatch.setattr("rankdump._recorder.event_trace.STALL_REPORT_US", 1)
    monkeypatch.setattr(
        "rankdump._session.framework_adapters.ArraySource", lambda go: SlowSource(go)
    )
    go = threading.Event()
    with started(running) as session:
        session.step(0)
        copy = threading.Thread(target=session.dump, args=("Add", "a", "input", 0, go))
        copy.start()
        eventually(lambda: any(b.stalled_us for b in bodies(running, "events")))
        seen_us = max(b.stalled_us for b in bodies(running, "events"))
        go.set()
        copy.join()
        assert session._pipeline is not None
        recorder = session._pipeline.recorder
        recorder.finish_event(recorder.start_event(graph=0, name="call", collective=call(0)))
    (stall_us,) = (e.stall_us for e in events(running) if e.name == "call")
    assert stall_us >= seen_us
    assert bodies(running, "iteration_end")[0].stall_us >= stall_us


def test_stall_includes_sending_of_statistics_at_the_end_of_an_iteration(running, monkeypatch):
    session = started(running, ContentSettings(saved="statistic"))
    session.step(0)
    session.dump("Add", "a", "input", 0, ONE)
    pipeline = session._pipeline
    assert pipeline is not None
    stalls, admit, told = pipeline._stalls, pipeline._staging.admit, []

    def watched(rows) -> bool:
        begun_us = stalls.total_us()
        while stalls.total_us() == begun_us:
            pass
        told.append(begun_us)
        return admit(rows)

    monkeypatch.setattr(pipeline._staging, "admit", watched)
    session.step(1)
    session.close()
    assert bodies(running, "iteration_end")[0].stall_us > told[0]
