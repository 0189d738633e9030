"""Queue of frames: its order, and numbers that are assigned and acknowledged once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.record_heads import head_of

from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.record import StatisticRows, TensorKey, TensorKind, TensorSide
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._core.session_protocol import ChangedPlan, IterationEnd
from rankdump._transport import frame_queue as module
from rankdump._transport.frame_queue import FrameQueue, NumberedItem, RecoveredEntry, count_tensors

KEY = TensorKey(0, "Net", 0, 0, 1, "Add", "a", TensorSide.INPUT, 0)


KIND = TensorKind(0, "Add", "a", TensorSide.INPUT, 0, "uint8", (1,), 1)
ROWS = StatisticRows(0, (KIND,) * 3, (1, 2, 3), ("1",) * 3)


def record() -> StagedRecord:
    return StagedRecord(head_of(KEY, "uint8", (1,), 1), memoryview(b"x"))


def leave(items: FrameQueue) -> int:
    """Send the first item, as over the stream."""
    each = items.numbered.popleft() if items.numbered else items.pop()
    items.in_flight.append(each)
    return each.sequence


def left(items: FrameQueue) -> list[NumberedItem]:
    """Return the numbered items in the rank's own memory."""
    return [*items.in_flight, *items.numbered]


steps = st.lists(
    st.one_of(
        st.sampled_from(["record", "rows", "declaration", "leave", "straight", "again"]),
        st.integers(0, 50),
    )
)


@given(steps=steps)
def test_queue_returns_every_tensor_once_in_any_order_of_steps(steps):
    """Every tensor is released exactly once, and the outstanding count is never negative."""
    items, taken, added = FrameQueue(), [], 0
    for step in steps:
        if step == "record":
            items.add(record())
            added += 1
        elif step == "rows":
            items.add(ROWS)
            added += 3
        elif step == "declaration":
            items.add(IterationEnd(0, 0))
        elif step == "leave" and items.has_unsent:
            leave(items)
        elif step == "straight" and not items.blocks_records:
            items.assign_sequence(1, iteration=0)
        elif step == "again":
            items.requeue_unacknowledged()
            assert items.held_tensors == items.tensors
        elif isinstance(step, int):
            taken += items.acknowledge(step)
        numbers = [each.sequence for each in left(items)]
        assert sorted(set(numbers)) == sorted(numbers)
        assert [each.sequence for each in items.numbered] == sorted(
            each.sequence for each in items.numbered
        )
        assert items.outstanding >= len(items.waiting) >= 0
        lost = sum(each.tensors for each in left(items) if isinstance(each.item, RecoveredEntry))
        assert items.held_tensors - lost + sum(map(count_tensors, taken)) == added
        assert items.held_tensors <= items.tensors
    while items.has_unsent:
        leave(items)
    taken += items.acknowledge(items.last_sequence)
    assert sum(map(count_tensors, taken)) == added
    assert (items.outstanding, items.tensors) == (0, 0)


@pytest.mark.parametrize(
    ("waiting", "barred"),
    [
        (IterationEnd(0, 0), False),
        (ChangedPlan(1, DumpPlan(OutputSettings("/x"))), True),
        (record(), True),
        (None, False),
    ],
)
def test_record_overtakes_only_metadata_of_its_plan(waiting, barred):
    items = FrameQueue()
    if waiting is not None:
        items.add(waiting)
    assert items.blocks_records is barred


def test_record_does_not_overtake_numbered_items():
    items = FrameQueue()
    items.add(IterationEnd(0, 0))
    leave(items)
    items.requeue_unacknowledged()
    assert items.blocks_records


def test_changed_plan_is_kept_above_the_limit(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_METADATA", 1)
    items, changed = FrameQueue(), ChangedPlan(1, DumpPlan(OutputSettings("/x")))
    items.add(IterationEnd(0, 0))
    items.add(changed)
    assert (items.waiting[-1], items.lost_metadata) == (changed, 0)
    items.retain_metadata(items.pop())
    items.retain_metadata(items.pop())
    assert [each.item for each in items.in_flight] == [IterationEnd(0, 0), changed]


def test_metadata_above_the_limit_is_counted(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_METADATA", 2)
    items = FrameQueue()
    for _ in range(5):
        items.add(IterationEnd(0, 0))
        items.add(record())
    assert items.lost_metadata == 3
    assert len(items.waiting) == 7


def test_requeue_reports_items_that_are_gone_as_lost():
    """With iteration and count, once for each number, however often it is sent."""
    items = FrameQueue()
    items.assign_sequence(1, iteration=7)
    items.add(replace(ROWS, iteration=8))
    items.add(IterationEnd(7, 1))
    items.pop()
    items.retain_metadata(items.pop())
    items.assign_sequence(1, iteration=9)
    assert items.requeue_unacknowledged() == 5
    for _ in range(2):
        lost = [each.item for each in items.numbered]
        said = [item.frame.lost for item in lost if isinstance(item, RecoveredEntry)]
        assert [(each.iteration, each.tensors, each.reason) for each in said] == [
            (7, 1, "corrupted"),
            (8, 3, "corrupted"),
            (9, 1, "corrupted"),
        ]
        assert isinstance(lost[2], IterationEnd)
        assert items.lost_metadata == 0
        while items.numbered:
            leave(items)
        items.requeue_unacknowledged()


def test_requeue_keeps_carried_and_retained_items_in_order():
    items = FrameQueue()
    items.assign_sequence(1, iteration=7)
    items.add(IterationEnd(7, 1))
    items.retain_metadata(items.pop())
    carried = [
        RecoveredEntry(module.make_blank_frame(n), memoryview(b""), True, 2 - n) for n in (1, 2)
    ]
    assert (
        items.requeue_unacknowledged(NumberedItem(n, each) for n, each in enumerate(carried, 1))
        == 0
    )
    assert [each.item for each in items.numbered] == [carried[0], IterationEnd(7, 1)]


def test_retained_metadata_is_limited(monkeypatch):
    """Metadata beyond the limit that is damaged is sent as a blank frame, and is counted."""
    monkeypatch.setattr(module, "MAX_WAITING_METADATA", 2)
    items = FrameQueue()
    for iteration in range(3):
        items.add(IterationEnd(iteration, 0))
        items.retain_metadata(items.pop())
    assert items.requeue_unacknowledged() == 0
    assert items.lost_metadata == 1
    *kept, blank = (each.item for each in items.numbered)
    assert kept == [IterationEnd(0, 0), IterationEnd(1, 0)]
    assert isinstance(blank, RecoveredEntry)
    assert blank.frame == module.make_blank_frame(3)


def test_acknowledgement_of_unsent_items_is_ignored():
    items = FrameQueue()
    items.add(record())
    assert items.acknowledge(9) == []
    assert items.outstanding == 1
