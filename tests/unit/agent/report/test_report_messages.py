"""Tests of QuietRankTracker: which ranks are reported as quiet, and up to when."""

from __future__ import annotations

from rankdumpd.agent.records import QuietRank
from rankdumpd.agent.report.reporter import REPORT_DELAY_US, QuietRankTracker

S = 1_000_000
ONE, TWO = QuietRank("j", 0, "s0", 5), QuietRank("j", 1, "s1", 9)


class TrackedRanks:
    """A tracker with its input: the quiet ranks and the last number of the log."""

    def __init__(self) -> None:
        self.quiet: list[QuietRank] = []
        self.newest = 0
        self.tracker = QuietRankTracker(lambda: self.quiet)

    def check(self, now_us: int) -> None:
        self.tracker.update(now_us=now_us, newest=lambda: self.newest)


def test_rank_quiet_at_two_checks_is_reported():
    ranks = TrackedRanks()
    ranks.quiet = [ONE]
    ranks.check(10 * S)
    assert ranks.tracker.pop_quiet_ranks(0) == ((), 10 * S - REPORT_DELAY_US)
    ranks.quiet = [ONE, TWO]
    ranks.check(11 * S)
    assert ranks.tracker.pop_quiet_ranks(0) == ((ONE,), 11 * S - REPORT_DELAY_US)
    assert ranks.tracker.pop_quiet_ranks(0)[0] == ()


def test_busy_rank_and_rank_with_new_frames_are_not_reported():
    ranks = TrackedRanks()
    ranks.quiet = [ONE, TWO]
    ranks.check(10 * S)
    ranks.quiet = [QuietRank("j", 1, "s1", 10)]
    ranks.check(11 * S)
    assert ranks.tracker.pop_quiet_ranks(99)[0] == ()


def test_quiet_rank_is_reported_after_items_before_it_are_sent():
    ranks = TrackedRanks()
    ranks.quiet, ranks.newest = [ONE], 40
    ranks.check(10 * S)
    ranks.check(11 * S)
    assert ranks.tracker.pop_quiet_ranks(39)[0] == ()
    assert ranks.tracker.pop_quiet_ranks(40) == ((ONE,), 11 * S - REPORT_DELAY_US)


def test_new_stream_discards_earlier_checks():
    ranks = TrackedRanks()
    ranks.quiet = [ONE]
    ranks.check(10 * S)
    ranks.check(11 * S)
    ranks.tracker.begin()
    assert ranks.tracker.pop_quiet_ranks(99)[0] == ()
    ranks.check(70 * S)
    assert ranks.tracker.pop_quiet_ranks(99)[0] == ()
