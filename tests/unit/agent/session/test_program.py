"""Tests of ProgramOrder: program order from events in any order."""

from __future__ import annotations

import random

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdumpd.agent.session.pending_metadata import ProgramOrder


def columns(*places: tuple[int, int, int]) -> EventColumns:
    """Events by graph, iteration and position."""
    return EventColumns.from_events(
        [RankEvent(g, i, p, p, f"op{p}", EventKind.OPERATOR, 0, 0) for g, i, p in places]
    )


def test_program_order_sorts_events_by_position():
    """However events are batched and mixed, a graph's names come in the order of its positions."""
    places = [(position % 2, 4, position) for position in range(50)]
    random.Random(7).shuffle(places)
    program = ProgramOrder()
    program.add_events(columns(*places[:20]))
    program.add_events(columns(*places[20:], (0, 5, 99)))
    assert program.graphs(4) == {0, 1}
    assert program.unwritten(4) == {
        graph: [f"op{n}" for n in range(graph, 50, 2)] for graph in (0, 1)
    }


def test_program_order_has_repeated_event_once():
    """The last event of a position counts, in the same batch or a later one."""
    program = ProgramOrder()
    program.add_events(columns((0, 1, 1), (0, 1, 2), (0, 1, 1)))
    program.add_events(columns((0, 1, 2), (0, 1, 3)))
    assert program.unwritten(1) == {0: ["op1", "op2", "op3"]}


def test_program_order_omits_written_graphs():
    """A graph whose order is in the tree is only noted as having run."""
    program = ProgramOrder(written=[3])
    program.add_events(columns((0, 1, 0), (3, 1, 1)))
    assert program.unwritten(1) == {0: ["op0"]}
    program.forget_iterations(1)
    assert program.written == {0, 3}
    program.add_events(columns((0, 2, 0), (1, 2, 1)))
    assert program.graphs(2) == {0, 1}
    assert program.unwritten(2) == {1: ["op1"]}


def test_program_order_is_empty_without_events():
    """An iteration without events has no graphs."""
    program = ProgramOrder()
    program.add_events(columns())
    assert program.graphs(0) == frozenset()
    program.forget_iterations(0)
