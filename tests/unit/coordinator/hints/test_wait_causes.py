"""Causes of waits that a longer timeout does not cure."""

from __future__ import annotations

from dataclasses import replace

from support.rank_limits import session

from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import RankWait, SessionState
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit, parse_hints
from rankdumpd.coordinator.hints.open_waits import (
    MIN_STUCK_US,
    explain_hint,
    mark_stuck_waits,
    may_be_stuck,
    select_standing_findings,
)
from rankdumpd.coordinator.hints.rank_warnings import build_warnings

LONG = MIN_STUCK_US
DEADLOCK = Finding(FindingKind.CYCLE, 4, "iteration 4: deadlock: rank 0 waits", (0, 1))
LIMIT = TimeoutLimit("timeout of new_group", 20_000_000, "process group", (0, 1))
HINT = TimeoutHint(
    job_id="j",
    group="p",
    backend="gloo",
    level=HintLevel.WARNING,
    waiting=True,
    kind="all_reduce",
    name="AllReduce",
    iteration=4,
    sequence=7,
    first_rank=0,
    last_rank=1,
    spread_us=12_000_000,
    dump_us=0,
    limit=LIMIT,
    limits=(LIMIT,),
    projected_us=12_000_000,
    projected_iteration=-1,
    settings=("new_group(..., timeout=timedelta(seconds=60))",),
    reason="rank 0 waits; the suggested settings allow twice the expected wait",
)


def wait(rank: int, *absent: int, waited_us: int = LONG, sequence: int = 7) -> RankWait:
    return RankWait(
        "j", rank, 4, "all_reduce", "AllReduce", "p", sequence, 0, waited_us, absent=absent
    )


def test_ranks_may_be_stuck_only_when_they_wait_for_each_other_for_long() -> None:
    """One late rank that computes is not a reason for a merge in every second."""
    assert may_be_stuck([wait(0, 1), wait(1, 0, sequence=9)])
    assert not may_be_stuck([wait(0, 1), wait(1, 0, sequence=9, waited_us=LONG - 1)])
    assert not may_be_stuck([wait(0, 1), wait(2, 1)])
    assert may_be_stuck([wait(0), wait(1)])


def test_standing_finding_needs_a_long_wait_of_all_its_ranks() -> None:
    """An asynchronous call may have been started and not be waited for."""
    missing = replace(DEADLOCK, kind=FindingKind.MISSING_MEMBER)
    waits = [wait(0, 1), wait(1, 0)]
    assert select_standing_findings([DEADLOCK, missing], waits) == (DEADLOCK,)
    assert select_standing_findings([DEADLOCK], [wait(0, 1)]) == ()


def test_ranks_that_wait_for_a_stuck_rank_are_stuck_too() -> None:
    """A rank outside of the circle cannot continue either; others can."""
    waits = mark_stuck_waits([wait(0, 1), wait(2, 0), wait(3, 4)], [DEADLOCK])
    assert [each.stuck for each in waits] == [True, True, False]


def test_hint_about_a_deadlock_has_its_cause_and_no_settings() -> None:
    """Both groups of a deadlock lead to one warning, which suggests no timeout."""
    hints = [explain_hint(each, [DEADLOCK], {}) for each in (HINT, replace(HINT, group="q"))]
    assert {hint.cause for hint in hints} == {DEADLOCK.text}
    assert all(hint.settings == () and "settings" not in hint.reason for hint in hints)
    (text,) = build_warnings(hints).values()
    assert text == f"{DEADLOCK.text}; a longer timeout does not help"
    for other in (replace(DEADLOCK, iteration=5), replace(DEADLOCK, ranks=(0, 2))):
        assert explain_hint(HINT, [other], {}) == HINT


def test_hint_about_a_rank_that_ended_names_that() -> None:
    """A rank that closed its session will not arrive."""
    ended = replace(session(1, "torch 2.5.0", "CPU"), state=SessionState.CLOSED)
    assert "rank 1 has ended" in explain_hint(HINT, [], {1: ended}).cause
    assert explain_hint(replace(HINT, waiting=False), [], {1: ended}).cause == ""


def test_hints_file_of_the_last_version_has_no_causes() -> None:
    """A tree that an older daemon wrote is read."""
    limit = '{"name": "n", "limit_us": 1, "source": "s", "ranks": []}'
    old = (
        '{"version": 1, "hints": [{"job_id": "j", "group": "g", "backend": "", "level": "ok",'
        ' "waiting": false, "kind": "barrier", "name": "n", "iteration": 0, "sequence": 0,'
        ' "first_rank": 0, "last_rank": 1, "spread_us": 1, "dump_us": 0, "limit": ' + limit + ","
        ' "limits": [], "projected_us": 1, "projected_iteration": -1, "settings": [],'
        ' "reason": "r", "share": 1.0}]}'
    )
    (hint,) = parse_hints(old)
    assert hint.cause == ""
