"""The event trace: positions, iterations of events, and batches."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.event_lists import list_events

from rankdump._core.events import (
    OPEN_END_POSITION,
    CallOutcome,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
    UnseenCollectives,
    UnseenReason,
)
from rankdump._core.recorder_protocol import CollectiveCall, StartedEvent
from rankdump._recorder.event_trace import OPEN_AFTER_US, STALL_REPORT_US, EventTrace
from rankdump._shm.event_journal import EventJournal, read_journal
from rankdump._shm.slab_format import JOURNAL_BYTES, SlabMemory, compute_slab_bytes, format_slab

GROUP = ProcessGroup("0", (0, 1))


@dataclass
class Clock:
    """Microseconds that a test moves on."""

    now: int = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trace(clock: Clock) -> EventTrace:
    return EventTrace(clock)


def taken(trace: EventTrace) -> list[RankEvent]:
    columns = trace.take_events()
    return [] if columns is None else list_events(columns)


def places(trace: EventTrace) -> list[tuple[str, int, int]]:
    return [(event.name, event.position, event.end_position) for event in taken(trace)]


def all_reduce(sequence: int = 3) -> CollectiveCall:
    return CollectiveCall(EventKind.ALL_REDUCE, GROUP, sequence, 10, "float32")


def test_nested_and_overlapping_events_keep_their_positions(trace):
    outer = trace.start_event(graph=0, name="outer")
    inner = trace.start_event(graph=0, name="inner")
    trace.finish_event(inner)
    trace.finish_event(outer)
    assert places(trace) == [("inner", 2, 2), ("outer", 1, 2)]
    assert trace.take_events() is None


def test_event_belongs_to_the_iteration_in_which_it_began(trace):
    """Law: an event keeps its iteration however many iterations end before it does."""
    trace.begin_iteration(7)
    early = trace.start_event(graph=0, name="early", collective=all_reduce())
    assert trace.end_iteration() == (1, 1)
    assert [(e.name, e.iteration, e.end_position) for e in taken(trace)] == [
        ("early", 7, OPEN_END_POSITION)
    ]
    for iteration in (8, 9, 10):
        trace.begin_iteration(iteration)
        late = trace.start_event(graph=0, name="late")
        trace.finish_event(late)
        if iteration == 10:
            trace.finish_event(early)
        found = {e.name: e.iteration for e in taken(trace)}
        assert found["late"] == iteration
        trace.end_iteration()
        assert trace.take_events() is None
    assert found["early"] == 7


def test_event_that_ends_between_two_iterations_belongs_to_the_first(trace):
    trace.begin_iteration(4)
    begun = trace.start_event(graph=0, name="a")
    assert trace.end_iteration() == (1, 1)
    trace.finish_event(begun)
    trace.begin_iteration(5)
    assert [(e.iteration, e.end_position) for e in taken(trace)] == [(4, 1)]


def test_iteration_spans_are_consecutive(trace):
    spans = []
    for iteration, count in enumerate([2, 0, 3]):
        trace.begin_iteration(iteration)
        for _ in range(count):
            trace.finish_event(trace.start_event(graph=0, name="x"))
        spans.append(trace.end_iteration())
    assert spans == [(1, 2), (0, 0), (3, 5)]


def test_overdue_call_is_sent_once_open_and_once_complete(trace, clock):
    begun = trace.start_event(graph=2, name="AllReduce-op3", collective=all_reduce())
    trace.start_event(graph=2, name="an operator")
    clock.now = OPEN_AFTER_US - 1
    assert trace.take_events() is None
    clock.now += 1
    told = trace.take_events()
    assert told is not None
    assert told.groups == (GROUP,)
    (event,) = list_events(told)
    assert (event.end_position, event.start_us, event.end_us) == (OPEN_END_POSITION, 0, 0)
    assert (event.kind, event.group, event.sequence, event.graph) == (
        EventKind.ALL_REDUCE,
        "0",
        3,
        2,
    )
    clock.now += OPEN_AFTER_US
    assert trace.take_events() is None
    trace.finish_event(begun)
    assert places(trace) == [("AllReduce-op3", 1, 2)]


def test_open_call_is_sent_although_the_clock_was_set_back(clock):
    clock.now = 10 * OPEN_AFTER_US
    trace = EventTrace(clock)
    trace.start_event(graph=0, name="a", collective=all_reduce())
    clock.now = 0
    assert places(trace) == [("a", 1, OPEN_END_POSITION)]


def test_collective_is_sent_with_its_group(trace):
    trace.finish_event(trace.start_event(graph=0, name="AllReduce-op3", collective=all_reduce()))
    columns = trace.take_events()
    assert columns is not None
    event = list_events(columns)[0]
    assert columns.groups == (GROUP,)
    assert (event.kind, event.group, event.sequence) == (EventKind.ALL_REDUCE, "0", 3)
    assert (event.element_count, event.dtype, event.peer) == (10, "float32", -1)


def test_name_and_collective_may_be_given_at_the_end(trace):
    unknown = CollectiveCall(EventKind.RECV, GROUP, 0)
    begun = trace.start_event(graph=0, name="from anyone", collective=unknown)
    known = CollectiveCall(EventKind.RECV, GROUP, 4, peer=1)
    trace.finish_event(begun, name="from 1", collective=known)
    (event,) = taken(trace)
    assert (event.name, event.sequence, event.peer) == ("from 1", 4, 1)


def test_stall_is_noted_at_starts_of_calls_and_in_batches(clock):
    stalled = Clock(5)
    trace = EventTrace(clock, stalled_us=stalled)
    call = trace.start_event(graph=0, name="call", collective=all_reduce())
    stalled.now = 9
    trace.finish_event(call)
    trace.finish_event(trace.start_event(graph=0, name="operator"))
    columns = trace.take_events()
    assert columns is not None
    assert columns.stalled_us == 9
    assert [e.stall_us for e in list_events(columns)] == [5, 0]


def test_growing_stall_is_sent_without_any_event(clock):
    """Other ranks may be waiting for this one, so the coordinator needs the reason."""
    stalled = Clock(0)
    trace = EventTrace(clock, stalled_us=stalled)
    stalled.now = STALL_REPORT_US - 1
    assert trace.take_events() is None
    stalled.now += 1
    columns = trace.take_events()
    assert columns is not None
    assert (len(columns), columns.stalled_us) == (0, STALL_REPORT_US)
    assert trace.take_events() is None


def test_trace_that_keeps_no_events_counts_positions():
    trace = EventTrace(keeps=False)
    assert not trace.finish_event(trace.start_event(graph=0, name="a"))
    assert trace.take_events() is None
    assert trace.start_event(graph=0, name="b").position == 2
    assert trace.end_iteration() == (0, 0)


@dataclass
class EventReader:
    """Events of all batches, by position."""

    open: set[int] = field(default_factory=set[int])
    complete: set[int] = field(default_factory=set[int])
    of: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def take(self, columns: EventColumns | None) -> None:
        for event in [] if columns is None else list_events(columns):
            assert event.position not in self.complete
            if event.end_position == OPEN_END_POSITION:
                assert event.position not in self.open
                self.open.add(event.position)
            else:
                assert event.end_position >= event.position
                self.complete.add(event.position)
            self.of[event.iteration].add(event.position)


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["operator", "call", "take", "later", "step"]),
        st.tuples(st.just("finish"), st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_every_event_is_sent_by_the_end_of_its_iteration(steps):
    """Law: by the end of an iteration every position of its span is reported, once as complete, or
    once as open and, when it is complete, once more; and always as this iteration's."""
    clock, reports, iteration, last = Clock(), EventReader(), 0, 0
    trace = EventTrace(clock)
    running: list[StartedEvent] = []
    begun_in: dict[int, int] = {}

    def end() -> None:
        nonlocal last
        span = trace.end_iteration()
        reports.take(trace.take_events())
        own = {position for position, began in begun_in.items() if began == iteration}
        first, end = span
        assert own == (set(range(first, end + 1)) if span != (0, 0) else set())
        assert reports.of[iteration] == own
        if own:
            assert first == last + 1
            last = end

    for step in [*steps, "step"]:
        if step in ("operator", "call"):
            what = all_reduce() if step == "call" else None
            running.append(trace.start_event(graph=0, name="x", collective=what))
            begun_in[running[-1].position] = iteration
        elif step == "take":
            reports.take(trace.take_events())
        elif step == "later":
            clock.now += OPEN_AFTER_US
        elif step == "step":
            end()
            iteration += 1
            trace.begin_iteration(iteration)
        elif running:
            trace.finish_event(running.pop(int(step[1]) % len(running)))
    for begun in running:
        trace.finish_event(begun)
    reports.take(trace.take_events())
    assert reports.complete == set(begun_in)
    for position, began in begun_in.items():
        assert position in reports.of[began]


