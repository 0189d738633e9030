"""Waits that freeze a job while it hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.rank_limits import WORLD, S, session, torch

from rankdump._core.events import OPEN_END_POSITION, EventColumns, EventKind, RankEvent
from rankdumpd.coordinator.alarms.job_alarms import find_wait_alarms
from rankdumpd.coordinator.fleet_views import IterationView, JobFacts, RankCoverage
from rankdumpd.coordinator.hints.open_waits import find_open_waits

T0 = 1_700_000_000 * S
FACTS = JobFacts(
    "j",
    {rank: torch("gloo", 20) for rank in range(3)},
    {rank: session(rank, "torch 2.5.0", "CPU") for rank in range(3)},
)


def batch(start_us: int, *, done: bool) -> EventColumns:
    """An all-reduce of all ranks, or an operator after which the rank did nothing."""
    call = {"kind": EventKind.ALL_REDUCE, "group": "w", "sequence": 7}
    end = 1 if done else OPEN_END_POSITION
    own: dict[str, Any] = {"kind": EventKind.OPERATOR} if done else call
    event = RankEvent(0, 4, 1, end, "AllReduce", start_us=start_us, end_us=start_us, **own)
    return EventColumns.from_events([event], (WORLD,))


VIEW = IterationView(
    *("j", 4, "/tree"),
    {
        0: (batch(T0, done=False),),
        1: (batch(T0 + 40, done=True),),
        2: (batch(T0 + 90, done=False),),
    },
    frozenset(),
    (),
    0,
    coverage={rank: RankCoverage(OPEN_END_POSITION) for rank in range(3)},
    attempt=1,
)


def find_alarms(view: IterationView, waited_s: float):
    now_us = T0 + int(waited_s * S)
    hints = find_open_waits(view, FACTS, now_us)
    return list(find_wait_alarms(view, hints, now_us))


def test_wait_past_half_of_its_timeout_is_an_alarm():
    [alarm] = find_alarms(VIEW, 12)
    assert alarm.key == ("j", 1, 4)
    assert (alarm.cause.kind.value, alarm.cause.rank) == ("wait", None)
    assert alarm.cause.text == (
        "all_reduce 'AllReduce', number 7 of group 'w', has waited 12 s since 2023-11-14 22:13:20 "
        "UTC; arrived: ranks 0,2; missing: rank 1; that is 60% of the 20 s limit "
        "(timeout of init_process_group)"
    )


@pytest.mark.parametrize("waited_s", [0.5, 9.9])
def test_shorter_wait_is_none(waited_s):
    assert find_alarms(VIEW, waited_s) == []


def test_wait_that_is_not_certain_is_none():
    """The late rank may have arrived since it was heard of."""
    behind = {**VIEW.coverage, 1: RankCoverage(T0 + 3 * S, "its agent is behind")}
    assert find_alarms(replace(VIEW, coverage=behind), 19) == []


def test_wait_without_a_known_limit_is_none():
    hints = find_open_waits(VIEW, JobFacts("j"), T0 + 900 * S)
    assert list(find_wait_alarms(VIEW, hints, T0 + 900 * S)) == []
