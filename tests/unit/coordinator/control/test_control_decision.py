"""Tests of decisions on the control of a job: its first iteration, and what became of each rank."""

from __future__ import annotations

import pytest

from rankdump._core.job_control import ControlAnswer, ControlledRank
from rankdump._core.status import SessionState, SessionStatus
from rankdump.errors import RejectedError
from rankdumpd.coordinator.control import (
    MIN_LEAD_S,
    ControlledSession,
    choose_iteration,
    judge_freeze,
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
            session(2, SessionState.LOST, ended_by="SIGKILL"),
            session(3, SessionState.LOST, last_events_known=True),
            # It may connect again in a moment.
            session(4, SessionState.LOST),
        ],
    )
    assert {each.rank: each.absence for each in found} == {
        0: "it has ended its session",
        1: "",
        2: "its process is gone (SIGKILL)",
        3: "its process is gone (it is not known how it ended)",
        4: "",
    }


@pytest.mark.parametrize(
    ("states", "line"),
    [
        (["closed", "closed"], "job 'job' has ended: none of its ranks runs"),
        (["lost", "closed"], "no rank of job 'job' is connected to its agent: of 2 ranks 1 are"),
        (["lost", "lost"], "of 2 ranks 2 are lost, and 0 have ended"),
    ],
)
def test_job_without_a_connected_rank_is_refused(states, line):
    with pytest.raises(RejectedError, match=line):
        list_sessions("job", [session(at, SessionState(each)) for at, each in enumerate(states)])


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
    assert not any(each.unconfirmed for each in result.ranks)


def test_rank_that_does_not_confirm_may_have_the_change():
    """Its agent was killed after the question: nobody knows whether the order has reached it."""
    sessions = [ControlledSession(0, "s0", ""), ControlledSession(1, "s1", "not connected")]
    asked = {"s0": position(10, 1), "s1": position(10, 1)}
    result = judge_ranks(sessions, asked, {"s1": ControlAnswer("o", True, 20)}, 20, waited_s=15)
    [apart] = result.exceptions
    assert (apart.rank, apart.iteration, apart.unconfirmed) == (0, None, True)
    assert apart.reason.endswith("; it begins in iteration 20, or not at all")
    # It had connected again in time.
    assert result.ranks[1] == ControlledRank(1, 20)


@pytest.mark.parametrize(("running", "chosen"), [(10, 50), (60, 62)])
def test_ranks_that_have_the_order_already_are_joined_if_possible(running, chosen):
    """The coordinator ended after it had given the order to some."""
    ranks = [position(40, 1_000_000, pending=50, begun=50), position(running, 1_000_000)]
    assert choose_iteration(ranks, round_s=0) == chosen
    sessions = [ControlledSession(rank, f"s{rank}", "") for rank in range(2)]
    asked = {f"s{rank}": answer for rank, answer in enumerate(ranks)}
    applied = {"s0": ControlAnswer("o", True, 50), "s1": ControlAnswer("o", True, chosen)}
    result = judge_ranks(sessions, asked, applied, chosen, waited_s=15)
    assert [each.iteration for each in result.ranks] == [50, chosen]
    assert [each.rank for each in result.exceptions] == ([] if chosen == 50 else [0])


def test_note_of_a_rank_is_no_exception():
    sessions, asked = [ControlledSession(0, "s0", "")], {"s0": position(10, 1)}
    applied = {"s0": ControlAnswer("o", True, 20, note="'a' matches none")}
    result = judge_ranks(sessions, asked, applied, 20, waited_s=15)
    assert (result.exceptions, result.ranks[0].note) == ((), "'a' matches none")


def test_frozen_are_the_ranks_whose_agents_have_steps_of_them():
    sessions = [ControlledSession(0, "s0", ""), ControlledSession(1, "s1", "gone")]
    sessions += [ControlledSession(2, "s2", "gone"), ControlledSession(3, "s3", "")]
    asked = {"s0": position(7, 1), "s1": position(6, 1), "s3": position(0, 1, refused="no box")}
    result = judge_freeze(sessions, asked, {}, 7)
    assert [each.iteration for each in result.ranks] == [7, 7, None, None]
    assert [each.reason for each in result.ranks] == ["", "", "gone", "no box"]
    # An agent that freezes nothing names the ranks that run.
    result = judge_freeze(sessions, asked, {0: "it was frozen 3 s ago"}, 7)
    assert [each.reason for each in result.ranks][:2] == ["it was frozen 3 s ago", "gone"]