def test_events_of_threads_are_complete_with_distinct_positions():
    """Law: events taken while other threads finish events are returned once, in their position."""
    trace, events, done = EventTrace(), [], threading.Event()

    def run(graph: int) -> None:
        for number in range(2000):
            trace.finish_event(trace.start_event(graph=graph, name=f"{number}"))

    def take() -> None:
        while not done.is_set():
            events.extend(taken(trace))

    threads = [threading.Thread(target=run, args=(graph,)) for graph in range(4)]
    taker = threading.Thread(target=take)
    for thread in (taker, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    events += taken(trace)
    assert sorted(e.position for e in events) == list(range(1, 8001))
    assert {(e.graph, e.name) for e in events} == {
        (graph, f"{number}") for graph in range(4) for number in range(2000)
    }
    assert all(e.end_position >= e.position for e in events)
    trace.end_iteration()
    assert trace.take_events() is None


def test_operators_and_collectives_are_in_one_batch():
    trace = EventTrace(clock_us=iter(range(100)).__next__)
    what = CollectiveCall(EventKind.SEND, ProcessGroup("g", (0, 1)), 5, 10, "float32", peer=1)
    trace.finish_event(trace.start_event(graph=2, name="a"))
    trace.finish_event(trace.start_event(graph=0, name="send", collective=what))
    operator, message = taken(trace)
    assert operator == RankEvent(2, 0, 1, 1, "a", EventKind.OPERATOR, 0, 1)
    assert (message.kind, message.group, message.sequence) == (EventKind.SEND, "g", 5)
    assert (message.element_count, message.dtype, message.peer) == (10, "float32", 1)


def read_events(slab: memoryview) -> list[RankEvent]:
    events = read_journal(SlabMemory(slab))
    assert events is not None
    return list_events(events)


@pytest.fixture
def slab() -> memoryview:
    memory = memoryview(bytearray(compute_slab_bytes(0, has_journal=True)))
    format_slab(memory, has_journal=True)
    return memory


def test_journal_has_every_event_as_it_is_sent_later(slab):
    """What a journal has at any moment are the events that the next batch would have."""
    trace = EventTrace()
    trace.begin_iteration(2)
    early = trace.start_event(graph=0, name="before the journal")
    trace.finish_event(trace.start_event(graph=0, name="complete before"))
    trace.record_event(graph=0, name="without duration")
    trace.use_journal(EventJournal(slab[-JOURNAL_BYTES:]))
    call = CollectiveCall(EventKind.ALL_REDUCE, ProcessGroup("world", (0, 1)), 0, 8, "float32")
    done = trace.start_event(graph=0, name="AllReduce", collective=call)
    trace.finish_event(done, outcome=CallOutcome.COMPLETE)
    message = CollectiveCall(EventKind.RECV, ProcessGroup("world", (0, 1)), 0)
    late = trace.start_event(graph=1, name="Recv from any", collective=message)
    trace.finish_event(late, name="Recv", collective=replace(message, peer=1, sequence=3))
    trace.finish_event(early)
    trace.record_event(graph=1, name="without duration")
    written = read_events(slab)
    trace.end_iteration()
    sent = trace.take_events()
    assert sent is not None
    assert written == sorted(list_events(sent), key=lambda event: event.position)
    assert written[3].outcome == CallOutcome.COMPLETE
    assert (written[4].name, written[4].peer, written[4].sequence) == ("Recv", 1, 3)
    for at in (2, 5):
        assert written[at].name == "without duration"
        assert (written[at].end_position, written[at].end_us) == (at + 1, written[at].start_us)


def test_journal_has_open_events(slab):
    """The operator in which a process ends is its last event."""
    trace = EventTrace()
    trace.use_journal(EventJournal(slab[-JOURNAL_BYTES:]))
    trace.begin_iteration(1)
    trace.start_event(graph=0, name="Net")
    (event,) = read_events(slab)
    assert (event.name, event.iteration, event.end_position) == ("Net", 1, OPEN_END_POSITION)


def test_trace_without_journal_writes_nowhere(slab):
    """A forked child must not write into the journal of its parent."""
    trace = EventTrace()
    trace.use_journal(EventJournal(slab[-JOURNAL_BYTES:]))
    trace.use_journal(None)
    trace.finish_event(trace.start_event(graph=0, name="Net"))
    assert read_events(slab) == []


def test_unseen_collectives_are_sent_without_an_event(trace):
    """They belong to the running iteration, are sent once, and are counted for the run."""
    trace.begin_iteration(4)
    trace.add_unseen("0", UnseenReason.BACKEND_CALL, 2)
    taken = trace.take_events()
    assert len(taken) == 0
    assert taken.unseen == (UnseenCollectives(4, "0", 2, "backend_call"),)
    assert trace.take_events() is None
    trace.add_unseen("0", UnseenReason.BACKEND_CALL, 1)
    assert trace.unseen_count == {"backend_call": 3}
