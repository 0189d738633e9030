"""Tests of decisions on the control of a job: its first iteration, and what became of each rank."""

from __future__ import annotations

import pytest

from rankdump._core.job_control import ControlAnswer, ControlledRank
from rankdump._core.status import SessionState, SessionStatus
from rankdump.errors import RejectedError
from rankdumpd.coordinator.control.control_decision import (
    MIN_LEAD_S,
    ControlledSession,
    choose_iteration,
    judge_ranks,
    list_sessions,
)


def position(iteration: int, step_us: int, **fields) -> ControlAnswer:
    return ControlAnswer("o", False, iteration, step_us, **fields)


def session(rank: int, state: SessionState, **fields) -> SessionStatus:
    return SessionStatus("job", f"s{rank}", rank, 4, rank, "h", 1, state=state, **fields)


@pytest.mark.parametrize("step_us", [1_000, 20_000, 3_000_000])
@pytest.mark.parametrize("round_s", [0.0, 1.2])
def test_no_rank_reaches_the_chosen_iteration_before_the_order(step_us, round_s):
    """Not even in the time that the first messages took, and at least a second."""
    chosen = choose_iteration([position(10, step_us)], round_s=round_s)
    assert (chosen - 10 - 1) * step_us >= (MIN_LEAD_S + round_s) * 1e6
    assert (chosen - 12) * step_us <= (MIN_LEAD_S + round_s) * 1e6


def test_rank_that_is_farthest_decides():
    ranks = [position(10, 1_000_000), position(40, 1_000_000), position(12, 100_000)]
    assert choose_iteration(ranks, round_s=0) == 42


def test_steps_without_a_known_time_do_not_postpone_it_for_ever():
    assert choose_iteration([position(0, 0)], round_s=0) <= 1 + 1000 * MIN_LEAD_S


def test_change_does_not_begin_before_an_earlier_one():
    ranks = [position(10, 1_000_000, pending=500), position(10, 1_000_000)]
    assert choose_iteration(ranks, round_s=0) == 500


def test_newest_session_of_each_rank_is_asked():
    found = list_sessions(
        "job",
        [
            session(1, SessionState.OPEN, attempt=1),
            session(1, SessionState.LOST),
            session(0, SessionState.CLOSED),
            session(2, SessionState.LOST),
        ],
    )
    assert [(each.rank, bool(each.absence)) for each in found] == [(0, True), (1, False), (2, True)]


@pytest.mark.parametrize("state", [SessionState.CLOSED, SessionState.LOST])
def test_job_that_has_ended_is_refused(state):
    with pytest.raises(RejectedError, match="job 'job' has ended: none of its ranks runs"):
        list_sessions("job", [session(0, state)])


def test_every_rank_that_is_apart_is_named_with_the_reason():
    sessions = [ControlledSession(rank, f"s{rank}", "") for rank in range(5)]
    sessions.append(ControlledSession(5, "s5", "it has ended its session"))
    asked = {f"s{rank}": position(10, 1) for rank in range(4)}
    asked["s3"] = position(10, 1, refused="support_device excludes it")
    applied = {
        "s0": ControlAnswer("o", True, 20),
        "s1": ControlAnswer("o", True, 23),
        "s2": ControlAnswer("o", True, 11, refused="the agent is of an earlier release"),
    }
    result = judge_ranks(sessions, asked, applied, 20, waited_s=15)
    assert result.iteration == 20
    assert result.ranks[0] == ControlledRank(0, 20)
    assert result.ranks[1] == ControlledRank(1, 23, "it was past iteration 20 already")
    reasons = {each.rank: each.reason for each in result.exceptions}
    assert reasons.keys() == {1, 2, 3, 4, 5}
    assert [each.iteration for each in result.ranks[2:]] == [None] * 4
    assert "earlier release" in reasons[2]
    assert reasons[3] == "support_device excludes it"
    assert reasons[4].startswith("no answer within 15 s")
