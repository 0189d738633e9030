"""Every selected tensor is counted once, in its own iteration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankdump.accounts import Accounts

COUNTS = st.integers(1, 3)
FATES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b"]), COUNTS), max_size=30)


@given(fates=FATES)
def test_what_is_expected_is_kept_or_dropped(fates):
    """Law: expected = kept + dropped by reason, for each iteration and for the run."""
    accounts = Accounts()
    for iteration, reason, count in fates:
        if reason:
            accounts.lost(iteration, reason, count)
        else:
            accounts.took(iteration, count)
    tensors = [(iteration, reason) for iteration, reason, count in fates for _ in range(count)]
    assert accounts.kept == sum(not reason for _, reason in tensors)
    assert sum(accounts.losses.values()) + accounts.kept == len(tensors)
    for number in range(3):
        own = [reason for iteration, reason in tensors if iteration == number]
        assert accounts.expects(number) is bool(own)
        end = accounts.settle(number)
        assert end.expected == len(own)
        assert end.dropped == {reason: own.count(reason) for reason in set(own) if reason}
        assert accounts.settle(number).expected == 0


def test_time_and_losses_on_the_way():
    accounts = Accounts()
    accounts.stalled(4, 2_500_000)
    accounts.lost_on_the_way(3, "not_taken_by_agent")
    assert not accounts.expects(4)
    assert accounts.settle(4).stall_us == 2500
    assert accounts.losses == {"not_taken_by_agent": 3}
