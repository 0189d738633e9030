"""Freezes that are under way: how they join that of the coordinator, and what is missing."""

from __future__ import annotations

from pathlib import Path

from rankdump._core.black_box import FaultKind
from rankdump._core.freeze_record import (
    FreezeReach,
    FreezeRecord,
    FrozenCause,
    MissingRank,
    UnreachedAgent,
)
from rankdumpd.agent.blackbox.freeze_state import (
    FreezeOrder,
    OpenFreeze,
    describe_rings,
    list_notes,
    make_job_freeze,
)

OWN = FrozenCause(FaultKind.EXCEPTION, 7, "it raised", 50, 2)
FIRST = FrozenCause(FaultKind.NON_FINITE, 5, "NaN in an output", 40, 0)
RECORD = FreezeRecord("j", 1, 7, "here", 8, 60, (OWN,))


def make_open() -> OpenFreeze:
    return OpenFreeze(RECORD, Path("raw"), 0.0, 1.0, 3.0, last_iteration=9)


def order(cause: FrozenCause, iteration: int) -> FreezeOrder:
    return FreezeOrder("j", 1, cause, iteration)


def test_freeze_takes_over_iteration_and_cause_and_keeps_its_own():
    freeze = make_open()
    assert freeze.join(order(FIRST, 5))
    assert (freeze.record.iteration, freeze.last_iteration) == (5, 7)
    assert freeze.record.causes == (FIRST, OWN)
    assert make_job_freeze(freeze.record).key == ("j", 1, 5)
    # Answers of the coordinator repeat it.
    assert not freeze.join(order(FIRST, 5))
    assert freeze.record.causes == (FIRST, OWN)


def test_own_freeze_that_comes_back_changes_nothing():
    freeze = make_open()
    assert not freeze.join(order(OWN, 7))
    assert freeze.record == RECORD


def test_first_cause_of_the_same_iteration_comes_first():
    freeze = make_open()
    assert freeze.join(order(FIRST, 7))
    assert (freeze.record.iteration, freeze.record.causes) == (7, (FIRST, OWN))


def test_order_has_the_iteration_of_the_coordinator_or_of_its_cause():
    assert (order(FIRST, 9).iteration, FreezeOrder("j", 1, FIRST).iteration) == (9, 5)
    assert order(FIRST, 0).iteration == 0


def test_ranks_of_agents_that_were_not_reached_are_missing():
    reach = FreezeReach(3, 1, (UnreachedAgent("b", (4, 5), "its agent last reported 9 s ago"),))
    record = describe_rings(RECORD, (), (), reach)
    reason = "its agent last reported 9 s ago (host b)"
    assert record.missing == (MissingRank(4, reason), MissingRank(5, reason))
    assert (record.agents, record.frozen_agents) == (3, 1)
    assert list_notes(record) == (
        "frozen by 1 of the 3 agents of the job",
        f"ranks 4-5 are missing: {reason}",
    )
    assert list_notes(RECORD) == ()
