"""Bytes are copied once, and room for them is counted."""

import threading

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side, TensorKey
from rankdump.stage import HEAD_BYTES, Budget, Stage


def head(source: ArraySource, figures: tuple[str, ...] | None = None) -> RecordHead:
    key = TensorKey(0, "Net", 0, 0, 1, "Add", "Default/Add-op0", Side.OUTPUT, 0)
    return RecordHead(key, source.dtype, source.shape, source.byte_count, figures=figures)


def stage(budget: Budget, patience=lambda: 0.0) -> Stage:
    return Stage(budget=budget, patience_s=patience)


def test_a_staged_tensor_no_longer_follows_the_job():
    array = np.arange(6, dtype="f4").reshape(2, 3)
    source = ArraySource(array)
    staged = stage(Budget(1 << 20)).copy(head(source), source)
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
