"""Tests of QueueBudget: order of waiting callers, oversized items and closing."""

from __future__ import annotations

import threading

import pytest

from rankdump.errors import UnavailableError
from rankdumpd.agent.limits.usage import QueueBudget

WAIT_S = 300


class AcquiringThread:
    """A thread that acquires bytes of a budget."""

    def __init__(self, budget: QueueBudget, cost_bytes: int) -> None:
        self.done = threading.Event()
        self.error: UnavailableError | None = None
        self._budget, self._cost = budget, cost_bytes
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        try:
            self._budget.acquire(self._cost)
        except UnavailableError as error:
            self.error = error
        self.done.set()

    def finish(self) -> None:
        assert self.done.wait(WAIT_S)
        self._thread.join()


def queue_up(budget: QueueBudget, cost_bytes: int, place: int) -> AcquiringThread:
    waiter = AcquiringThread(budget, cost_bytes)
    while len(budget._waiting) < place:
        assert not waiter.done.wait(0.001)
    return waiter


def test_queue_budget_passes_oversized_item_alone_and_in_order():
    """An item above the limit waits until nothing is in flight; a small item after it waits too."""
    budget = QueueBudget(100)
    budget.acquire(60)
    oversized = queue_up(budget, 1000, 1)
    small = queue_up(budget, 1, 2)
    budget.release(60)
    oversized.finish()
    assert not small.done.is_set()
    assert (budget.used_bytes, budget.items) == (1000, 1)
    budget.release(1000)
    small.finish()
    assert (budget.used_bytes, budget.items) == (1, 1)
    assert budget.wait_idle(0) == 1
    budget.release(1)
    assert budget.wait_idle(WAIT_S) == 0


def test_queue_budget_close_fails_all_waiting_calls():
    budget = QueueBudget(10)
    budget.acquire(10)
    waiter = queue_up(budget, 1, 1)
    budget.close()
    waiter.finish()
    assert waiter.error is not None
    with pytest.raises(UnavailableError):
        budget.acquire(1)
