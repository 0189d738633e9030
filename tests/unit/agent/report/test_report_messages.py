"""Up to when an agent says that a rank is known."""

from __future__ import annotations

from rankdumpd.agent.records import QuietRank
from rankdumpd.agent.report.reporter import REPORT_DELAY_US, QuietRankTracker

S = 1_000_000
ONE, TWO = QuietRank("j", 0, "s0", 5), QuietRank("j", 1, "s1", 9)


class Host:
    """What an agent sees of its ranks, and the last number of its log."""

    def __init__(self) -> None:
        self.quiet: list[QuietRank] = []
        self.newest = 0
        self.hearing = QuietRankTracker(lambda: self.quiet)

    def look(self, now_us: int) -> None:
        self.hearing.update(now_us=now_us, newest=lambda: self.newest)


def test_a_rank_that_is_quiet_twice_is_known_up_to_shortly_before():
    host = Host()
    host.quiet = [ONE]
    host.look(10 * S)
    assert host.hearing.pop_quiet_ranks(0) == ((), 10 * S - REPORT_DELAY_US)
    host.quiet = [ONE, TWO]
    host.look(11 * S)
    assert host.hearing.pop_quiet_ranks(0) == ((ONE,), 11 * S - REPORT_DELAY_US)
    assert host.hearing.pop_quiet_ranks(0)[0] == ()


def test_nothing_is_known_of_a_rank_with_something_under_way_or_that_sent_more():
    host = Host()
    host.quiet = [ONE, TWO]
    host.look(10 * S)
    host.quiet = [QuietRank("j", 1, "s1", 10)]
    host.look(11 * S)
    assert host.hearing.pop_quiet_ranks(99)[0] == ()


def test_it_is_said_when_the_log_is_told_as_far_as_it_was_then():
    host = Host()
    host.quiet, host.newest = [ONE], 40
    host.look(10 * S)
    host.look(11 * S)
    assert host.hearing.pop_quiet_ranks(39)[0] == ()
    assert host.hearing.pop_quiet_ranks(40) == ((ONE,), 11 * S - REPORT_DELAY_US)


def test_a_new_stream_begins_to_look_anew():
    host = Host()
    host.quiet = [ONE]
    host.look(10 * S)
    host.look(11 * S)
    host.hearing.begin()
    assert host.hearing.pop_quiet_ranks(99)[0] == ()
    host.look(70 * S)
    assert host.hearing.pop_quiet_ranks(99)[0] == ()
