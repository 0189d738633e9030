"""Bytes are copied once, and room for them is counted."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side, TensorKey
from rankdump.stage import HEAD_BYTES, Budget, Stage
from rankdump.values import Placing, Staged


def head(source: ArraySource, figures: tuple[str, ...] | None = None) -> RecordHead:
    key = TensorKey(0, "Net", 0, 0, 1, "Add", "Default/Add-op0", Side.OUTPUT, 0)
    return RecordHead(key, source.dtype, source.shape, source.byte_count, figures=figures)


def stage(budget: Budget, patience=lambda: 0.0) -> Stage:
    return Stage(budget=budget, patience_s=patience)


def test_a_staged_tensor_no_longer_follows_the_job():
    array = np.arange(6, dtype="f4").reshape(2, 3)
    source = ArraySource(array)
    staged = stage(Budget(1 << 20)).keep(head(source), source)
    assert staged is not None
    before = array.copy()
    array[:] = -1
    np.testing.assert_array_equal(np.frombuffer(staged.data, "f4").reshape(2, 3), before)


@pytest.mark.parametrize(
    ("array", "figures", "charge"),
    [
        (np.zeros(1000, "u1"), None, 1000),
        (np.zeros(1, "u1"), None, HEAD_BYTES),
        (np.zeros(1000, "u1"), (), HEAD_BYTES),
    ],
)
def test_room_is_what_a_record_takes_until_it_is_let_go(array, figures, charge):
    """Law: a record is never free, or tiny ones without end would fill the memory."""
    budget = Budget(1 << 20)
    room, record = stage(budget), head(ArraySource(array), figures)
    assert room.admit(record)
    assert budget.held_bytes == charge
    room.release(record)
    assert budget.held_bytes == 0


def test_a_full_buffer_admits_nothing_more():
    room, record = stage(Budget(8)), head(ArraySource(np.ones(1)))
    assert room.admit(record)
    assert not room.admit(record)


def test_a_tensor_larger_than_the_buffer_goes_in_alone():
    budget = Budget(8)
    assert budget.acquire(100, lambda: 0.0)
    assert not budget.acquire(1, lambda: 0.0)
    budget.release(100)
    assert budget.acquire(1, lambda: 0.0)


def test_waiting_ends_when_room_is_made():
    budget = Budget(8)
    assert budget.acquire(8, lambda: 0.0)
    timer = threading.Timer(0.05, budget.release, (8,))
    timer.start()
    assert budget.acquire(8, lambda: 60.0)
    timer.join()


class Unreadable(ArraySource):
    def copy_into(self, target):
        raise ValueError("gone")


def test_a_copy_that_fails_holds_no_room():
    budget, source = Budget(1 << 20), Unreadable(np.ones(9))
    with pytest.raises(ValueError, match="gone"):
        stage(budget).keep(head(source), source)
    assert budget.held_bytes == 0


def figures_of(record: RecordHead, _source) -> Staged:
    return Staged(replace(record, figures=("1",), degraded=True), memoryview(b""))


@pytest.mark.parametrize(
    ("placing", "room", "reduce", "kept"),
    [
        (Placing.DONE, 0, None, "straight"),
        (Placing.ELSEWHERE, 1 << 20, None, "bytes"),
        (Placing.ELSEWHERE, 1 << 20, figures_of, "bytes"),
        (Placing.ELSEWHERE, 1, figures_of, "figures"),
        (Placing.ELSEWHERE, 1, None, None),
        (Placing.ELSEWHERE, 1, lambda _head, _source: None, None),
        (Placing.FULL, 1 << 20, None, None),
        (Placing.FULL, 1 << 20, figures_of, "figures"),
    ],
)
def test_where_a_tensor_goes(placing, room, reduce, kept):
    """Law: the bytes where there is room, else the figures where the plan wants them, else none.

    A slab that is full is no reason to fill the heap instead.
    """
    budget, source = Budget(HEAD_BYTES + room), ArraySource(np.ones(1000, "u1"))
    if room == 1:
        assert budget.acquire(1, lambda: 0.0)
    the_stage = Stage(
        budget=budget,
        patience_s=lambda: 0.0,
        place=lambda _head, _source: placing,
        reduce=reduce,
    )
    before = budget.held_bytes
    record = the_stage.keep(head(source), source)
    if record is None:
        assert kept is None
        assert budget.held_bytes == before
    elif record.on_its_way:
        assert (kept, budget.held_bytes) == ("straight", before)
    else:
        held = {"bytes": 1000, "figures": HEAD_BYTES}[str(kept)]
        assert budget.held_bytes - before == held
        assert bytes(record.data) == (b"\1" * 1000 if kept == "bytes" else b"")
        the_stage.release(record.head)
        assert budget.held_bytes == before
