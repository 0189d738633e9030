"""Bytes are copied once and counted always."""

import threading

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.key import Side
from rankdump.stage import BUFFER_FULL, Budget, Stage
from rankdump.values import Observation


def observation(array) -> Observation:
    return Observation(0, "Add", "Default/Add-op0", Side.OUTPUT, 0, "out", ArraySource(array))


def stage(budget: Budget, clock=lambda: 1_000, patience=lambda: 0.0) -> Stage:
    return Stage(rank=1, net_name="Net", budget=budget, patience_s=patience, clock_us=clock)


def test_a_staged_tensor_no_longer_follows_the_job():
    array = np.arange(6, dtype="f4").reshape(2, 3)
    staged = stage(Budget(1 << 20)).take(observation(array), 0)
    before = array.copy()
    array[:] = -1
    assert staged is not None
    np.testing.assert_array_equal(np.frombuffer(staged.data, "f4").reshape(2, 3), before)
    assert staged.head.shape == (2, 3)
    assert staged.head.key.rank == 1


def test_time_stamps_are_unique_and_rise_when_the_clock_does_not():
    """Law: they name files, so a clock that stands still or steps back must not repeat one."""
    times = iter([50, 50, 20, 60])
    room = stage(Budget(1 << 20), clock=lambda: next(times))
    stamps = []
    for _ in range(4):
        staged = room.take(observation(np.ones(1)), 0)
        assert staged is not None
        stamps.append(staged.head.key.timestamp_us)
    assert stamps == [50, 51, 52, 60]


def test_a_full_buffer_is_a_counted_drop():
    budget = Budget(8)
    room = stage(budget)
    assert room.take(observation(np.ones(1)), 3) is not None
    assert room.take(observation(np.ones(1)), 3) is None
    end = room.settle(3)
    assert (end.expected, end.dropped) == (2, {BUFFER_FULL: 1})


def test_losses_are_expected_and_balances_belong_to_their_iteration():
    room = stage(Budget(1 << 20))
    room.lose(0, "sparse")
    room.take(observation(np.ones(1)), 1)
    assert (room.settle(0).expected, room.settle(1).expected, room.settle(2).expected) == (1, 1, 0)


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


def test_a_copy_that_fails_gives_its_room_back():
    class Broken(ArraySource):
        def copy_into(self, target: memoryview) -> None:
            raise RuntimeError("no data")

    budget = Budget(8)
    broken = Observation(0, "Add", "x", Side.INPUT, 0, "", Broken(np.ones(1)))
    with pytest.raises(RuntimeError):
        stage(budget).take(broken, 0)
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::-2],
        np.array(7, dtype=">i4"),
        np.array([True, False]),
        np.array([1 + 2j], dtype="c8"),
        np.broadcast_to(np.float16(3), (2, 2)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_any_memory_order_arrives_as_little_endian_c_order(array):
    source = ArraySource(array)
    data = bytearray(source.byte_count)
    source.copy_into(memoryview(data))
    little = array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(np.frombuffer(data, little).reshape(array.shape), array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.array(["2020"], "M8")])
def test_what_no_file_can_hold_is_refused(array):
    with pytest.raises(UnsupportedError):
        ArraySource(array)
