"""Positions rise, and an event belongs to the iteration it began in."""

import threading

from rankdump.contract.events import Event, EventKind, ProcessGroup
from rankdump.trace import Trace
from rankdump.values import Collective


def test_nested_and_overlapping_events_keep_their_places():
    trace = Trace(clock_us=iter(range(100)).__next__)
    outer = trace.started()
    inner = trace.started()
    trace.finished(inner, graph=0, name="inner", collective=None)
    trace.finished(outer, graph=0, name="outer", collective=None)
    columns = trace.take()
    assert columns is not None
    assert [(e.name, e.position, e.end_position) for e in columns.events()] == [
        ("inner", 2, 2),
        ("outer", 1, 2),
    ]
    assert trace.take() is None


def test_an_event_belongs_to_the_iteration_it_began_in():
    trace = Trace()
    trace.begin_iteration(0)
    early = trace.started()
    trace.begin_iteration(1)
    late = trace.started()
    trace.finished(late, graph=0, name="late", collective=None)
    trace.finished(early, graph=0, name="early", collective=None)
    columns = trace.take()
    assert columns is not None
    assert {e.name: e.iteration for e in columns.events()} == {"late": 1, "early": 0}


def test_a_collective_carries_its_group():
    trace = Trace()
    group = ProcessGroup("0", (0, 1))
    trace.finished(
        trace.started(),
        graph=0,
        name="AllReduce-op3",
        collective=Collective(EventKind.ALL_REDUCE, group, 3, 10, "float32"),
    )
    columns = trace.take()
    assert columns is not None
    event = columns.events()[0]
    assert columns.groups == (group,)
    assert (event.kind, event.group, event.sequence) == (EventKind.ALL_REDUCE, "0", 3)
    assert (event.element_count, event.dtype, event.peer) == (10, "float32", -1)


def test_a_trace_that_keeps_nothing_still_counts():
    trace = Trace(keeps=False)
    assert not trace.finished(trace.started(), graph=0, name="a", collective=None)
    assert trace.take() is None
    assert trace.started()[0] == 2


def test_threads_lose_no_event_and_share_no_position():
    """Law: whoever takes while others finish, each event is handed over once, at its own place."""
    trace, events, done = Trace(), [], threading.Event()

    def run(graph: int) -> None:
        for number in range(2000):
            trace.finished(trace.started(), graph=graph, name=f"{number}", collective=None)

    def take() -> None:
        while not done.is_set():
            columns = trace.take()
            if columns is not None:
                events.extend(columns.events())

    threads = [threading.Thread(target=run, args=(graph,)) for graph in range(4)]
    taker = threading.Thread(target=take)
    for thread in (taker, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    rest = trace.take()
    events += [] if rest is None else rest.events()
    assert sorted(e.position for e in events) == list(range(1, 8001))
    assert {(e.graph, e.name) for e in events} == {
        (graph, f"{number}") for graph in range(4) for number in range(2000)
    }
    assert all(e.end_position >= e.position for e in events)


def test_operators_and_collectives_stand_in_one_batch():
    trace = Trace(clock_us=iter(range(100)).__next__)
    group = ProcessGroup("g", (0, 1))
    what = Collective(EventKind.SEND, group, 5, 10, "float32", peer=1)
    trace.finished(trace.started(), graph=2, name="a", collective=None)
    trace.finished(trace.started(), graph=0, name="send", collective=what)
    columns = trace.take()
    assert columns is not None
    operator, message = columns.events()
    assert operator == Event(2, 0, 1, 1, "a", EventKind.OPERATOR, 0, 1)
    assert (message.kind, message.group, message.sequence) == (EventKind.SEND, "g", 5)
    assert (message.element_count, message.dtype, message.peer) == (10, "float32", 1)
