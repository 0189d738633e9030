"""The staging buffer and its budgets."""

import threading

import numpy as np
import pytest
from support import record_heads
from support.send_buffers import SendBufferDouble

from rankdump._core.record import StatisticRows, TensorKey, TensorKind, TensorSide
from rankdump._core.recorder_protocol import PlacementResult, StagedRecord
from rankdump._core.session_protocol import RecordHead
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.record_builder import (
    MIN_RECORD_BYTES,
    ROW_BYTES,
    StagingBudget,
    StagingBuffer,
)


def head(source: ArraySource) -> RecordHead:
    key = TensorKey(0, "Net", 0, 0, 1, "Add", "Default/Add-op0", TensorSide.OUTPUT, 0)
    return record_heads.head_of(key, source.dtype, source.shape, source.byte_count)


def rows(count: int) -> StatisticRows:
    kind = TensorKind(0, "Add", "Default/Add-op0", TensorSide.OUTPUT, 0, "uint8", (1000,), 1000)
    return StatisticRows(0, (kind,) * count, tuple(range(count)), ("1",) * count)


def stage(
    budget: StagingBudget,
    *,
    rows: StagingBudget | None = None,
    placing: PlacementResult = PlacementResult.ELSEWHERE,
) -> StagingBuffer:
    return StagingBuffer(SendBufferDouble(placing), records=budget, rows=rows or StagingBudget(0))


def test_staged_tensor_does_not_change_with_the_array():
    array = np.arange(6, dtype="f4").reshape(2, 3)
    source = ArraySource(array)
    staged = stage(StagingBudget(1 << 20)).keep(head(source), source)
    assert isinstance(staged, StagedRecord)
    before = array.copy()
    array[:] = -1
    np.testing.assert_array_equal(np.frombuffer(staged.data, "f4").reshape(2, 3), before)


@pytest.mark.parametrize(
    ("array", "charge"), [(np.zeros(1000, "u1"), 1000), (np.zeros(1, "u1"), MIN_RECORD_BYTES)]
)
def test_record_is_charged_until_its_release(array, charge):
    """Law: every record is charged a minimum, or tiny records would fill the memory."""
    budget, source = StagingBudget(1 << 20), ArraySource(array)
    room = stage(budget)
    record = room.keep(head(source), source)
    assert isinstance(record, StagedRecord)
    assert budget.held_bytes == charge
    room.release(record)
    assert budget.held_bytes == 0


def test_full_buffer_stages_no_record():
    room, source = stage(StagingBudget(8)), ArraySource(np.ones(1))
    assert room.keep(head(source), source)
    assert room.keep(head(source), source) is None


def test_rows_have_a_separate_budget():
    """Law: rows are sent although records fill their budget, and are charged until then."""
    records, budget, source = (
        StagingBudget(8),
        StagingBudget(3 * ROW_BYTES),
        ArraySource(np.ones(1)),
    )
    room = stage(records, rows=budget)
    assert room.keep(head(source), source)
    assert room.admit(rows(2))
    assert not room.admit(rows(2))
    assert room.admit(rows(1))
    assert budget.held_bytes == 3 * ROW_BYTES
    room.release(rows(2))
    room.release(rows(1))
    assert (budget.held_bytes, records.held_bytes) == (0, MIN_RECORD_BYTES)


def test_tensor_larger_than_the_budget_is_staged_alone():
    budget = StagingBudget(8)
    assert budget.acquire(100, lambda: 0.0)
    assert not budget.acquire(1, lambda: 0.0)
    budget.release(100)
    assert budget.acquire(1, lambda: 0.0)


def test_wait_for_space_ends_with_a_release():
    budget = StagingBudget(8)
    assert budget.acquire(8, lambda: 0.0)
    timer = threading.Timer(0.05, budget.release, (8,))
    timer.start()
    assert budget.acquire(8, lambda: 60.0)
    timer.join()


class UnreadableSource(ArraySource):
    def accelerator(self):
        return None

    def copy_into(self, target):
        raise ValueError("gone")


def test_failed_copy_releases_its_space():
    budget, source = StagingBudget(1 << 20), UnreadableSource(np.ones(9))
    with pytest.raises(ValueError, match="gone"):
        stage(budget).keep(head(source), source)
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    ("placing", "room", "kept"),
    [
        (PlacementResult.DONE, 0, "straight"),
        (PlacementResult.ELSEWHERE, 1 << 20, "bytes"),
        (PlacementResult.ELSEWHERE, 1, None),
        (PlacementResult.FULL, 1 << 20, None),
    ],
)
def test_tensor_is_staged_in_shared_memory_or_heap(placing, room, kept):
    """Law: a full slab does not make tensors fill the heap."""
    budget, source = StagingBudget(MIN_RECORD_BYTES + room), ArraySource(np.ones(1000, "u1"))
    if room == 1:
        assert budget.acquire(1, lambda: 0.0)
    before = budget.held_bytes
    the_stage = stage(budget, placing=placing)
    record = the_stage.keep(head(source), source)
    if record is None:
        assert kept is None
    elif kept == "straight":
        assert isinstance(record, RecordHead)
        assert budget.held_bytes == before
    else:
        assert isinstance(record, StagedRecord)
        assert budget.held_bytes - before == 1000
        assert bytes(record.data) == b"\1" * 1000
    if isinstance(record, StagedRecord):
        the_stage.release(record)
    assert budget.held_bytes == before
