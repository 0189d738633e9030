"""Positions rise, and an event belongs to the iteration it began in."""

from rankdump.contract.events import EventKind, ProcessGroup
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
