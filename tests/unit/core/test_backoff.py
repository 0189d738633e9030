"""Retry pauses: they double up to a limit, and start again after a success."""

from __future__ import annotations

from rankdump._core.backoff import RetryBackoff, RetrySchedule


def test_backoff_doubles_to_its_limit_and_resets():
    backoff = RetryBackoff(1.0, 5.0)
    assert [backoff.next_pause_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next_pause_s() == 1.0


def test_schedule_lists_due_names_and_forgets_successes():
    schedule, now_s = RetrySchedule(1.0, 30.0), 0.0
    assert schedule.is_due("a", now_s=now_s)
    pauses: list[float] = []
    for _ in range(8):
        pauses.append(schedule.postpone("a", now_s=now_s))
        assert not schedule.is_due("a", now_s=now_s)
        assert schedule.list_due(now_s=now_s) == []
        now_s += pauses[-1]
        assert schedule.list_due(now_s=now_s) == ["a"]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == 30.0
    assert schedule.forget("a")
    assert not schedule.forget("a")
    assert schedule.list_due(now_s=1e9) == []
