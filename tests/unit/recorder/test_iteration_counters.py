"""Balances of iterations, and stall times."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from rankdump._recorder.iteration_state import IterationCounters, StallTimer

COUNTS = st.integers(1, 3)
FATES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b"]), COUNTS), max_size=30)


@given(fates=FATES)
def test_counters_balance_expected_with_kept_and_dropped(fates):
    """Law: expected = kept + dropped by reason, for each iteration and for the run."""
    accounts = IterationCounters()
    for iteration, reason, count in fates:
        if reason:
            accounts.count_lost(iteration, reason, count)
        else:
            accounts.count_sent(iteration, count)
    tensors = [(iteration, reason) for iteration, reason, count in fates for _ in range(count)]
    assert accounts.kept_tensors == sum(not reason for _, reason in tensors)
    assert sum(accounts.losses_by_reason.values()) + accounts.kept_tensors == len(tensors)
    for number in range(3):
        own = [reason for iteration, reason in tensors if iteration == number]
        assert accounts.expects(number) is bool(own)
        end = accounts.close_iteration(number)
        assert end.expected == len(own)
        assert end.dropped == {reason: own.count(reason) for reason in set(own) if reason}
        assert accounts.close_iteration(number).expected == 0


def test_counters_add_stalls_and_undelivered_tensors():
    accounts = IterationCounters()
    accounts.add_stall(4, 2_500_000)
    accounts.count_undelivered(3, "not_taken_by_agent")
    assert not accounts.expects(4)
    assert accounts.close_iteration(4).stall_us == 2500
    assert accounts.losses_by_reason == {"not_taken_by_agent": 3}


def test_counters_close_an_iteration_with_its_positions():
    end = IterationCounters().close_iteration(4, (7, 9))
    assert (end.first_position, end.last_position) == (7, 9)


def test_stall_timer_counts_a_running_stall_and_returns_it_once():
    now = 0
    stalls = StallTimer(lambda: now)
    assert (stalls.total_us(), stalls.take_ended_ns()) == (0, 0)
    stalls.begin()
    now = 5_000
    assert (stalls.total_us(), stalls.take_ended_ns()) == (5, 0)
    stalls.end()
    with stalls.measure_stall():
        now = 7_000
    assert (stalls.total_us(), stalls.take_ended_ns(), stalls.take_ended_ns()) == (7, 7_000, 0)
    now = 9_000
    assert stalls.total_us() == 7


def test_stall_timer_adds_stalls_of_threads():
    """Law: the total never decreases, and includes every stall once."""
    stalls = StallTimer(iter(range(10**9)).__next__)
    told = []

    def stall() -> None:
        for _ in range(3000):
            stalls.begin()
            stalls.end()
            told.append(stalls.total_us())

    threads = [threading.Thread(target=stall) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stalls.take_ended_ns() >= 9000
    assert stalls.take_ended_ns() == 0
    assert max(told) <= stalls.total_us()
