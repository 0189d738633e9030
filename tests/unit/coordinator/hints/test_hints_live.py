"""Hints and warnings about open waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_limits import S, session, torch

from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdumpd.coordinator.fleet_views import IterationView, JobFacts, RankCoverage
from rankdumpd.coordinator.hints.assessment import build_hints
from rankdumpd.coordinator.hints.open_waits import find_open_waits
from rankdumpd.coordinator.hints.rank_warnings import build_warnings
from rankdumpd.coordinator.hints.spread_history import HintState

WORLD, PAIR = ProcessGroup("w", (0, 1, 2)), ProcessGroup("p", (0, 1))
FACTS = JobFacts(
    "j",
    {rank: torch("gloo", 20) for rank in range(3)},
    {rank: session(rank, "torch 2.5.0", "CPU") for rank in range(3)},
)
T0 = 1_000 * S


def event(position: int, start_us: int, *, done: bool = True, **more: Any) -> RankEvent:
    """A call that took no time, or one that is open."""
    usual: dict[str, Any] = {"group": "w", "kind": EventKind.ALL_REDUCE, "name": "AllReduce"}
    return RankEvent(
        0, 4, position, position if done else OPEN_END_POSITION, start_us=start_us, end_us=start_us,
        **{**usual, **more},
    )  # fmt: skip


def operator(position: int, end_us: int, name: str) -> RankEvent:
    return RankEvent(0, 4, position, position, name, EventKind.OPERATOR, end_us - 5, end_us)


def batch(*events: RankEvent, stalled_us: int = 0) -> EventColumns:
    return replace(EventColumns.from_events(list(events), (WORLD, PAIR)), stalled_us=stalled_us)


def view(events: dict[int, list[EventColumns]], **more: Any) -> IterationView:
    batches = {rank: tuple(each) for rank, each in events.items()}
    stalls = {rank: max(each.stalled_us for each in own) for rank, own in events.items() if own}
    usual: dict[str, Any] = {"excluded": frozenset(), "late": (), "late_count": 0}
    usual["stalls"] = stalls
    # Every rank is heard of without delay, where a test does not say otherwise.
    usual["coverage"] = {rank: RankCoverage(OPEN_END_POSITION) for rank in range(3)}
    return IterationView("j", 4, "/tree", batches, **{**usual, **more})


def stuck(waited_s: float, *, stalled_us: int = 0) -> tuple[IterationView, int]:
    """Ranks 0 and 2 are in an all-reduce at which rank 1 has not arrived."""
    met = event(1, T0, sequence=6)
    events = {
        0: [batch(met), batch(event(2, T0 + 5, done=False, sequence=7))],
        1: [batch(met, operator(2, T0 + 40, "Conv2d-op3"), stalled_us=stalled_us)],
        2: [batch(met, event(2, T0 + 90, done=False, sequence=7))],
    }
    return view(events), T0 + 5 + int(waited_s * S)


def test_open_wait_names_ranks_and_duration():
    now = stuck(12)
    (hint,) = find_open_waits(now[0], FACTS, now[1])
    assert (hint.waiting, hint.level, hint.share) == (True, HintLevel.WARNING, 0.6)
    assert (hint.first_rank, hint.last_rank, hint.sequence, hint.iteration) == (0, 1, 7, 4)
    assert hint.settings == ("init_process_group(..., timeout=timedelta(seconds=28))",)
    for words in (
        "rank 0 has waited 12 s for rank 1 in all_reduce 'AllReduce', number 7 of group 'w'",
        "rank 1 was last seen in 'Conv2d-op3', 12 s ago",
        "60% of the 20 s limit (timeout of init_process_group)",
        "dumping caused none of it",
    ):
        assert words in hint.reason


def test_open_wait_ends_at_time_that_late_rank_has_reported():
    """The agent of rank 1 is a minute behind, and rank 1 arrived after 3.4 s."""
    now, now_us = stuck(64)
    behind = RankCoverage(T0 + 5 + int(3.4 * S), "the agent of b has 12,000 events to report")
    (hint,) = find_open_waits(replace(now, coverage={**now.coverage, 1: behind}), FACTS, now_us)
    assert (hint.waiting, hint.spread_us, hint.level) == (True, int(3.4 * S), HintLevel.OK)
    assert not build_warnings([hint])
    for words in (
        "rank 0 has waited 3.4 s or more for rank 1 in all_reduce 'AllReduce', number 7",
        "what rank 1 did in the last 60.6 s is not known: the agent of b has 12,000 events",
        "rank 1 was last seen in 'Conv2d-op3', 64 s ago",
    ):
        assert words in hint.reason


def test_hanging_rank_with_current_agent_gets_warning_in_time():
    """The reports are a few seconds old, and half of the 20 s are over."""
    now, now_us = stuck(13)
    (hint,) = find_open_waits(
        replace(now, coverage={1: RankCoverage(now_us - 3 * S)}), FACTS, now_us
    )
    assert (hint.spread_us, hint.level) == (10 * S, HintLevel.WARNING)
    (line,) = build_warnings([hint]).values()
    assert "rank 1 is late: rank 0 has waited at least 10 s, 50% of the 20 s" in line


@pytest.mark.parametrize(
    ("coverage", "words"),
    [
        ({}, "rank 1 may have arrived; rank 1 has reported nothing so far"),
        (
            {1: RankCoverage(T0 - S, "the agent of b last reported 51 s ago")},
            "rank 1 may have arrived; what rank 1 did in the last 51 s is not known: the agent of b"
            " last reported 51 s ago",
        ),
    ],
)
def test_open_wait_of_silent_agent_is_limited_to_known_time(
    coverage: dict[int, RankCoverage], words: str
):
    now, now_us = stuck(50)
    (hint,) = find_open_waits(replace(now, coverage=coverage), FACTS, now_us)
    assert (hint.spread_us, hint.level) == (0, HintLevel.OK)
    assert words in hint.reason
    assert "is in all_reduce 'AllReduce', number 7" in hint.reason
    assert not build_warnings([hint])


def test_rank_known_to_be_late_is_named_before_unknown_ones():
    """Rank 1 has not reported for long; rank 2 is known to be late."""
    events = {0: [batch(event(1, T0, done=False))], 1: [], 2: []}
    coverage = {1: RankCoverage(T0 + S), 2: RankCoverage(T0 + 12 * S)}
    (hint,) = find_open_waits(view(events, coverage=coverage), FACTS, T0 + 13 * S)
    assert (hint.last_rank, hint.spread_us) == (2, 12 * S)


def test_dump_share_is_stall_of_late_rank():
    now = stuck(12, stalled_us=11 * S)
    assert find_open_waits(now[0], FACTS, now[1])[0].dump_us == 11 * S
    now = stuck(12, stalled_us=15 * S)
    assert find_open_waits(now[0], FACTS, now[1])[0].dump_us == 12 * S


def test_dump_share_excludes_stall_of_both_ranks():
    met = event(1, T0, sequence=6)
    events = {
        0: [batch(met, event(2, T0 + 5, done=False, sequence=7, stall_us=4 * S))],
        1: [batch(met, stalled_us=11 * S)],
    }
    (hint,) = find_open_waits(view(events), FACTS, T0 + 5 + 12 * S)
    assert hint.dump_us == 7 * S


def test_stall_of_rank_without_call_counts_from_last_merged_call():
    events = {
        0: [batch(event(1, T0, done=False, sequence=7, stall_us=3 * S))],
        1: [batch(operator(1, T0, "Linear-op0"), stalled_us=9 * S)],
    }
    state = HintState(3, stalls={0: 3 * S, 1: 4 * S})
    (hint,) = find_open_waits(view(events), FACTS, T0 + 12 * S, state)
    assert hint.dump_us == 5 * S


def test_stall_of_rank_without_events_counts():
    events = {0: [batch(event(1, T0, done=False, sequence=7))]}
    state = HintState(3, stalls={1: 4 * S})
    (hint,) = find_open_waits(view(events, stalls={1: 15 * S}), FACTS, T0 + 12 * S, state)
    assert (hint.last_rank, hint.dump_us) == (1, 11 * S)
    assert "rank 1 has reported nothing of this iteration" in hint.reason


def test_complete_calls_give_no_open_wait():
    met = event(1, T0, sequence=6)
    assert find_open_waits(view({0: [batch(met)], 1: []}), FACTS, T0 + 50 * S) == ()
    running = {rank: [batch(event(1, T0, done=False, sequence=6))] for rank in range(3)}
    assert find_open_waits(view(running), FACTS, T0 + 50 * S) == ()
    done = {0: [batch(event(1, T0, done=False, sequence=6)), batch(met)]}
    assert find_open_waits(view(done), FACTS, T0 + 50 * S) == ()
    swapped = {0: [batch(met), batch(event(1, T0, done=False, sequence=6))]}
    assert find_open_waits(view(swapped), FACTS, T0 + 50 * S) == ()


def test_excluded_ranks_give_no_open_wait():
    now, now_us = stuck(12)
    assert find_open_waits(replace(now, excluded=frozenset({1})), FACTS, now_us) == ()


def test_rank_without_reports_is_named():
    now, now_us = stuck(12)
    silent = replace(now, events={rank: now.events[rank] for rank in (0, 2)})
    (hint,) = find_open_waits(silent, FACTS, now_us)
    assert hint.last_rank == 1
    assert "rank 1 has reported nothing of this iteration" in hint.reason


def test_late_rank_is_the_one_that_does_not_wait_elsewhere():
    """Rank 0 waits for 1 and 2, and rank 1 waits for 2 in another call."""
    other = ProcessGroup("q", (1, 2))
    inside = replace(batch(event(1, T0, done=False, group="q")), groups=(WORLD, other))
    events = {0: [batch(event(1, T0, done=False))], 1: [inside], 2: []}
    hints = {hint.group: hint for hint in find_open_waits(view(events), FACTS, T0 + 12 * S)}
    assert {group: hint.last_rank for group, hint in hints.items()} == {"w": 2, "q": 2}


@pytest.mark.parametrize(("waits", "answers"), [("RECV", "SEND"), ("SEND", "RECV")])
def test_open_message_waits_for_its_other_end(waits: str, answers: str):
    mine: dict[str, Any] = {"kind": EventKind[waits], "group": "p", "peer": 1, "name": "Message"}
    other: dict[str, Any] = {"kind": EventKind[answers], "group": "p", "peer": 0, "name": "Message"}
    alone = {0: [batch(event(1, T0, done=False, **mine))], 1: [batch(operator(1, T0, "A"))]}
    (hint,) = find_open_waits(view(alone), FACTS, T0 + 12 * S)
    assert (hint.first_rank, hint.last_rank, hint.kind) == (0, 1, waits.lower())
    both = alone | {1: [batch(event(1, T0, **other))]}
    assert find_open_waits(view(both), FACTS, T0 + 12 * S) == ()
    later: dict[str, Any] = {**other, "sequence": 1}
    wrong = alone | {1: [batch(event(1, T0, **later))]}
    assert len(find_open_waits(view(wrong), FACTS, T0 + 12 * S)) == 1


def test_growing_wait_gets_few_warnings():
    """The wait is evaluated each second for a minute and a half, with a limit of 20 s."""
    said: dict[str, None] = {}
    for tenth in range(900):
        now, now_us = stuck(tenth / 10)
        said |= dict.fromkeys(build_warnings(find_open_waits(now, FACTS, now_us)).values())
    assert 6 <= len(said) <= 12
    assert all(line.startswith("group 'w': rank 1 is late: rank 0 has waited ") for line in said)
    assert next(iter(said)) == (
        "group 'w': rank 1 is late: rank 0 has waited at least 10 s, 50% of the 20 s limit ("
        "timeout of init_process_group); dumping causes none of it; "
        "set init_process_group(..., timeout=timedelta(seconds=24))"
    )


@settings(deadline=None)
@given(waited=st.floats(0, 1000), stalled=st.integers(0, 10**9))
def test_open_wait_hints_are_consistent(waited: float, stalled: int):
    """The dump share is within the wait, the level follows from the share, and only near hints get
    a warning.
    """
    now, now_us = stuck(waited, stalled_us=stalled)
    (hint,) = find_open_waits(now, FACTS, now_us)
    assert 0 <= hint.dump_us <= hint.spread_us
    assert (hint.level is HintLevel.OK) == (hint.share < 0.5) == (not hint.settings)
    assert (hint.level is HintLevel.EXCEEDED) == (hint.share >= 1)
    assert len(build_warnings([hint])) == (hint.level is not HintLevel.OK)


def test_hints_combine_published_and_open_waits():
    now, now_us = stuck(12)
    hints: tuple[TimeoutHint, ...] = (
        *build_hints(HintState(), FACTS),
        *find_open_waits(now, FACTS, now_us),
    )
    assert len(build_warnings(hints)) == 1


def test_warning_text_stays_within_a_step():
    """A later report shows that another rank waits longer, which does not change the warning."""
    now, now_us = stuck(12)
    (first,) = find_open_waits(now, FACTS, now_us)
    said = build_warnings([first])
    other = replace(first, first_rank=2)
    assert build_warnings([other]) != said
    assert build_warnings([other], said) == said
    for news in ({"last_rank": 2}, {"spread_us": 14 * S}, {"waiting": False}, {"group": "p"}):
        assert not build_warnings([replace(other, **news)], said).items() & said.items()
