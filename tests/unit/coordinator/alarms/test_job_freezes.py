"""Freezes of a job over its agents: which are its own, and how far they have come."""

from __future__ import annotations

import dataclasses

import pytest

from rankdump._core.black_box import FaultKind
from rankdump._core.freeze_record import FreezeReach, FrozenCause, JobFreeze
from rankdump._wire.black_box_messages import MAX_LATER_CAUSES
from rankdumpd.coordinator.alarms.job_freezes import (
    ANSWER_TIME_S,
    MAX_KNOWN_FREEZES,
    REACH_INTERVAL_S,
    RELAYED_S,
    AgentRanks,
    JobFreezes,
    begins_freeze,
    measure_reach,
)

AGENTS = {
    "a": AgentRanks("host a", (0, 1), ""),
    "b": AgentRanks("host b", (2, 3), "its agent last reported 9 s ago"),
    "c": AgentRanks("host c", (4,), ""),
}


def freeze(iteration: int, attempt: int = 0, at_us: int = 0) -> JobFreeze:
    cause = FrozenCause(FaultKind.JUMP, iteration, "it jumped", at_us, 0)
    return JobFreeze("j", attempt, iteration, cause)


def list_keys(freezes: JobFreezes, now_s: float) -> list[int]:
    relayed = freezes.list_relayed(lambda attempt: AGENTS, now_s=now_s)
    return [each.freeze.iteration for each in relayed]


@pytest.mark.parametrize(
    ("known", "current", "seen", "begins"),
    [
        ([], [], [], True),
        ([5], [5], [5], False),
        ([5], [], [5], False),
        # Another one that was found by somebody who did not know of it.
        ([4], [4], [5], False),
        ([4], [4], [4, 5], True),
        ([3, 4], [3, 4], [3, 5], False),
    ],
)
def test_freeze_is_one_of_its_own_unless_it_is_part_of_the_current_one(
    known, current, seen, begins
):
    keys, own = [("j", 0, at) for at in known], [freeze(at) for at in current]
    assert begins_freeze(freeze(5), keys, own, [("j", 0, at) for at in seen]) is begins


def test_freeze_of_another_attempt_is_one_of_its_own():
    assert begins_freeze(freeze(5, attempt=1), [("j", 0, 5)], [freeze(5)], [])


def test_first_freeze_of_two_agents_is_relayed_once_and_for_its_time():
    freezes = JobFreezes()
    freezes.add_reported("a", [freeze(5)], now_s=1.0)
    freezes.add_reported("b", [freeze(7)], now_s=1.1)
    assert list_keys(freezes, 1.2) == [5]
    # The second agent has joined the first freeze.
    freezes.add_reported("b", [freeze(5)], now_s=2.0)
    assert list_keys(freezes, 1.0 + RELAYED_S - 0.1) == [5]
    assert list_keys(freezes, 1.0 + RELAYED_S) == []
    # An agent that joined late still reports it: that is no new freeze.
    freezes.add_reported("b", [freeze(5)], now_s=2.0 + RELAYED_S)
    assert list_keys(freezes, 2.0 + RELAYED_S) == []


def test_later_freeze_of_an_agent_that_knew_the_first_is_relayed_too():
    freezes = JobFreezes()
    freezes.add_reported("a", [freeze(5)], now_s=1.0)
    freezes.add_reported("b", [freeze(5), freeze(9)], now_s=20.0)
    assert list_keys(freezes, 21.0) == [5, 9]


def test_coordinator_that_starts_again_learns_the_same_from_the_repeated_reports():
    first, again = JobFreezes(), JobFreezes()
    first.add_reported("a", [freeze(5)], now_s=1.0)
    first.add_reported("a", [freeze(5), freeze(9)], now_s=9.0)
    again.add_reported("a", [freeze(5), freeze(9)], now_s=9.5)
    again.add_reported("b", [freeze(5)], now_s=9.6)
    assert list_keys(first, 10.0) == list_keys(again, 10.0) == [5, 9]


def list_later(freezes: JobFreezes, now_s: float) -> list[list[int]]:
    relayed = freezes.list_relayed(lambda attempt: AGENTS, now_s=now_s)
    return [[cause.iteration for cause in each.later_causes] for each in relayed]


