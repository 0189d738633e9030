"""Decisions on the control of a job: the iteration that all ranks can begin a change with, and what
became of it on each. Pure; answers are those of ranks by their sessions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankdump._core.job_control import ControlAnswer, ControlledRank, ControlResult
from rankdump._core.status import SessionState, SessionStatus
from rankdump.errors import RejectedError

MIN_STEP_US = 1_000
"""Shortest duration of a step in this computation; shorter ones count as this long."""
MIN_LEAD_S = 1.0
"""Shortest time between the choice of an iteration and its begin."""


@dataclass(frozen=True, slots=True)
class ControlledSession:
    """The newest session of a rank."""

    rank: int
    session_id: str
    absence: str
    """Why it is not asked; empty when it is."""


def list_sessions(job_id: str, sessions: Sequence[SessionStatus]) -> tuple[ControlledSession, ...]:
    """Return the sessions of a job; RejectedError when none of its ranks runs and is connected."""
    newest = {each.rank: each for each in sorted(sessions, key=lambda each: each.attempt)}
    states = Counter(each.state for each in newest.values())
    if states[SessionState.LOST] and not states[SessionState.OPEN]:
        raise RejectedError(
            f"no rank of job {job_id!r} is connected to its agent: of {len(newest)} ranks "
            f"{states[SessionState.LOST]} are lost, and {states[SessionState.CLOSED]} have ended"
        )
    if not states[SessionState.OPEN]:
        raise RejectedError(f"job {job_id!r} has ended: none of its ranks runs")
    return tuple(
        ControlledSession(rank, each.session_id, _explain_absence(each))
        for rank, each in sorted(newest.items())
    )


def _explain_absence(session: SessionStatus) -> str:
    if session.state is SessionState.CLOSED:
        return "it has ended its session"
    # Another one may connect again in a moment, as ranks do when their shared memory is ready.
    if session.state is SessionState.LOST and (session.ended_by or session.last_events_known):
        return f"its process is gone ({session.ended_by or 'it is not known how it ended'})"
    return ""


def choose_iteration(positions: Sequence[ControlAnswer], *, round_s: float) -> int:
    """Return the first iteration that no rank begins before the next messages reach it.

    `round_s` is the time that the first ones took, with the wait for the next report of each agent.
    Every rank may have gone on since it answered. No change begins before an earlier one. Ranks
    that have the order already keep their iteration, and are joined there if that is possible.
    """
    lead_us = (MIN_LEAD_S + round_s) * 1e6
    return max(
        max(each.pending, each.iteration + 1 + math.ceil(lead_us / max(each.step_us, MIN_STEP_US)))
        if each.begun is None
        else each.begun
        for each in positions
    )


def judge_freeze(
    sessions: Sequence[ControlledSession],
    asked: Mapping[str, ControlAnswer],
    unreached: Mapping[int, str],
    iteration: int | None,
) -> ControlResult:
    """Return which ranks are frozen; `unreached` says of some why their agent has not frozen them.

    Agents answer for their ranks. The steps of a rank that has ended lie in its agent as long as
    its job runs.
    """
    ranks: list[ControlledRank] = []
    for session in sessions:
        answer = asked.get(session.session_id)
        reason = answer.refused if answer else session.absence
        # Agents that freeze nothing name the ranks that run alone.
        reason = reason or unreached.get(session.rank, session.absence if unreached else "")
        if iteration is None and not reason:
            reason = "no rank has said which iteration it runs"
        ranks.append(ControlledRank(session.rank, None if reason else iteration, reason))
    return ControlResult(iteration, tuple(ranks))


def judge_ranks(
    sessions: Sequence[ControlledSession],
    asked: Mapping[str, ControlAnswer],
    applied: Mapping[str, ControlAnswer],
    iteration: int | None,
    *,
    waited_s: float,
) -> ControlResult:
    """Return what became of an order on each rank, by the answers in both rounds."""
    silence = (
        f"no answer within {waited_s:.0f} s: its agent is away, or of an earlier release, or its "
        "process is stopped or gone"
    )
    ranks: list[ControlledRank] = []
    for session in sessions:
        first, second = asked.get(session.session_id), applied.get(session.session_id)
        # It may have connected again since it was listed.
        reason = first.refused if first else session.absence or silence
        if reason or iteration is None:
            ranks.append(ControlledRank(session.rank, None, reason))
        elif second is None:
            reason = f"{silence}; it begins in iteration {iteration}, or not at all"
            ranks.append(ControlledRank(session.rank, None, reason, unconfirmed=True))
        else:
            ranks.append(_judge_applied(session.rank, second, iteration))
    return ControlResult(iteration, tuple(ranks))


def _judge_applied(rank: int, answer: ControlAnswer, iteration: int) -> ControlledRank:
    """Return what became of an order on a rank that has answered in both rounds."""
    if answer.refused:
        return ControlledRank(rank, None, answer.refused)
    reason = ""
    if answer.iteration > iteration:
        reason = f"it was past iteration {iteration} already"
    elif answer.iteration < iteration:
        reason = (
            "it had the order before the coordinator ended, and others were past that iteration"
        )
    return ControlledRank(rank, answer.iteration, reason, note=answer.note)
