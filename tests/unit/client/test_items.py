"""What waits to leave keeps its order, and every number is given and taken back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump.contract.exchange import IterationEnd, RecordHead
from rankdump.contract.figure_rows import FigureRows, TensorKind
from rankdump.contract.key import Side, TensorKey
from rankdump.ship import items as module
from rankdump.ship.items import Items, tensors_of
from rankdump.values import Staged

KEY = TensorKey(0, "Net", 0, 0, 1, "Add", "a", Side.INPUT, 0)


KIND = TensorKind(0, "Add", "a", Side.INPUT, 0, "uint8", (1,), 1)
ROWS = FigureRows(0, (KIND,) * 3, (1, 2, 3), ("1",) * 3)


def record() -> Staged:
    return Staged(RecordHead(KEY, "uint8", (1,), 1), memoryview(b"x"))


def leave(items: Items) -> int:
    """Let the first item go, as over the stream."""
    each = items.numbered.popleft() if items.numbered else items.pop()
    items.window.append(each)
    return each.sequence


steps = st.lists(
    st.one_of(
        st.sampled_from(["record", "rows", "declaration", "leave", "straight", "again"]),
        st.integers(0, 50),
    )
)


@given(steps=steps)
def test_the_balance_of_any_course(steps):
    """Law: every tensor comes back exactly once, and what is outstanding is never negative."""
    items, taken, added, straight = Items(), [], 0, 0
    for step in steps:
        if step == "record":
            items.add(record())
            added += 1
        elif step == "rows":
            items.add(ROWS)
            added += 3
        elif step == "declaration":
            items.add(IterationEnd(0, 0))
        elif step == "leave" and items.unsent:
            leave(items)
        elif step == "straight" and not items.bars_the_way:
            items.number(tensors=1)
            straight += 1
        elif step == "again":
            items.send_again()
        elif isinstance(step, int):
            taken += items.acknowledge(step)
        numbers = [each.sequence for each in (*items.window, *items.numbered)]
        assert sorted(set(numbers)) == sorted(numbers)
        assert [each.sequence for each in items.numbered] == sorted(
            each.sequence for each in items.numbered
        )
        assert items.outstanding >= len(items.waiting) >= 0
        assert items.held_tensors + sum(map(tensors_of, taken)) == added
        assert items.held_tensors <= items.tensors
    while items.unsent:
        leave(items)
    taken += items.acknowledge(items.last)
    assert sum(map(tensors_of, taken)) == added
    assert (items.outstanding, items.tensors) == (0, 0)


@pytest.mark.parametrize(
    ("waiting", "barred"), [(IterationEnd(0, 0), False), (record(), True), (None, False)]
)
def test_a_record_overtakes_declarations_only(waiting, barred):
    items = Items()
    if waiting is not None:
        items.add(waiting)
    assert items.bars_the_way is barred


def test_what_has_a_number_is_not_overtaken():
    items = Items()
    items.add(IterationEnd(0, 0))
    leave(items)
    items.send_again()
    assert items.bars_the_way


def test_declarations_without_end_are_counted(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_DECLARATIONS", 2)
    items = Items()
    for _ in range(5):
        items.add(IterationEnd(0, 0))
        items.add(record())
    assert items.lost_declarations == 3
    assert len(items.waiting) == 7


def test_an_answer_to_what_was_never_sent_takes_nothing():
    items = Items()
    items.add(record())
    assert items.acknowledge(9) == []
    assert items.outstanding == 1