def test_alarm_during_a_freeze_is_a_later_cause_of_it():
    freezes = JobFreezes()
    assert freezes.add_alarm(freeze(3), now_s=0.0)
    assert not freezes.add_alarm(freeze(4), now_s=1.0)
    # It goes on, and is found again and again.
    assert not freezes.add_alarm(freeze(4, at_us=5), now_s=2.0)
    assert not freezes.add_alarm(freeze(3, at_us=5), now_s=2.0)
    assert list_later(freezes, 2.0) == [[4]]
    for at in (3, 4):
        assert not freezes.add_alarm(freeze(at), now_s=RELAYED_S + 1)
    assert freezes.add_alarm(freeze(5), now_s=RELAYED_S + 1)
    assert freezes.add_alarm(freeze(4, attempt=1), now_s=RELAYED_S + 1)


def test_alarm_in_the_iteration_of_a_freeze_of_an_agent_is_a_later_cause():
    freezes = JobFreezes()
    freezes.add_reported("a", [freeze(5)], now_s=1.0)
    wait = FrozenCause(FaultKind.WAIT, 5, "it waits", 9)
    assert not freezes.add_alarm(JobFreeze("j", 0, 5, wait), now_s=2.0)
    [relayed] = freezes.list_relayed(lambda attempt: AGENTS, now_s=2.0)
    assert relayed.later_causes == (wait,)


def test_later_causes_are_bounded():
    freezes = JobFreezes()
    for at in range(3 * MAX_LATER_CAUSES):
        freezes.add_alarm(freeze(at), now_s=1.0)
    assert list_later(freezes, 1.0) == [[*range(1, MAX_LATER_CAUSES + 1)]]


def test_known_freezes_are_bounded():
    freezes = JobFreezes()
    for at in range(3 * MAX_KNOWN_FREEZES):
        assert freezes.add(freeze(at), now_s=at * RELAYED_S)
    assert len(freezes._known) == MAX_KNOWN_FREEZES


def test_reach_names_agents_that_had_time_to_answer():
    assert measure_reach(AGENTS, {"a": "", "gone": ""}, is_due=False) == FreezeReach(3, 1)
    reach = measure_reach(AGENTS, {"a": ""}, is_due=True)
    assert [(each.host, each.ranks) for each in reach.unreached] == [
        ("host b", (2, 3)),
        ("host c", (4,)),
    ]
    assert reach.unreached[0].reason == "its agent last reported 9 s ago"
    assert reach.unreached[1].reason == "its agent has not answered yet"
    assert reach.is_settled
    assert not FreezeReach(3, 1).is_settled


def test_reach_has_the_reasons_of_agents_that_refuse():
    """As soon as all have answered."""
    answers = {"a": "", "b": "it was frozen 3 s ago", "c": ""}
    reach = measure_reach(AGENTS, answers, is_due=False)
    assert (reach.agents, reach.frozen_agents, reach.is_settled) == (3, 2, True)
    [unreached] = reach.unreached
    assert (unreached.host, unreached.reason) == ("host b", "it was frozen 3 s ago")
    assert measure_reach(AGENTS, dict.fromkeys(AGENTS, ""), is_due=False) == FreezeReach(3, 3)


def test_later_freeze_of_an_agent_that_refused_the_first_is_relayed_too():
    freezes = JobFreezes()
    freezes.add_reported("a", [freeze(5)], now_s=1.0)
    refused = dataclasses.replace(freeze(5), refusal="it had no step")
    freezes.add_reported("b", [refused, freeze(9)], now_s=20.0)
    assert list_keys(freezes, 21.0) == [5, 9]
    relayed = freezes.list_relayed(lambda attempt: AGENTS, now_s=21.0)
    assert not any(each.freeze.refusal for each in relayed)


def test_reach_follows_the_reports_of_agents():
    freezes = JobFreezes()
    freezes.add_reported("a", [freeze(5)], now_s=0.0)
    for now_s, frozen, late in ((0.0, 1, 0), (ANSWER_TIME_S, 1, 2)):
        [relayed] = freezes.list_relayed(lambda attempt: AGENTS, now_s=now_s)
        assert (relayed.reach.frozen_agents, len(relayed.reach.unreached)) == (frozen, late)
    freezes.add_reported("c", [freeze(5)], now_s=ANSWER_TIME_S)
    now_s = ANSWER_TIME_S + REACH_INTERVAL_S
    [relayed] = freezes.list_relayed(lambda attempt: AGENTS, now_s=now_s)
    assert [each.host for each in relayed.reach.unreached] == ["host b"]
